"""Does a calibrated cluster predict what plans take, and is the chosen plan the fastest? Two ranks of this machine, real runtime, MPI.

    python benchmarks/measured_plans.py [--runs runs] [--seed 0] [--repeats 5]

Twenty valid plans are drawn by seed before anything is measured: one mesh of both ranks or a stage on each, any cut, any strategies,
with and without recomputation, several numbers of microbatches. Then `calibrate cluster=laptop` measures primitives (no plan is among
them), all plans are predicted from these alone, and then run in turns, beside the plan that the search chooses on the calibrated cluster
and those of other systems. A repeat goes through all of them several times, each time in an order of its own, a few steps of each: a slow
half minute of the machine is no single plan's. It is the median of a plan's steps, on the slower rank. The least of many noisy times is
too small, so those that may be the fastest run again, beside the chosen one: these rounds alone say how near it comes.

Promises, status 1 where one does not hold: measured step times differ by 2 and more; at least 12 of the drawn plans are distinguishable,
each from each (95 % interval of the ratio of their times in a round); over these the rank correlation of prediction and measurement is 0.9
at the least; the chosen plan takes at most 5 % longer than the fastest of all (the mean of the ratios of the last rounds), and what was
predicted within 15 %. The last line is one JSON object.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import mean, stdev

import jax
import numpy as np

from alpa_hpc.baselines.baseline import Baseline, Inapplicable, baseline_restriction
from alpa_hpc.baselines.optimum import restricted_optimum
from alpa_hpc.calibrate_job import calibrate
from alpa_hpc.calibration.request import CalibrationRequest
from alpa_hpc.calibration.trials import CPU_SIZES
from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.commands.calibrate import REPEATS, checked, write_fit
from alpa_hpc.config import ExperimentConfig, compose_calibration, compose_experiment
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.experiment import launcher_for
from alpa_hpc.launch.files import read_json, write_json, write_text
from alpa_hpc.launch.mpirun import CPU_RANK, Place, Ranks, run_ranks
from alpa_hpc.parts import prepared
from alpa_hpc.plan.codec import plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.families import pricer_for
from alpa_hpc.planner.lookup import make_plan
from alpa_hpc.planner.refine import modelled
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan, analytic_seconds, find_candidates, pick, simulate_partition, simulate_stages
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.wiring import port_names
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.cost_table import StageOption
from alpa_hpc.stages.objective import StageChoice, StagePartition
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.training.prepare import Prepared

NUM_PLANS, NUM_PASSES, NUM_STEPS = 20, 5, 4
FINAL_REPEATS, FINAL_MARGIN = 10, 1.1  # of plans within this factor of the fastest
LEAST_SPREAD, LEAST_DISTINGUISHABLE, LEAST_CORRELATION, MOST_OVER_BEST, MOST_OFF = 2.0, 12, 0.9, 1.05, 0.15
MICROBATCHES = (1, 2, 4, 8, 16)
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # two-sided 95 %, by repeats
SEARCHES = ("inter_only", "pp_dp", "megatron")
PROBLEM = (
    *("model.num_layers=2", "model.hidden=256", "model.num_heads=8", "model.vocab=1024", "model.sequence=64", "training.batch_size=32"),
    *("profiling=analytic", "data=synthetic"),
)
SCHEDULE, CHOSEN = ScheduleKind.ONE_F_ONE_B, "chosen"
RANK = Path(__file__).with_name("measured_plans_rank.py")


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A plan, not priced yet."""

    name: str
    num_microbatches: int
    choices: tuple[StageChoice, ...]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A plan that was run: seconds of a step, predicted, for each repeat, and for each of the last rounds if it took part in them."""

    name: str
    words: str
    predicted: float
    seconds: tuple[float, ...]
    final: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean seconds of a step."""
        return mean(self.seconds)

    @property
    def margin(self) -> float:
        """Half of the 95 % interval of the mean."""
        return margin_of(self.seconds)


def main(runs: str, seed: int, repeats: int) -> int:
    jax.config.update("jax_platforms", "cpu")  # here nothing is run
    described = {number: config_for("laptop", number, runs) for number in MICROBATCHES}
    made = {number: prepared(config) for number, config in described.items()}
    drawn = draw_plans(random.Random(seed), made, described[1].cluster)
    cluster = calibrated(runs)
    pricers = {number: StagePricer(one.step, cluster) for number, one in made.items()}
    plans = {one.name: priced(one, pricers[one.num_microbatches]) for one in drawn}
    plans |= joined(named_plans(made, cluster, runs), cluster)
    measured = run_plans(plans, cluster, runs, repeats)
    return report(measured[:NUM_PLANS], measured[NUM_PLANS:])


