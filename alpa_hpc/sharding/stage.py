"""Layers on one mesh -> the best ways to run each run of them: elimination layer by layer, each message made once (paper, section 4.2).

Layers touch only through their ports, so the sharding problem of layers a..b is that of a..b-1 plus one layer: what is left of the former
after all inner nodes are eliminated is a *message* over the ports that later layers read. Messages and layer problems are kept by content,
so equal layers, and runs of equal layers, are solved once whatever their place in the model. It is the exact optimum of the whole stage's
problem.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from alpa_hpc.errors import SolverError
from alpa_hpc.ir.work import Layer, LayeredStep, ParamUpdate
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem, Port, SpecSpace, Surroundings, UpdateProgram, build_layer
from alpa_hpc.sharding.dim_classes import awkward_params, awkward_values
from alpa_hpc.sharding.evaluate import evaluate
from alpa_hpc.sharding.flat import starts_of
from alpa_hpc.sharding.minimise import Minimum, carry_out, prepare, restore
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.problem import ShardingProblem
from alpa_hpc.sharding.solution import SolveStatus
from alpa_hpc.sharding.solve import SolverOptions, solve
from alpa_hpc.sharding.solved import Solved, SolvedRuns, StageValue, run_key
from alpa_hpc.sharding.stage_problem import numbering, stage_problem
from alpa_hpc.sharding.tables import Tables, joined, pair_tables
from alpa_hpc.sharding.wiring import LayerWiring, layer_content, owned_updates, shared_places, wire, wiring_key

NOTHING = StageValue(inf, inf, inf)
SOON_SECONDS = 3.0  # for the general solver, before large tables take the place of small ones
MOST_SUMS = 4e9  # of an elimination that reaches far: some seconds
MOST_ENTRIES = 50_000_000  # of all its tables: 400 MB


@dataclass(frozen=True, slots=True)
class Reach:
    """How far elimination goes: entries of the largest joint table within a layer, and in a stage's message."""

    layer: int
    message: int


# Within a layer only small tables are formed at first: its ports are four more dims there, and not in a stage's message. Where that leaves
# too much (a mixture of experts on two axes), the inside of each layer is best gone once and for all.
NEAR = Reach(300_000, 3_000_000)
FAR = Reach(400_000_000, 400_000_000)


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """Seconds an iteration that a byte is worth, held all iteration or once a microbatch in flight; zero gives the fastest solution."""

    fixed: float
    inflight: float


@dataclass(frozen=True, slots=True)
class _Restored:
    """A layer's strategies, and what they cost by themselves."""

    choices: tuple[int, ...]
    value: StageValue


Restrict = Callable[[LayerProblem], LayerProblem]  # the same problem with fewer strategies allowed


def unrestricted(problem: LayerProblem) -> LayerProblem:
    """Every strategy is allowed."""
    return problem


