"""Bounds in a CostTable -> options, where the stage DP asks for them: a stage that no good partition holds is never priced. Loses nothing.

A table may start with a bound for each candidate. What the DP proposes is opened: a bound by FLOP becomes one by layers' optima, with all
others of its submesh; a bound by layers becomes the candidate's priced options, with all equal ones. Bounds only rise when they are opened,
so partitions without bounds that the DP proposes are the best there are, and its lower bound holds for all candidates.
"""

from collections.abc import Callable, Iterable, Sequence

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.sharding.wiring import LayerWiring, wire
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.cost_table import BY_FLOP, BY_LAYERS, Cell, CostTable, StageOption, pareto
from alpa_hpc.stages.objective import StageChoice, StagePartition
from alpa_hpc.stages.options import Partitions, SearchOptions
from alpa_hpc.stages.pricing import StagePricer


def first_table(pricer: StagePricer, candidates: Sequence[StageCandidate], search: SearchOptions) -> CostTable:
    """A bound for each candidate; options for all of a grid's, which are few, and every point of which is to say what it takes or lacks."""
    if search.partitions is Partitions.GRID:
        return pricer.price(candidates)
    return pricer.bounds(candidates)


def bounds_of(partitions: Iterable[StagePartition]) -> tuple[StageChoice, ...]:
    """The stages that are not priced yet."""
    return tuple(choice for partition in partitions for choice in partition.stages if choice.option.is_bound)


def all_bounds(table: CostTable) -> tuple[StageChoice, ...]:
    """Every bound of a table, as a stage."""
    return tuple(StageChoice(*cell, option) for cell, options in table.options.items() for option in options if option.is_bound)


def opened(pricer: StagePricer, table: CostTable, asked: Sequence[StageChoice]) -> CostTable:
    """The table with what stands behind the bounds `asked`, and behind those that cost nothing more to open."""
    due = _due(pricer, asked)
    open_now = {cell: [one for one in options if due(cell, one)] for cell, options in table.options.items()}
    return table.updated({cell: _replaced(pricer, cell, table.options[cell], found) for cell, found in open_now.items() if found})


def _due(pricer: StagePricer, asked: Sequence[StageChoice]) -> Callable[[Cell, StageOption], bool]:
    """Which bounds are opened together."""
    submeshes = {choice.submesh for choice in asked if choice.option.variant == BY_FLOP}
    by_mesh: dict[tuple[Submesh, MeshShape, bool], set[tuple[LayerWiring, ...]]] = {}
    for choice in asked:
        if choice.option.variant == BY_LAYERS:
            wirings = by_mesh.setdefault((choice.submesh, choice.option.shape, choice.option.remat), set())
            wirings.add(wire(pricer.step, choice.start, choice.stop))

    def is_due(cell: Cell, option: StageOption) -> bool:
        start, stop, submesh = cell
        if option.variant == BY_FLOP:
            return submesh in submeshes
        alike = by_mesh.get((submesh, option.shape, option.remat))
        return option.variant == BY_LAYERS and alike is not None and wire(pricer.step, start, stop) in alike

    return is_due


def _replaced(pricer: StagePricer, cell: Cell, options: Sequence[StageOption], due: Sequence[StageOption]) -> tuple[StageOption, ...]:
    """The options of a cell with bounds opened: priced ones that can win, then the bounds that are left."""
    raised = [pricer.bound(_candidate(cell, one), BY_LAYERS) for one in due if one.variant == BY_FLOP]
    priced = [found for one in due if one.variant == BY_LAYERS for found in pricer.options(_candidate(cell, one))]
    kept = [one for one in options if one not in due]
    bounds = [one for one in (*kept, *raised) if one.is_bound]
    return (*pareto([*(one for one in kept if not one.is_bound), *priced]), *bounds)


def _candidate(cell: Cell, option: StageOption) -> StageCandidate:
    start, stop, submesh = cell
    return StageCandidate(start, stop, submesh, option.shape, option.remat)