def config_for(cluster: str, num_microbatches: int, runs: str, *overrides: str) -> ExperimentConfig:
    words = (f"cluster={cluster}", f"schedule.num_microbatches={num_microbatches}", f"runs={runs}", *PROBLEM, *overrides)
    return compose_experiment("quickstart", words)


def calibrated(runs: str) -> ClusterSpec:
    """The machine as it is, two ranks of it; measured now, if it was not before."""
    config = checked(compose_calibration(("cluster=laptop", f"runs={runs}")))
    fit, path = calibrate(config, CalibrationRequest(CPU_SIZES, REPEATS), launcher_for(config), again=False)
    write_fit(fit, path)
    return fit.cluster


# ---- plans


def draw_plans(draw: random.Random, made: Mapping[int, Prepared], cluster: ClusterSpec) -> list[Drawn]:
    """Different plans, drawn on the cluster as it is described: what it really does has no part in this."""
    pricers = {number: StagePricer(one.step, cluster) for number, one in made.items()}
    plans: dict[tuple[object, ...], Drawn] = {}
    while len(plans) < NUM_PLANS:
        number = draw.choice(MICROBATCHES)
        stages = draw_stages(draw, pricers[number])
        content = (number, *((candidate, tuple(layer.choices for layer in stage.layers)) for candidate, stage in stages))
        choices = tuple(as_choice(candidate) for candidate, _ in stages)
        plans.setdefault(content, Drawn(f"drawn {len(plans)}", number, choices, tuple(stage for _, stage in stages)))
    return list(plans.values())


def draw_stages(draw: random.Random, pricer: StagePricer) -> list[tuple[StageCandidate, Stage]]:
    last = len(pricer.step.layers)
    shape = draw.choice((MeshShape(2, 1), MeshShape(1, 2)))
    candidates = [StageCandidate(0, last, Submesh(1, 2), shape, draw.random() < 0.3)]
    if draw.random() < 0.4:
        cut = draw.randrange(1, last)
        ends = ((0, cut), (cut, last))
        candidates = [StageCandidate(start, stop, Submesh(1, 1), MeshShape(1, 1), draw.random() < 0.3) for start, stop in ends]
    share = draw.random()  # of the choices that are drawn; the others stay as the solver has them
    return [(one, Stage(one.shape, perturbed(pricer.choose(one, 0), draw, share))) for one in candidates]


def perturbed(layers: Sequence[ChosenLayer], draw: random.Random, share: float) -> tuple[ChosenLayer, ...]:
    """Other strategies for some of the nodes, the same for ports that layers share; all that can be chosen is valid."""
    ports: dict[tuple[str, int], int] = {}
    found: list[ChosenLayer] = []
    for layer in layers:
        problem = layer.problem
        choices = [
            draw.randrange(len(labels)) if draw.random() < share else choice
            for labels, choice in zip(problem.labels, layer.choices, strict=True)
        ]
        for name, node in zip(port_names(problem.layer, problem.shared), problem.ports, strict=True):
            choices[node] = ports.setdefault(name, choices[node])
        found.append(ChosenLayer(problem, tuple(choices)))
    return tuple(found)


def as_choice(one: StageCandidate) -> StageChoice:
    return StageChoice(one.start, one.stop, one.submesh, StageOption(one.shape, one.remat, 0, 0.0, 0.0, 0.0, 0.0, 0.0, measured=False))


def priced(one: Drawn, pricer: StagePricer) -> SimulatedPlan:
    """A plan in virtual time, by the calibrated cluster alone."""
    partition = StagePartition(one.choices, 0.0, 0.0)
    return simulate_stages(pricer, partition, one.stages, SCHEDULES[SCHEDULE], analytic_seconds(pricer))


def named_plans(made: Mapping[int, Prepared], cluster: ClusterSpec, runs: str) -> dict[str, SimulatedPlan]:
    """What the search chooses, and what it may choose under the rules of others, each with the number of microbatches that suits it."""
    plans: dict[str, SimulatedPlan] = {}
    for search in ("wide", *SEARCHES):
        found = [one for number in MICROBATCHES if (one := searched(made[number], cluster, search, number, runs)) is not None]
        if found:
            plans[CHOSEN if search == "wide" else search] = fastest(found)
    for baseline in Baseline:
        found = [one for number in MICROBATCHES for one in ruled(made[number], cluster, baseline)]
        if found:
            plans[baseline.value] = fastest(found)
    return plans


