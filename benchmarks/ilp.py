"""One stage's sharding problem, solved by us and by the paper's own ILP: seconds, objectives, ratios, growth with the number of blocks.

    python benchmarks/ilp.py [--seconds 120] [--blocks 2 8 32 128] [--experiment gpt1_3b] [--stages 40] [--stage-seconds 60]

1. GPT-1.3B's block 2, 8, 32 and 128 times, one block a layer, all in one stage on a mesh of 2x2.
2. A sample of the distinct stages (run of layers, logical shape) that planning an experiment has to solve.

planner = layer-by-layer elimination, which is what plans are made with; general = the general solver on the whole stage's problem;
paper = `sharding/paper_ilp.py` with CBC. All three start from built problems, with one thread, and minimise the same seconds; memory is
free, as in the paper's model. The paper's side is counted without its model building, ours in full and with nothing kept from a solve
before. A side that gives up is printed as "> N s", and its ratio is at least what is shown. The last line is one JSON object.
"""

import argparse
import gc
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import inf, isclose, log
from statistics import median
from typing import Any

import jax

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.config import ExperimentConfig, compose_experiment
from alpa_hpc.experiment import prepared
from alpa_hpc.planner.search import find_candidates
from alpa_hpc.sharding.paper_ilp import NothingFoundError, PaperOptions, solve_paper_ilp
from alpa_hpc.sharding.problem import ShardingProblem
from alpa_hpc.sharding.solution import size_of
from alpa_hpc.sharding.solve import SolverOptions, solve
from alpa_hpc.sharding.solved import SolvedRuns
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.stage_problem import stage_problem
from alpa_hpc.sharding.wiring import wire
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.pricing import StagePricer

EXPERIMENT = "gpt1_3b"
SUBMESH, SHAPE = Submesh(1, 4), MeshShape(2, 2)
FREE = MemoryPrice(0.0, 0.0)
SAME = 1e-6  # relative difference of equal objectives


class Outcome(StrEnum):
    """How a side came out of a problem: with a proof, at its time limit without one, or it was spared."""

    PROVEN = "proven"
    GAVE_UP = "gave up"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Run:
    """One side on one problem. `objective` = seconds an iteration, inf = none found."""

    seconds: float
    objective: float
    outcome: Outcome

    @property
    def is_proven(self) -> bool:
        """Whether the objective is proven to be the optimum."""
        return self.outcome is Outcome.PROVEN

    def __str__(self) -> str:
        if self.outcome is Outcome.NOT_RUN:
            return "not run"
        return f"{'' if self.is_proven else '> '}{self.seconds:.3f} s"


NOT_RUN = Run(0.0, inf, Outcome.NOT_RUN)


@dataclass(frozen=True, slots=True)
class Row:
    """A problem (`digest` of its numbers) with the three sides; `build_seconds` of the paper's model are in none of them."""

    name: str
    digest: str
    nodes: int
    strategies: int
    pairs: int
    planner: Run
    general: Run
    paper: Run
    build_seconds: float

    @property
    def ratio(self) -> float:
        """How many times longer the paper's side takes than the planner's, at least."""
        return self.paper.seconds / self.planner.seconds

    @property
    def is_same(self) -> bool:
        """Whether all sides that finished have the same objective."""
        return all(isclose(run.objective, self.planner.objective, rel_tol=SAME) for run in (self.general, self.paper) if run.is_proven)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    jax.config.update("jax_platforms", "cpu")  # nothing is run: models are traced
    print(f"compiling what is compiled: {warm_up():.1f} s")
    if options.blocks:
        print_header()
    blocks = {count: shown(blocks_row(count, options.seconds, options.paper_blocks)) for count in options.blocks}
    print_growth(blocks)
    planning = planning_of(options.experiment, options.stages, options.seed)
    print_header()
    stages = [shown(stage_row(planning, stage, options.stage_seconds)) for stage in planning.stages]
    together = together_seconds(planning)
    print_median(stages, together)
    rows = [*blocks.values(), *stages]
    differing = [row.name for row in rows if not row.is_same]
    print("objectives differ: " + "; ".join(differing) if differing else f"equal objectives on all {len(rows)} problems")
    print(json.dumps(document(blocks, stages, options) | {"together_seconds": together}))
    return 1 if differing else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Our solvers against the paper's ILP on GPT stages.")
    parser.add_argument("--blocks", type=int, nargs="*", default=[2, 8, 32, 128], help="numbers of blocks of the first part")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of the paper's side for each of them")
    parser.add_argument("--paper-blocks", type=int, default=32, help="with more, the paper's model needs 10 GB and minutes: not run")
    parser.add_argument("--experiment", default=EXPERIMENT, help="whose planning the second part looks at")
    parser.add_argument("--stages", type=int, default=40, help="how many of its distinct stages")
    parser.add_argument("--stage-seconds", type=float, default=60.0, help="time limit of the paper's side for each of them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample of stages")
    return parser.parse_args(arguments)


