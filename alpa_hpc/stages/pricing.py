"""StageCandidates -> CostTable: every candidate's sharding problem solved, at a few prices of memory (paper, section 5.2, t_intra).

Which price is right only the stage DP knows, since it depends on how many microbatches are in flight; so each candidate gives one
StageOption a price, and those that can never win are dropped (`cost_table.pareto`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite

from alpa_hpc.cluster.compute import flop_rate
from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.flops import aval_bytes, jaxpr_flops
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.least_work import least_seconds
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.solve import SolverOptions
from alpa_hpc.sharding.solved import Solved, SolvedRuns
from alpa_hpc.sharding.stage import MemoryPrice, Restrict, StageSolver, unrestricted
from alpa_hpc.sharding.workspace import evenly_split_workspace
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.cost_table import BY_FLOP, Cell, CostTable, StageOption, pareto
from alpa_hpc.stages.objective import InFlight, one_forward_one_backward

PRICE_FACTORS = (0.0, 0.02, 0.05, 0.1, 0.3, 3.0)  # how many ideal iterations a device's whole memory is worth; index = StageOption.variant
MOST_KEPT_BYTES = 2 * 2**30  # of tables of solved meshes; the few that are chosen from are made again
MICROBATCHES_IN_FLIGHT = 4.0  # a byte a microbatch weighs as that many held all iteration


@dataclass(slots=True, eq=False)
class StagePricer:
    """Prices candidates of one step on one cluster. Solvers, one a (submesh, shape, remat), are kept: they remember what they solved.

    `solved` is what earlier planning runs have solved; restrictions are not part of its keys, so a restricted pricer has none.
    `in_flight` is the schedule's count of microbatches that a stage holds at once: by it the stage DP tells what fits.
    """

    step: LayeredStep
    cluster: ClusterSpec
    restrict: Restrict = unrestricted
    general: SolverOptions = field(default_factory=SolverOptions)
    solved: SolvedRuns = field(default_factory=SolvedRuns)
    in_flight: InFlight = one_forward_one_backward
    _solvers: dict[tuple[Submesh, MeshShape, bool], StageSolver] = field(default_factory=dict)  # the one used last is last
    _workspaces: dict[tuple[str, bool], float] = field(default_factory=dict)
    _least: dict[tuple[str, MeshShape, bool], float] = field(default_factory=dict)

    def solver(self, submesh: Submesh, shape: MeshShape, *, remat: bool) -> StageSolver:
        """The sharding solver of a mesh, which from now on is the one that was used last."""
        key = (submesh, shape, remat)
        if not self._solvers or key != next(reversed(self._solvers)):
            self._forget()
            self._solvers[key] = self._solvers.pop(key, None) or self._new_solver(submesh, shape, remat=remat)
        return self._solvers[key]

    def _new_solver(self, submesh: Submesh, shape: MeshShape, *, remat: bool) -> StageSolver:
        prices = MeshPrices(logical_mesh(self.cluster, submesh, shape))
        return StageSolver(self.step, prices, remat, self.restrict, self.general, self.solved)

    def _forget(self) -> None:
        """Where tables take too much memory, drop those of the meshes that were used longest ago."""
        excess = sum(solver.kept_bytes for solver in self._solvers.values()) - MOST_KEPT_BYTES
        for solver in self._solvers.values():
            if excess <= 0:
                break
            excess -= solver.kept_bytes
            solver.forget()

    def __post_init__(self) -> None:
        assert self.restrict is unrestricted or not self.solved.known, "what is known holds without restrictions only"

    @property
    def learnt(self) -> Mapping[str, Solved]:
        """What was solved here and holds for later planning runs too: nothing under a restriction."""
        return self.solved.new if self.restrict is unrestricted else {}

    @property
    def num_problems(self) -> int:
        """Distinct layer problems built so far."""
        return sum(solver.num_problems for solver in self._solvers.values())

    @property
    def num_runs(self) -> int:
        """Distinct (run of layers, mesh, memory price) solved so far."""
        return sum(solver.num_runs for solver in self._solvers.values())

    @property
    def num_known(self) -> int:
        """Those that earlier planning runs had solved."""
        return sum(solver.num_known for solver in self._solvers.values())

    @property
    def num_wide(self) -> int:
        """Those of them that went to the general solver whole."""
        return sum(solver.num_wide for solver in self._solvers.values())

    def price(self, candidates: Iterable[StageCandidate]) -> CostTable:
        """The cost table of all candidates that can be run; least is solved twice where those of a mesh follow each other (`by_mesh`)."""
        cells: dict[Cell, list[StageOption]] = {}
        for candidate in candidates:
            options = self.options(candidate)
            if options:
                cells.setdefault((candidate.start, candidate.stop, candidate.submesh), []).extend(options)
        table = {cell: pareto(options) for cell, options in cells.items()}
        return CostTable(len(self.step.layers), table, boundary_bytes(self.step))

    def options(self, candidate: StageCandidate) -> tuple[StageOption, ...]:
        """The Pareto points of one candidate; none where no strategy divides its tensors."""
        solver = self.solver(candidate.submesh, candidate.shape, remat=candidate.remat)
        workspace = max(self.workspace(index, candidate) for index in range(candidate.start, candidate.stop))
        options: list[StageOption] = []
        for variant in range(len(PRICE_FACTORS)):
            value = solver.value(candidate.start, candidate.stop, self.memory_price(variant))
            if isfinite(value.seconds):
                seconds = value.seconds / self.step.num_microbatches
                bytes_ = (value.fixed_bytes, value.inflight_bytes, workspace)
                options.append(StageOption(candidate.shape, candidate.remat, variant, seconds, 0.0, *bytes_, measured=False))
        return pareto(options)

    def bounds(self, candidates: Iterable[StageCandidate]) -> CostTable:
        """A bound in place of each candidate's options, by FLOP, for which no sharding problem is built."""
        cells: dict[Cell, list[StageOption]] = {}
        for candidate in candidates:
            bound = self.bound(candidate, BY_FLOP)
            cells.setdefault((candidate.start, candidate.stop, candidate.submesh), []).append(bound)
        table = {cell: tuple(options) for cell, options in cells.items()}
        return CostTable(len(self.step.layers), table, boundary_bytes(self.step))

    def bound(self, candidate: StageCandidate, kind: int) -> StageOption:
        """What no option of a candidate goes below: seconds by `kind` (BY_FLOP or BY_LAYERS), bytes by its share of the state alone."""
        layers = range(candidate.start, candidate.stop)
        seconds = sum(self._by_flop(index, candidate) if kind == BY_FLOP else self._by_itself(index, candidate) for index in layers)
        held = sum(state_bytes(self.step)[index] for index in layers) / candidate.shape.num_devices
        return StageOption(candidate.shape, candidate.remat, kind, seconds, 0.0, held, 0.0, 0.0, measured=False)

    def _by_flop(self, index: int, candidate: StageCandidate) -> float:
        key = (self.step.layers[index].key, candidate.shape, candidate.remat)
        if key not in self._least:
            self._least[key] = least_seconds(self.step.layers[index], candidate.shape, self.cluster.device, remat=candidate.remat)
        return self._least[key]

    def _by_itself(self, index: int, candidate: StageCandidate) -> float:
        """The optimum of a layer with whatever specs it likes at its border, memory free."""
        solver = self.solver(candidate.submesh, candidate.shape, remat=candidate.remat)
        return solver.value(index, index + 1, self.memory_price(0)).seconds / self.step.num_microbatches

    def workspace(self, index: int, candidate: StageCandidate) -> float:
        """Bytes a device that a layer needs while it runs, were everything split evenly (exact only once strategies are chosen)."""
        layer = self.step.layers[index]
        key = (layer.key, candidate.remat)
        if key not in self._workspaces:
            problem = self.solver(candidate.submesh, candidate.shape, remat=candidate.remat).problem(index)
            self._workspaces[key] = evenly_split_workspace(problem, 1)
        return self._workspaces[key] / candidate.shape.num_devices

    def memory_price(self, variant: int) -> MemoryPrice:
        """What a byte is worth, in seconds an iteration."""
        assert variant >= 0, "bounds have no price"
        price = PRICE_FACTORS[variant] * ideal_seconds(self.step, self.cluster) / self.cluster.device.memory
        return MemoryPrice(price, price * MICROBATCHES_IN_FLIGHT)

    def choose(self, candidate: StageCandidate, variant: int) -> tuple[ChosenLayer, ...]:
        """The strategies behind an option."""
        solver = self.solver(candidate.submesh, candidate.shape, remat=candidate.remat)
        return solver.choose(candidate.start, candidate.stop, self.memory_price(variant))