def joined(plans: Mapping[str, SimulatedPlan], cluster: ClusterSpec) -> dict[str, SimulatedPlan]:
    """Plans that are one and the same under one name, `chosen = ZeRO-2`, so that none is held against itself."""
    names: list[tuple[ParallelPlan, list[str]]] = []
    for name, plan in plans.items():
        content = make_plan(plan.assembly.step, plan, cluster, SCHEDULE)
        known = next((found for other, found in names if other == content), None)
        if known is None:
            names.append((content, [name]))
        else:
            known.append(name)
    return {" = ".join(found): plans[found[0]] for _, found in names}


def fastest(plans: Sequence[SimulatedPlan]) -> SimulatedPlan:
    return min(plans, key=lambda plan: plan.timeline.seconds)


def searched(made: Prepared, cluster: ClusterSpec, name: str, num_microbatches: int, runs: str) -> SimulatedPlan | None:
    search = config_for(cluster.name, num_microbatches, runs, f"search={name}", "search.remat=search").search
    try:
        pricer = pricer_for(made.step, cluster, search, SCHEDULES[ScheduleKind.ONE_F_ONE_B])
        partitions = modelled(pricer, find_candidates(made.step, cluster, search), search).partitions
    except InfeasibleError:
        return None
    simulate = partial(simulate_partition, pricer, schedule=SCHEDULES[SCHEDULE], seconds_of=analytic_seconds(pricer))
    return pick([simulate(one) for one in partitions], cluster)


def ruled(made: Prepared, cluster: ClusterSpec, baseline: Baseline) -> list[SimulatedPlan]:
    """The plans of a baseline, one a shape of the mesh."""
    pricer, whole = StagePricer(made.step, cluster), Submesh(1, 2)
    plans: list[SimulatedPlan] = []
    for shape in (MeshShape(2, 1), MeshShape(1, 2)):
        restriction = baseline_restriction(baseline, made.step, shape)
        if not isinstance(restriction, Inapplicable):
            prices = pricer.solver(whole, shape, remat=False).prices
            optimum = restricted_optimum(made.step, prices, restriction, remat=False)
            candidate = StageCandidate(0, len(made.step.layers), whole, shape, remat=False)
            plans.append(priced(Drawn(baseline.value, 0, (as_choice(candidate),), (optimum.stage,)), pricer))
    return plans


# ---- measured