@dataclass(slots=True, eq=False)
class StageSolver:
    """Solves runs of layers of `step` on the mesh of `prices`; what it has solved it keeps, and what `solved` knows it does not solve.

    `general` bounds the general solver, to which a stage goes whole where layer-by-layer elimination is too wide. Under a restriction
    it must know nothing: restrictions have no content to be known by.
    """

    step: LayeredStep
    prices: MeshPrices
    remat: bool
    restrict: Restrict = unrestricted
    general: SolverOptions = field(default_factory=SolverOptions)
    solved: SolvedRuns = field(default_factory=SolvedRuns)
    num_known: int = 0
    _space: list[SpecSpace] = field(default_factory=list[SpecSpace])
    _reach: Reach = NEAR
    _text: list[str] = field(default_factory=list[str])
    _problems: dict[str, LayerProblem] = field(default_factory=dict)
    _layers: dict[tuple[str, MemoryPrice], Minimum] = field(default_factory=dict)
    _restored: dict[tuple[str, MemoryPrice, tuple[int, ...]], _Restored] = field(default_factory=dict)
    _messages: dict[tuple[MemoryPrice, tuple[LayerWiring, ...]], Minimum] = field(default_factory=dict)
    _run_values: dict[tuple[MemoryPrice, tuple[LayerWiring, ...], tuple[int, ...]], StageValue] = field(default_factory=dict)
    _values: dict[tuple[MemoryPrice, tuple[LayerWiring, ...]], StageValue] = field(default_factory=dict)
    _wide: dict[tuple[MemoryPrice, tuple[LayerWiring, ...]], tuple[ChosenLayer, ...]] = field(default_factory=dict)

    @property
    def num_problems(self) -> int:
        """Distinct layer problems built so far."""
        return len(self._problems)

    @property
    def num_runs(self) -> int:
        """Distinct runs of layers and memory prices solved here so far."""
        return len(self._values) - self.num_known

    @property
    def num_wide(self) -> int:
        """Those of them that layer-by-layer elimination could not do, and that went to the general solver whole."""
        return len(self._wide)

    @property
    def kept_bytes(self) -> int:
        """Memory of the tables from which strategies are read back."""
        return sum(minimum.undo.num_bytes for minimum in (*self._layers.values(), *self._messages.values()))

    def forget(self) -> None:
        """Drop these tables; `choose` makes those again that it needs."""
        for tables in (self._layers, self._restored, self._messages, self._run_values):
            tables.clear()

    @property
    def space(self) -> SpecSpace:
        """Which specs are searched: all, unless that makes tables too wide for elimination anywhere in the model."""
        if not self._space:
            key = self._key("space", wiring_key(wire(self.step, 0, len(self.step.layers))))
            known = self.solved.find(key)
            self._space.append(known.space if known else self._settled_space())
            self.solved.add(key, Solved(NOTHING, self._space[0]))
        return self._space[0]

    def _settled_space(self) -> SpecSpace:
        """Solve the whole model, to see whether that can be done among all specs."""
        self._space.append(SpecSpace.FULL)
        try:
            self._optimum(0, wire(self.step, 0, len(self.step.layers)), MemoryPrice(0.0, 0.0))
        except TooWideError:
            self._problems.clear()
            self._values.clear()
            self.forget()
            return SpecSpace.NARROW
        else:
            return SpecSpace.FULL
        finally:
            self._space.clear()

    def _key(self, *parts: str) -> str:
        if not self._text:
            mesh = self.prices.mesh
            anyhow = replace(mesh.device, memory=1)  # how much there is decides what a byte is worth, and that is told by itself
            self._text.extend((repr(replace(mesh, device=anyhow)), str(self.remat), str(self.step.num_microbatches)))
        return run_key((*self._text, *parts))

    def _run_key(self, wiring: tuple[LayerWiring, ...], price: MemoryPrice) -> str:
        return self._key(self.space.value, repr(price), wiring_key(wiring))

    def value(self, start: int, stop: int, price: MemoryPrice) -> StageValue:
        """The optimum for layers [start, stop)."""
        wiring = wire(self.step, start, stop)
        if (price, wiring) not in self._values:
            key = self._run_key(wiring, price)  # settles the space before anything is solved
            known = self.solved.find(key)
            self.num_known += known is not None
            self._values[price, wiring] = known.value if known else self._solve(start, wiring, price, key)
        return self._values[price, wiring]

    def _solve(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice, key: str) -> StageValue:
        try:
            value = self._optimum(start, wiring, price)
        except TooWideError:
            value, is_proven = self._solve_widely(start, wiring, price)
            if not is_proven:
                return value  # more time may find a better one
        self.solved.add(key, Solved(value, self.space))
        return value

    def _solve_widely(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice) -> tuple[StageValue, bool]:
        """What small tables do not do, and whether it is proven.

        By the general solver where it proves its answer soon; else by large tables, as all on this mesh from then on; else by the general
        solver with all its time.
        """
        if self._reach is NEAR:
            if (soon := self._solve_soon(start, wiring, price)) is not None:
                return soon, True
            self._reach = FAR
            self.forget()
            try:
                return self._optimum(start, wiring, price), True
            except TooWideError:
                pass
        return self._solve_whole(start, wiring, price, self.general)

    def _solve_soon(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice) -> StageValue | None:
        seconds = min(SOON_SECONDS, self.general.time_limit_seconds)
        try:
            value, is_proven = self._solve_whole(start, wiring, price, replace(self.general, time_limit_seconds=seconds))
        except SolverError:
            return None  # nothing in time
        if is_proven:
            return value
        del self._wide[price, wiring]
        return None

    def _optimum(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice) -> StageValue:
        last = self._last(start, wiring, price)
        if last.tables.constant == inf:
            return NOTHING
        return self._run_value(start, wiring, price, restore(last.undo, {}))

    def _run_value(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice, states: Mapping[int, int]) -> StageValue:
        """What the best strategies cost by which the ports that leave a run come out in `states`; longer runs go on from the same ones."""
        key = (price, wiring, tuple(states[port] for port in sorted(self._message(start, wiring, price).left)))
        if key not in self._run_values:
            layer, before = self._step_back(start, wiring, price, states)
            earlier = self._run_value(start, wiring[:-1], price, before) if len(wiring) > 1 else StageValue(0.0, 0.0, 0.0)
            self._run_values[key] = earlier + layer.value
        return self._run_values[key]

    def _step_back(
        self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice, states: Mapping[int, int]
    ) -> tuple[_Restored, Mapping[int, int]]:
        """The last layer of a run by the states of the ports that leave it, and with these the states of the ports that enter it."""
        place = len(wiring) - 1
        found = restore(self._message(start, wiring, price).undo, states)
        return self._restore_layer(start + place, wiring[place], place, found, price), found

    def _solve_whole(
        self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice, general: SolverOptions
    ) -> tuple[StageValue, bool]:
        """The stage as one problem: reductions, elimination under the solver's own cap, the ILP for the rest; and whether it is proven."""
        problems = [self.problem(start + place) for place in range(len(wiring))]
        whole, numbers = stage_problem(self.step, problems)
        parts = zip(whole.node_costs, whole.fixed_bytes, whole.inflight_bytes, strict=True)
        scores = tuple(seconds + price.fixed * fixed + price.inflight * inflight for seconds, fixed, inflight in parts)
        solution = solve(replace(whole, node_costs=scores), general)
        choices = solution.choices
        self._wide[price, wiring] = tuple(
            ChosenLayer(problem, tuple(choices[local[node]] for node in range(len(problem.labels))))
            for problem, local in zip(problems, numbers, strict=True)
        )
        found = evaluate(whole, choices)
        return StageValue(found.seconds, found.fixed_bytes, found.inflight_bytes), solution.status is SolveStatus.PROVEN

    def choose(self, start: int, stop: int, price: MemoryPrice) -> tuple[ChosenLayer, ...]:
        """The optimum's strategies, layer by layer."""
        wiring = wire(self.step, start, stop)
        if (price, wiring) not in self._wide and not self._can_restore(start, wiring, price):
            self._solve_widely(start, wiring, price)
        if (price, wiring) in self._wide:
            chosen = zip(self._wide[price, wiring], range(start, stop), strict=True)
            return tuple(ChosenLayer(self.problem(index), layer.choices) for layer, index in chosen)
        layers = self._restore(start, wiring, price)
        return tuple(ChosenLayer(self.problem(start + place), layer.choices) for place, layer in enumerate(layers))

    def _can_restore(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice) -> bool:
        """Whether layer-by-layer elimination does it."""
        assert self.space in SpecSpace, "the space is settled before anything is solved"
        try:
            self._last(start, wiring, price)
        except TooWideError:
            return False
        return True

    def _restore(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice) -> list[_Restored]:
        """The optimum, layer by layer."""
        states: Mapping[int, int] = restore(self._last(start, wiring, price).undo, {})
        layers: list[_Restored] = []
        for length in range(len(wiring), 0, -1):
            layer, states = self._step_back(start, wiring[:length], price, states)
            layers.append(layer)
        return layers[::-1]

    def _restore_layer(self, index: int, wiring: LayerWiring, place: int, states: Mapping[int, int], price: MemoryPrice) -> _Restored:
        layer, problem = self._layer(index, price), self.problem(index)
        numbers = numbering(problem, wiring, place)
        outer = {node: states[numbers[node]] for node in sorted(layer.left)}
        key = (wiring.content, price, tuple(outer.values()))
        if key not in self._restored:
            complete = restore(layer.undo, outer)
            choices = tuple(complete.get(node, 0) for node in range(len(problem.labels)))
            found = evaluate(problem.problem, choices)
            self._restored[key] = _Restored(choices, StageValue(found.seconds, found.fixed_bytes, found.inflight_bytes))
        return self._restored[key]

    def problem(self, index: int) -> LayerProblem:
        """The sharding problem of one layer; equal layers share its numbers."""
        layer = self.step.layers[index]
        updates = owned_updates(self.step, index)
        content = layer_content(self.step, index)
        if content not in self._problems:
            built = layer_problem(self.step, index, self.prices, remat=self.remat, space=self.space)
            self._problems[content] = self.restrict(built)
        return _renamed(self._problems[content], layer, updates)

    def _layer(self, index: int, price: MemoryPrice) -> Minimum:
        key = (layer_content(self.step, index), price)
        if key not in self._layers:
            problem = self.problem(index)
            self._layers[key] = self._minimum(problem_tables(problem.problem, price), frozenset(problem.ports), self._reach.layer)
        return self._layers[key]

    def _message(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice) -> Minimum:
        key = (price, wiring)
        if key not in self._messages:
            *earlier, last = wiring
            place = len(earlier)
            numbers = numbering(self.problem(start + place), last, place)
            added = self._layer(start + place, price).tables
            added = added.renamed(np.array([numbers[node] for node in added.names.tolist()], dtype=np.int64))
            tables = joined([self._message(start, tuple(earlier), price).tables, added]) if earlier else added
            result = self._minimum(tables, last.live, self._reach.message)
            _check_done(result, last.live)
            self._messages[key] = result
        return self._messages[key]

    def _last(self, start: int, wiring: tuple[LayerWiring, ...], price: MemoryPrice) -> Minimum:
        """What is left when the ports of the last message leave too: numbers."""
        return self._minimum(self._message(start, wiring, price).tables, frozenset(), self._reach.message)

    def _minimum(self, tables: Tables, keep: frozenset[int], cap: int) -> Minimum:
        elimination = prepare(tables, keep, cap)
        if self._reach is FAR and (elimination.num_sums > MOST_SUMS or elimination.num_entries > MOST_ENTRIES):
            elimination = prepare(tables, keep, NEAR.message)
        return carry_out(elimination)