def warm_up() -> float:
    """Solve a small stage once: what the first solve of a process takes more is not the problem's."""
    started = time.monotonic()
    step = prepared(config_of(1)).step
    solver = StagePricer(step, config_of(1).cluster).solver(SUBMESH, SHAPE, remat=True)
    problem = whole_problem(solver, 0, len(step.layers))
    solver.value(0, len(step.layers), FREE)
    solve(problem)
    return time.monotonic() - started


def config_of(num_blocks: int) -> ExperimentConfig:
    return compose_experiment(EXPERIMENT, ["mode=plan", f"model.num_layers={num_blocks}", f"layers.num_layers={num_blocks}"])


def blocks_row(num_blocks: int, limit_seconds: float, most_paper_blocks: int) -> Row:
    config = config_of(num_blocks)
    step = prepared(config).step
    solver = StagePricer(step, config.cluster).solver(SUBMESH, SHAPE, remat=True)
    return compare(f"{num_blocks} blocks", solver, (0, len(step.layers)), limit_seconds if num_blocks <= most_paper_blocks else 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Planning:
    """What planning an experiment has to solve: a sample of its distinct stages, and the solvers of their meshes."""

    pricer: StagePricer
    stages: tuple[StageCandidate, ...]

    def solver_of(self, stage: StageCandidate) -> StageSolver:
        """The solver of a stage's mesh."""
        return self.pricer.solver(stage.submesh, stage.shape, remat=stage.remat)


def planning_of(experiment: str, count: int, seed: int) -> Planning:
    config = compose_experiment(experiment, ["mode=plan"])
    step = prepared(config).step
    found: dict[object, StageCandidate] = {}
    for candidate in find_candidates(step, config.cluster, config.search):
        found.setdefault((wire(step, candidate.start, candidate.stop), candidate.shape, candidate.remat), candidate)
    distinct = sorted(found.values())
    sample = distinct if len(distinct) <= count else sorted(random.Random(seed).sample(distinct, count))
    print(f"\n{experiment}: {len(sample)} of its {len(distinct)} distinct stages of {len(step.layers)} layers")
    return Planning(StagePricer(step, config.cluster), tuple(sample))


def stage_row(planning: Planning, stage: StageCandidate, limit_seconds: float) -> Row:
    name = f"layers {stage.start}-{stage.stop} as {stage.shape.rows}x{stage.shape.cols}"
    return compare(name, planning.solver_of(stage), (stage.start, stage.stop), limit_seconds)


def together_seconds(planning: Planning) -> float:
    """All stages one after the other as the planner does it: what they share is solved once."""
    fresh = {planning.solver_of(stage): unsolved(planning.solver_of(stage)) for stage in planning.stages}
    started = time.monotonic()
    for stage in planning.stages:
        fresh[planning.solver_of(stage)].value(stage.start, stage.stop, FREE)
    return time.monotonic() - started


def compare(name: str, solver: StageSolver, layers: tuple[int, int], limit_seconds: float) -> Row:
    problem = whole_problem(solver, *layers)
    size = size_of(problem)
    planner = planner_run(unsolved(solver), layers)
    general = general_run(problem)
    paper, build_seconds = paper_run(problem, limit_seconds) if limit_seconds > 0 else (NOT_RUN, 0.0)
    return Row(name, digest_of(problem), size.nodes, size.strategies, size.edge_costs, planner, general, paper, build_seconds)


def whole_problem(solver: StageSolver, start: int, stop: int) -> ShardingProblem:
    """The stage as one problem, in the space of specs that the planner searches."""
    assert solver.space, "the space is settled before layers are built"
    return stage_problem(solver.step, [solver.problem(index) for index in range(start, stop)])[0]


def unsolved(solver: StageSolver) -> StageSolver:
    """The solver with its built layer problems, and nothing solved."""
    wire.cache_clear()
    return replace(solver, _layers={}, _restored={}, _messages={}, _run_values={}, _values={}, _wide={}, solved=SolvedRuns())


def start() -> float:
    """The time, garbage of what ran before collected: its collection was seen to take three times as long as a stage's solve."""
    gc.collect()
    return time.monotonic()


def planner_run(solver: StageSolver, layers: tuple[int, int]) -> Run:
    started = start()
    value = solver.value(*layers, FREE)
    return Run(time.monotonic() - started, value.seconds, Outcome.PROVEN)


def general_run(problem: ShardingProblem) -> Run:
    started = start()
    solution = solve(problem, SolverOptions())
    is_proven = isclose(solution.lower_bound, solution.objective, rel_tol=SAME)
    return Run(time.monotonic() - started, solution.objective, Outcome.PROVEN if is_proven else Outcome.GAVE_UP)


def paper_run(problem: ShardingProblem, limit_seconds: float) -> tuple[Run, float]:
    """The paper's side, and the seconds that its model took to build."""
    started = start()
    try:
        found = solve_paper_ilp(problem, PaperOptions(limit_seconds))
    except NothingFoundError:
        return Run(limit_seconds, inf, Outcome.GAVE_UP), time.monotonic() - started - limit_seconds
    if found.is_proven:
        return Run(found.solver_seconds, found.objective, Outcome.PROVEN), found.build_seconds
    return Run(limit_seconds, found.objective, Outcome.GAVE_UP), found.build_seconds


def digest_of(problem: ShardingProblem) -> str:
    """Equal for equal numbers."""
    content = hashlib.sha256()
    for costs in (*problem.node_costs, *(edge.costs for edge in problem.edges)):
        content.update(repr(costs.shape).encode() + costs.tobytes())
    return content.hexdigest()[:8]


def print_header() -> None:
    print(
        f"\n{'':24}{'problem':>10}{'nodes':>7}{'strategies':>11}{'pairs':>9}{'planner':>11}{'general':>11}{'paper':>13}{'ratio':>9}"
        f"   objectives (s): planner, general, paper"
    )


def shown(row: Row) -> Row:
    """Print a row as soon as it is there."""
    ratio = "" if row.paper is NOT_RUN else f"{'' if row.paper.is_proven else '> '}{row.ratio:.0f}"
    objectives = "  ".join("none" if run.objective == inf else f"{run.objective:.9g}" for run in (row.planner, row.general, row.paper))
    print(
        f"{row.name:24}{row.digest:>10}{row.nodes:7}{row.strategies:11}{row.pairs:9}{row.planner!s:>11}{row.general!s:>11}"
        f"{row.paper!s:>13}{ratio:>9}   {objectives}",
        flush=True,
    )
    return row


def print_growth(rows: dict[int, Row]) -> None:
    """Seconds a block, and the exponent of growth between neighbours: 1 = linear."""
    if len(rows) < 2:
        return
    for name, seconds in (("planner", planner_seconds(rows)), ("general", {count: row.general.seconds for count, row in rows.items()})):
        a_block = ", ".join(f"{1e3 * one / count:.1f} ms at {count}" for count, one in seconds.items())
        print(f"{name}, seconds a block: {a_block}; grows with exponent {', '.join(f'{one:.2f}' for one in exponents(seconds))}")


def planner_seconds(rows: dict[int, Row]) -> dict[int, float]:
    return {count: row.planner.seconds for count, row in rows.items()}


def exponents(seconds: dict[int, float]) -> list[float]:
    pairs = list(seconds.items())
    return [log(after / before) / log(more / fewer) for (fewer, before), (more, after) in zip(pairs, pairs[1:], strict=False)]


def print_median(rows: Sequence[Row], together: float) -> None:
    """The ratio, over all stages, over those in which there is a choice, and of the sums when stages share what they can."""
    open_rows = [row for row in rows if row.strategies > row.nodes]
    if open_rows:
        gave_up, paper = sum(not row.paper.is_proven for row in rows), sum(row.paper.seconds for row in rows)
        print(f"median ratio over {len(rows)} stages: {median_ratio(rows):.0f} (at least: the paper's side gave up on {gave_up})")
        print(f"median ratio over the {len(open_rows)} in which there is a choice: {median_ratio(open_rows):.0f}")
        print(f"all in one planner, what they share solved once: {together:.3f} s, the paper's side {paper:.1f} s: {paper / together:.0f}")


def median_ratio(rows: Iterable[Row]) -> float:
    return median(row.ratio for row in rows)


def document(blocks: dict[int, Row], stages: Sequence[Row], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "blocks": {count: summary(row) for count, row in blocks.items()},
        "growth_exponents": exponents(planner_seconds(blocks)),
        "stages": [summary(row) for row in stages],
        "median_ratio": median_ratio(stages) if stages else None,
        "limits_seconds": [options.seconds, options.stage_seconds],
        "equal": all(row.is_same for row in (*blocks.values(), *stages)),
    }


def summary(row: Row) -> dict[str, Any]:
    paper = asdict(row.paper) | {"objective": row.paper.objective if row.paper.objective < inf else None}
    return asdict(row) | {"paper": paper, "ratio": row.ratio, "same": row.is_same}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