def by_mesh(candidates: Iterable[StageCandidate]) -> tuple[StageCandidate, ...]:
    """The candidates, mesh after mesh, otherwise in the same order."""
    return tuple(sorted(candidates, key=lambda one: (one.submesh, one.shape, one.remat)))


@lru_cache(maxsize=64)
def ideal_seconds(step: LayeredStep, cluster: ClusterSpec) -> float:
    """Seconds of an iteration if the whole cluster computed at its 32-bit rate and nothing else took time."""
    return sum(layer_flop(step)) * step.num_microbatches / cluster.num_devices / flop_rate(cluster.device, 4)


@lru_cache(maxsize=64)
def layer_flop(step: LayeredStep) -> tuple[int, ...]:
    """FLOP of each layer a microbatch, forward and backward."""
    return tuple(jaxpr_flops(layer.forward.jaxpr) + jaxpr_flops(layer.backward.jaxpr) for layer in step.layers)


def boundary_bytes(step: LayeredStep) -> tuple[float, ...]:
    """Bytes of the values that cross the cut before each layer, a microbatch, forward."""
    made = {value: layer.index for layer in step.layers for value in layer.outputs}
    last = {value: layer.index for layer in step.layers for value in layer.inputs}
    return tuple(
        float(sum(aval_bytes(step.values[value]) for value, maker in made.items() if maker < cut <= last.get(value, -1)))
        for cut in range(len(step.layers))
    )


@lru_cache(maxsize=64)
def state_bytes(step: LayeredStep) -> Mapping[int, float]:
    """For each layer, bytes of the state it owns and of its gradient accumulators: what its devices hold at the very least."""
    seen: set[int] = set()
    held: dict[int, float] = {}
    leaves = {work.param: work.leaves for work in step.update.params}
    for layer in step.layers:
        mine = [param for param in layer.params if param not in seen]
        seen.update(mine)
        state = sum(aval_bytes(step.state_avals[leaf]) for param in mine for leaf in leaves[param])
        held[layer.index] = float(state + sum(aval_bytes(step.state_avals[param]) for param in layer.params))
    return held


def possible(candidates: Sequence[StageCandidate], step: LayeredStep, cluster: ClusterSpec) -> tuple[StageCandidate, ...]:
    """The candidates whose own state, and the other layers' state on the other devices, can fit at all. Loses nothing."""
    held = state_bytes(step)
    total = sum(held.values())
    memory = float(cluster.device.memory)

    def fits(candidate: StageCandidate) -> bool:
        own = sum(held[index] for index in range(candidate.start, candidate.stop))
        others = cluster.num_devices - candidate.submesh.num_devices
        return own <= memory * candidate.submesh.num_devices and total - own <= memory * others

    return tuple(candidate for candidate in candidates if fits(candidate))
