"""(LayeredStep, ClusterSpec, SearchOptions) -> Families of candidates and a pricer: what a named search may look at (paper, section 8).

A family is a set of stage candidates: each cover of all layers and devices by some of them is a partition that the search may choose. The
whole search space is one family. A restriction that ties stages to each other is one family for each way to tie them: "equal layer" has
one for each number of stages, Megatron's grid one for each point. So every search is the same pricing, stage DP and simulation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from alpa_hpc.baselines.dim_kinds import microbatch_rows
from alpa_hpc.baselines.manual import ManualStage, check_manual
from alpa_hpc.baselines.megatron import megatron_grid, megatron_stages
from alpa_hpc.baselines.restrict import restrict_to
from alpa_hpc.baselines.restriction import DATA_PARALLEL, FREE, MEGATRON, Restriction
from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.schedule import AbstractSchedule
from alpa_hpc.sharding.solve import SolverOptions
from alpa_hpc.sharding.solved import Solved, SolvedRuns
from alpa_hpc.stages.candidate import CandidateOptions, StageCandidate, balanced, enumerate_candidates
from alpa_hpc.stages.cost_table import Cell, CostTable, StageOption
from alpa_hpc.stages.objective import InFlight
from alpa_hpc.stages.options import Partitions, RematChoice, SearchOptions, Strategies
from alpa_hpc.stages.pricing import StagePricer, layer_flop

REMAT = {RematChoice.ALWAYS: (True,), RematChoice.NEVER: (False,), RematChoice.SEARCH: (False, True)}
RESTRICTIONS: Mapping[Strategies, Restriction] = {
    Strategies.ANY: FREE,
    Strategies.DATA_PARALLEL: DATA_PARALLEL,
    Strategies.MEGATRON: MEGATRON,
}
NOTHING_KNOWN: Mapping[str, Solved] = {}


@dataclass(frozen=True, slots=True)
class Family:
    """Stage candidates that may be combined with each other, and what they have in common."""

    name: str
    candidates: tuple[StageCandidate, ...]


def pricer_for(
    step: LayeredStep,
    cluster: ClusterSpec,
    search: SearchOptions,
    schedule: AbstractSchedule,
    known: Mapping[str, Solved] = NOTHING_KNOWN,
) -> StagePricer:
    """A pricer of stages whose strategies are those that the search allows; `known` is of use where it allows all."""
    general, restriction = (
        SolverOptions(time_limit_seconds=search.solver_seconds, table_cap=search.table_cap),
        RESTRICTIONS[search.strategies],
    )
    solved = SolvedRuns(known if restriction == FREE else NOTHING_KNOWN)
    return StagePricer(step, cluster, restrict_to(restriction, step), general, solved, in_flight_of(schedule))


def in_flight_of(schedule: AbstractSchedule) -> InFlight:
    """A schedule's count of microbatches in flight, as the stage DP asks for it: by the stages from one to the end."""

    def in_flight(stages_to_end: int, num_microbatches: int) -> int:
        return schedule.max_in_flight(0, stages_to_end, num_microbatches)

    return in_flight


@lru_cache(maxsize=16)
def families(step: LayeredStep, cluster: ClusterSpec, search: SearchOptions) -> tuple[Family, ...]:
    """What the search may choose from; families without a candidate are left out.

    Raises PlanError where stages are given that do not cover layers and devices, each once and in order.
    """
    found = [Family(name, tuple(candidates)) for name, candidates in _families(step, cluster, search)]
    return tuple(family for family in found if family.candidates)


def of_family(table: CostTable, family: Family) -> CostTable:
    """The options of the table that are candidates of a family."""
    members = frozenset(family.candidates)
    cells = {(one.start, one.stop, one.submesh): None for one in family.candidates}

    def allowed(cell: Cell) -> tuple[StageOption, ...]:
        return tuple(one for one in table.options.get(cell, ()) if StageCandidate(*cell, one.shape, one.remat) in members)

    options = {cell: allowed(cell) for cell in cells}
    return CostTable(table.num_layers, {cell: found for cell, found in options.items() if found}, table.boundary_bytes)


def equal_lengths(num_layers: int) -> list[int]:
    """How many layers each of equal stages can have, the most first."""
    return [size for size in range(num_layers, 0, -1) if num_layers % size == 0]


def of_length(table: CostTable, length: int) -> CostTable:
    """The cells of the table that are one of equal stages of `length` layers."""
    return replace(table, options={cell: options for cell, options in table.options.items() if _is_one_of(cell[0], cell[1], length)})


def _is_one_of(start: int, stop: int, length: int) -> bool:
    return stop - start == length and start % length == 0


def _families(step: LayeredStep, cluster: ClusterSpec, search: SearchOptions) -> Iterator[tuple[str, Sequence[StageCandidate]]]:
    num_layers = len(step.layers)
    match search.partitions:
        case Partitions.ANY:
            yield "any stages", _enumerated(step, cluster, search)
        case Partitions.ONE_STAGE:
            yield "one stage", [one for one in _enumerated(step, cluster, search) if one.stop - one.start == num_layers]
        case Partitions.EQUAL_LAYERS:
            found = _enumerated(step, cluster, search)
            for length in equal_lengths(num_layers):
                yield f"stages of {length} layers", [one for one in found if _is_one_of(one.start, one.stop, length)]
        case Partitions.GRID:
            for degrees in megatron_grid(num_layers, microbatch_rows(step), cluster):
                stages = megatron_stages(degrees, num_layers, cluster)
                yield str(degrees), _with_remat(stages, REMAT[search.remat])
        case Partitions.MANUAL:
            yield "the given stages", _given(step, cluster, search)


def _enumerated(step: LayeredStep, cluster: ClusterSpec, search: SearchOptions) -> list[StageCandidate]:
    """Candidates of the options. Where axes may split alike, a shape (1, n) is the mirror image of (n, 1) and is left out."""
    options = CandidateOptions(search.submesh_shapes, search.logical_shapes, REMAT[search.remat])
    restriction, rows = RESTRICTIONS[search.strategies], microbatch_rows(step)
    alike = len(set(restriction.axes)) == 1
    found = enumerate_candidates(len(step.layers), cluster, options)
    return [
        candidate
        for candidate in balanced(found, layer_flop(step), cluster.num_devices, search.balance)
        if restriction.divides(candidate.shape, rows) and not (alike and candidate.shape.rows == 1 < candidate.shape.cols)
    ]


def _with_remat(stages: Sequence[ManualStage], remat: Sequence[bool]) -> list[StageCandidate]:
    return [StageCandidate(one.start, one.stop, one.submesh, one.shape, choice) for one in stages for choice in remat]


def _given(step: LayeredStep, cluster: ClusterSpec, search: SearchOptions) -> tuple[StageCandidate, ...]:
    restriction = RESTRICTIONS[search.strategies]
    stages = [ManualStage(one.start, one.stop, one.submesh, one.shape, one.remat, restriction) for one in search.given]
    check_manual(stages, step, cluster)
    return search.given
