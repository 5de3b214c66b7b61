"""The paper's GPT points (Fig. 7 a): our plan, its published plan and the best Megatron-style plan, costed by one model and one simulator.

    python benchmarks/paper_gpt.py [EXPERIMENT ...]

PFLOPS = the paper's FLOP formula over simulated seconds. The cost model's one fitted number, the efficiency of matmuls, is fitted on
gpt350m alone. The last line of each point is one JSON object.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from alpa_hpc.baselines.dim_kinds import microbatch_rows
from alpa_hpc.baselines.manual import ManualStage, Pricers, manual_partition
from alpa_hpc.baselines.megatron import megatron_grid, megatron_stages
from alpa_hpc.baselines.published import GPT_POINTS, PublishedPoint
from alpa_hpc.baselines.restriction import FREE
from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.config import ExperimentConfig, compose_experiment
from alpa_hpc.errors import AlpaError
from alpa_hpc.experiment import launcher_for, plan_experiment
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.parts import prepared
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan, analytic_seconds, simulate_stages
from alpa_hpc.report.stopwatch import Stopwatch
from alpa_hpc.stages.objective import StageChoice


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A plan by name, with its PFLOPS and the figure that the paper shows for it (0 = none)."""

    name: str
    plan: SimulatedPlan
    pflops: float
    published: float

    @property
    def peak(self) -> int:
        """Bytes of the fullest device."""
        return max(self.plan.stage_bytes)


def main(names: Sequence[str]) -> None:
    jax.config.update("jax_platforms", "cpu")  # nothing is run: models are traced
    print("Simulated on the analytic cost model; efficiency fitted on gpt350m (1 GPU) alone, nothing on the other points.")
    for name in names or GPT_POINTS:
        try:
            compare(name, GPT_POINTS[name])
        except AlpaError as error:
            print(f"{name}: {error}")


def compare(name: str, point: PublishedPoint) -> None:
    config, watch = compose_experiment(name, ["mode=plan"]), Stopwatch()
    made = prepared(config, watch.time)
    with tempfile.TemporaryDirectory() as folder:
        _, record = plan_experiment(config, made, RunPaths(Path(folder) / name / "run"), launcher_for(config), watch)
    pricers = Pricers(made.step, config.cluster, {FREE: record.pricer})
    flop = config.model.iteration_flops(config.training.batch_size, remat=True)  # type: ignore[attr-defined]  # these are GPTs

    def row(label: str, plan: SimulatedPlan, published: float) -> Row:
        return Row(label, plan, flop / plan.timeline.seconds / 1e15, published)

    ours = row("our plan", record.chosen, point.alpa_pflops)
    alpa = row("paper's plan", simulated(pricers, config, point.stages), point.alpa_pflops)
    grid = [
        row(f"Megatron {degrees}", simulated(pricers, config, stages), point.megatron_pflops) for degrees, stages in megatron_plans(pricers)
    ]
    fitting = [one for one in grid if one.peak <= config.cluster.device.memory]
    best = max(fitting or grid, key=lambda one: one.pflops)
    print_point(config, ours, alpa, grid, best)
    print("planning seconds: " + ", ".join(f"{step} {seconds:.1f}" for step, seconds in watch.seconds.items()))
    rows = {"ours": ours, "paper_plan": alpa, "megatron": best}
    document: dict[str, Any] = {key: summary(one, config.cluster) for key, one in rows.items()}
    document["megatron_grid"] = [summary(one, config.cluster) for one in grid]
    print(json.dumps({"experiment": name, **document, "planning_seconds": watch.seconds}), flush=True)


def megatron_plans(pricers: Pricers) -> list[tuple[Any, tuple[ManualStage, ...]]]:
    num_layers, cluster = len(pricers.step.layers), pricers.cluster
    grid = megatron_grid(num_layers, microbatch_rows(pricers.step), cluster)
    return [(degrees, megatron_stages(degrees, num_layers, cluster)) for degrees in grid]


def simulated(pricers: Pricers, config: ExperimentConfig, stages: Sequence[ManualStage]) -> SimulatedPlan:
    """Cost given stages as our own plans are."""
    made = manual_partition(pricers, stages, float(config.cluster.device.memory))
    pricer = pricers.under(FREE)
    return simulate_stages(pricer, made.partition, made.stages, SCHEDULES[config.schedule.kind], analytic_seconds(pricer))


def print_point(config: ExperimentConfig, ours: Row, alpa: Row, grid: Sequence[Row], best: Row) -> None:
    cluster, memory = config.cluster, config.cluster.device.memory
    print(
        f"\n{config.name}: {cluster.num_devices} GPUs, {config.schedule.num_microbatches} microbatches, {config.layers.num_layers} layers, "
        f"{memory / 1e9:.1f} GB a GPU"
    )
    print(f"{'':28}{'seconds':>9} {'PFLOPS':>8} {'Fig. 7':>8} {'ratio':>7} {'GB':>6}")
    for one in (ours, alpa, *grid):
        mark = "" if one.peak <= memory else "  does not fit"
        mark += "  <- best Megatron-style plan" + (" that fits" if best.peak <= memory else ", none fits") if one is best else ""
        print(
            f"{one.name:28}{one.plan.timeline.seconds:9.2f} {one.pflops:8.4f} {one.published:8.3f} {one.pflops / one.published:7.2f} "
            f"{one.peak / 1e9:6.2f}{mark}"
        )
    ratios = [
        f"ours / {words} {ours.pflops / one.pflops:.3f}" + ("" if one.peak <= memory else " (which does not fit)")
        for words, one in (("paper's plan", alpa), ("best Megatron", best))
    ]
    print(", ".join(ratios))
    for one in (ours, alpa):
        print(f"stages of {one.name}: {stages_in_words(one.plan)}")


def stages_in_words(plan: SimulatedPlan) -> str:
    """Equal neighbours in one phrase, with the GB of each stage."""
    pairs = zip(plan.partition.stages, plan.stage_bytes, strict=True)
    phrases: list[str] = []
    for kind, group in itertools.groupby(pairs, key=lambda pair: kind_in_words(pair[0])):
        members = list(group)
        phrases.append(f"{len(members)} x {kind}, GB " + " ".join(f"{bytes_ / 1e9:.1f}" for _, bytes_ in members))
    return "; ".join(phrases)


def kind_in_words(choice: StageChoice) -> str:
    option, submesh = choice.option, choice.submesh
    remat = "" if option.remat else " kept"
    physical, logical = f"{submesh.num_nodes}x{submesh.devices_per_node}", f"{option.shape.rows}x{option.shape.cols}"
    return f"({choice.stop - choice.start} layers{remat} on {physical} as {logical})"


def summary(row: Row, cluster: ClusterSpec) -> dict[str, Any]:
    return {
        "name": row.name,
        "seconds": row.plan.timeline.seconds,
        "pflops": row.pflops,
        "published_pflops": row.published,
        "fits": row.peak <= cluster.device.memory,
        "stage_bytes": list(row.plan.stage_bytes),
        "stages": [kind_in_words(choice) for choice in row.plan.partition.stages],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