def run_plans(plans: Mapping[str, SimulatedPlan], cluster: ClusterSpec, runs: str, repeats: int) -> list[Measured]:
    """Run all plans in turns on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for number, plan in enumerate(plans.values()):
            step = plan.assembly.step
            write_text(Path(folder) / f"{number}.json", plan_to_json(make_plan(step, plan, cluster, SCHEDULE)))
            rows.append(step.num_microbatches)
        write_json(
            Path(folder) / "request.json", request(list(plans), rows, [f"cluster={cluster.name}", f"runs={runs}", *PROBLEM], repeats)
        )
        run_ranks(Ranks(2, 2, Place.THIS_MACHINE, {"JAX_PLATFORMS": "cpu", **CPU_RANK}), (str(RANK), folder), os.environ)
        seconds = read_json(Path(folder) / "seconds.json")
    return [
        Measured(name, words_of(plan), plan.timeline.seconds, tuple(found), tuple(seconds["final"].get(str(number), ())))
        for number, ((name, plan), found) in enumerate(zip(plans.items(), seconds["all"], strict=True))
    ]


def request(names: Sequence[str], microbatches: Sequence[int], overrides: Sequence[str], repeats: int) -> dict[str, object]:
    """What the ranks are to do."""
    chosen = next(number for number, name in enumerate(names) if is_chosen(name))
    turns = {"repeats": repeats, "passes": NUM_PASSES, "steps": NUM_STEPS, "final_repeats": FINAL_REPEATS, "final_margin": FINAL_MARGIN}
    return {"overrides": overrides, "microbatches": microbatches, "chosen": chosen, **turns}


def is_chosen(name: str) -> bool:
    """Whether a plan is what the search chose (and others may have chosen too)."""
    return name.split(" = ", maxsplit=1)[0] == CHOSEN


def words_of(plan: SimulatedPlan) -> str:
    """Layers and logical mesh of each stage, R where they are recomputed, and the number of microbatches."""
    stages = (
        f"{one.start}-{one.stop - 1} on {one.option.shape.rows}x{one.option.shape.cols}{'R' if one.option.remat else ''}"
        for one in plan.partition.stages
    )
    return f"{' | '.join(stages)}, B {plan.assembly.step.num_microbatches}"


def report(drawn: Sequence[Measured], named: Sequence[Measured]) -> int:
    """Print all, and whether the promises hold."""
    print(f"\n{'plan':44}{'stages':34}{'predicted ms':>13}{'measured ms':>13}{'95 %':>8}{'pred/meas':>11}")
    for one in sorted((*drawn, *named), key=lambda one: one.mean):
        ratio = one.predicted / one.mean
        print(f"{one.name:44}{one.words:34}{one.predicted * 1e3:13.1f}{one.mean * 1e3:13.1f}{one.margin * 1e3:8.1f}{ratio:11.2f}")
    apart = distinguishable(drawn)
    chosen = next(one for one in named if is_chosen(one.name))
    over_best, over_best_margin = final_rounds(chosen, [one for one in (*drawn, *named) if one.final])
    times = [one.mean for one in drawn]
    figures: dict[str, float] = {
        "spread": max(times) / min(times),
        "distinguishable": len(apart),
        "rank_correlation": rank_correlation([one.predicted for one in apart], [one.mean for one in apart]),
        "chosen_over_best": over_best,
        "chosen_over_best_margin": over_best_margin,
        "chosen_predicted_over_measured": chosen.predicted / chosen.mean,
        "within_15_percent": mean(abs(one.predicted / one.mean - 1) <= MOST_OFF for one in drawn),
    }
    promises = {
        "spread": figures["spread"] >= LEAST_SPREAD,
        "distinguishable": len(apart) >= LEAST_DISTINGUISHABLE,
        "rank_correlation": figures["rank_correlation"] >= LEAST_CORRELATION,
        "chosen_over_best": figures["chosen_over_best"] <= MOST_OVER_BEST,
        "chosen_predicted_over_measured": abs(figures["chosen_predicted_over_measured"] - 1) <= MOST_OFF,
    }
    print()
    for name, figure in figures.items():
        print(f"{name:32}{figure:8.3f}  {'' if promises.get(name, True) else 'NOT AS PROMISED'}")
    rows = {
        one.name: {"plan": one.words, "predicted": one.predicted, "seconds": one.seconds, "final": one.final} for one in (*drawn, *named)
    }
    print(json.dumps({"figures": figures, "promises": promises, "plans": rows}))
    return 0 if all(promises.values()) else 1


def final_rounds(chosen: Measured, finalists: Sequence[Measured]) -> tuple[float, float]:
    """How many times as long as the fastest finalist the chosen plan takes, and half of the 95 % interval of that, as parts of 1."""
    print(f"\n{'again, in the last rounds':44}{'measured ms':>13}{'chosen takes':>16}{'95 %':>7}")
    found: list[tuple[float, float]] = []
    for one in sorted(finalists, key=lambda one: mean(one.final)):
        ratios = [log(a / b) for a, b in zip(chosen.final, one.final, strict=True)]
        found.append((exp(mean(ratios)), margin_of(ratios)))
        print(f"{one.name:44}{mean(one.final) * 1e3:13.1f}{found[-1][0]:10.3f} times{found[-1][1]:7.3f}")
    return max(found)


def distinguishable(plans: Sequence[Measured]) -> list[Measured]:
    """As many of the plans as can be, each of which is told apart from each other one."""
    if not plans:
        return []
    first, rest = plans[0], plans[1:]
    others = [one for one in rest if told_apart(first, one)]
    found = [first, *distinguishable(others)]
    return found if len(others) == len(rest) else max(found, distinguishable(rest), key=len)


def told_apart(one: Measured, other: Measured) -> bool:
    """Whether the 95 % interval of how many times as long one takes, round by round (a machine has slow and fast minutes), is without 1."""
    ratios = [log(a / b) for a, b in zip(one.seconds, other.seconds, strict=True)]
    return abs(mean(ratios)) > margin_of(ratios)


def margin_of(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean."""
    return STUDENT[len(values)] * stdev(values) / len(values) ** 0.5


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(first) > 1 else 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="runs", help="folder of runs, in which the calibration is looked for, and kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5, choices=STUDENT)
    arguments = parser.parse_args()
    sys.exit(main(arguments.runs, arguments.seed, arguments.repeats))