def layer_problem(step: LayeredStep, index: int, prices: MeshPrices, *, remat: bool, space: SpecSpace) -> LayerProblem:
    """The sharding problem of layer `index`, without restrictions."""
    return build_layer(
        step.layers[index],
        owned_updates(step, index),
        surroundings(step, index),
        prices,
        remat=remat,
        num_microbatches=step.num_microbatches,
        space=space,
    )


def surroundings(step: LayeredStep, index: int) -> Surroundings:
    """What the problem of layer `index` takes from the rest of the step."""
    awkward, params = awkward_params(step), step.layers[index].params
    shared = {place: awkward.get(params[place], frozenset[int]()) for place in shared_places(step, index)}
    return Surroundings(frozenset(output.value for output in step.loss_outputs), awkward_values(step), shared)


class TooWideError(SolverError):
    """Elimination would need tables above the cap."""


def _check_done(result: Minimum, live: frozenset[int]) -> None:
    if wide := result.left - live:
        raise TooWideError(
            f"{len(wide)} sharding decisions depend on each other too widely for tables of {FAR.message} entries. "
            "Use more and smaller layers (layers.num_layers)."
        )


def problem_tables(problem: ShardingProblem, price: MemoryPrice) -> Tables:
    """Node and edge costs as tables; bytes count at their price. Nodes without a choice are no variables."""
    columns = (problem.node_costs, problem.fixed_bytes, problem.inflight_bytes)
    seconds, fixed, inflight = map(np.concatenate, columns)
    sizes = np.array([len(costs) for costs in problem.node_costs])
    ends = np.array([(edge.source, edge.target) for edge in problem.edges], dtype=np.int64).reshape(-1, 2)
    pairs = np.concatenate([np.zeros(0), *(edge.costs.ravel() for edge in problem.edges)])
    offsets = starts_of(sizes[ends].prod(1))
    return pair_tables(sizes, seconds + price.fixed * fixed + price.inflight * inflight, ends, offsets, pairs)


def _renamed(problem: LayerProblem, layer: Layer, updates: tuple[ParamUpdate, ...]) -> LayerProblem:
    """The same problem for another layer of equal content."""
    if problem.layer is layer:
        return problem

    def ports(old: tuple[Port, ...], values: Sequence[int]) -> tuple[Port, ...]:
        return tuple(Port(value, port.tensor) for port, value in zip(old, values, strict=True))

    owned = {work.param for work in updates}
    foreign = [p for p in layer.params if p not in owned]
    by_param = {work.param: work for work in updates}
    ordered = [by_param[p] for p in layer.params if p in owned]
    renamed = tuple(
        UpdateProgram(work, old.gradient, old.leaves, old.partials, old.update) for work, old in zip(ordered, problem.updates, strict=True)
    )
    return replace(
        problem,
        layer=layer,
        inputs=ports(problem.inputs, layer.inputs),
        outputs=ports(problem.outputs, layer.outputs),
        cotangent_inputs=ports(problem.cotangent_inputs, layer.cotangent_inputs),
        cotangent_outputs=ports(problem.cotangent_outputs, layer.cotangent_outputs),
        updates=renamed,
        replicas=tuple((p, tensor) for p, (_, tensor) in zip(foreign, problem.replicas, strict=True)),
    )
