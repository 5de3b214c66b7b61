"""A stage's programs -> bytes that live only while they run: what a task needs beyond the arrays that it is given and gives.

A simple model of what XLA keeps in memory, held against code that it compiles for GPUs (`benchmarks/gpu_hlo.py`). Results of contractions,
reductions and collectives lie there, and so does every operand of a contraction or collective, made as late as its first reader allows;
but a contraction converts as it goes what it alone reads. All else is fused into its readers, which then read what it is made from, unless
several want it and that is more to read than the thing itself. The results of a task have memory of their own; what lives before they are
made may lie there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.lifetimes import Lifetimes
from alpa_hpc.sharding.splits import AbstractSplit, ChosenSplit, EvenSplit
from alpa_hpc.sharding.tiles import Compute, Exchange, LayerTiles, Tile, TileStep, Work
from alpa_hpc.sharding.update_memory import update_memory

NOTHING: frozenset[int] = frozenset()


def chosen_workspace(layers: Sequence[ChosenLayer], shape: MeshShape) -> float:
    """Bytes a device that the hungriest task of a stage needs on a mesh of `shape`, beside what a microbatch in flight holds.

    Never less than what an even split needs, which is what a stage is thought to need before its strategies are known.
    """
    splits = [ChosenSplit(chosen, shape) for chosen in layers]
    held = sum(_inflight_bytes(chosen) for chosen in layers)  # nothing of it is there when the update runs
    return max(
        forward_workspace([(split.chosen.problem, split) for split in splits]),
        *(backward_workspace(split.chosen.problem, split) for split in splits),
        *(evenly_split_workspace(chosen.problem, shape.num_devices) for chosen in layers),
        update_memory(layers, shape).most - held,
    )


def _inflight_bytes(chosen: ChosenLayer) -> float:
    columns = zip(chosen.problem.problem.inflight_bytes, chosen.choices, strict=True)
    return float(sum(num_bytes[choice] for num_bytes, choice in columns))


@lru_cache(maxsize=4096)
def evenly_split_workspace(problem: LayerProblem, num_devices: int) -> float:
    """Bytes a device that a layer's backward needs if every tensor were split over all devices: it knows no strategy, and moves nothing."""
    return backward_workspace(problem, EvenSplit(problem, MeshShape(num_devices, 1)))


def forward_workspace(layers: Sequence[tuple[LayerProblem, AbstractSplit]]) -> float:
    """Bytes that the forward of consecutive layers needs."""
    steps: list[TileStep] = []
    kept: list[Tile] = []
    for problem, split in layers:
        tiles = forward_tiles(problem, split)
        steps += tiles.steps
        kept += [tiles.leave(problem.forward, position, split.own(port.tensor)) for position, port in enumerate(problem.outputs)]
        kept += map(tiles.get, problem.residuals)
    lifetimes = _lifetimes(steps, kept, ())
    return max(0.0, lifetimes.peak_bytes() - lifetimes.kept_bytes)


def backward_workspace(problem: LayerProblem, split: AbstractSplit) -> float:
    """Bytes that the backward of one layer needs; if it recomputes, its residuals live inside it."""
    tiles = backward_tiles(problem, split)
    gradients = problem.backward.outputs[len(problem.cotangent_inputs) :]
    return _lifetimes(tiles.steps, (), [tiles.get(tensor) for tensor in gradients]).peak_bytes()


def forward_tiles(problem: LayerProblem, split: AbstractSplit) -> LayerTiles:
    """The steps of a layer's forward, its outputs brought to their ports."""
    tiles = LayerTiles(split)
    outputs = problem.forward.outputs[: len(problem.outputs)]
    tiles.run(problem.forward, (*outputs, *problem.residuals))
    for position, port in enumerate(problem.outputs):
        tiles.leave(problem.forward, position, split.own(port.tensor))
    return tiles


def backward_tiles(problem: LayerProblem, split: AbstractSplit) -> LayerTiles:
    """The steps of a layer's backward, after those of its forward if it recomputes."""
    tiles = LayerTiles(split)
    if problem.remat:
        tiles.run(problem.forward, problem.remade)
    tiles.run(problem.backward, problem.backward.outputs)
    for position, port in enumerate(problem.cotangent_inputs):
        tiles.leave(problem.backward, position, split.own(port.tensor))
    return tiles


@dataclass(slots=True, eq=False)
class _Placed:
    """Where a tile is: in memory by itself (`solid`), or fused; `sources` = the values that it is read from.

    Arguments are solid and have no sources: they are there anyway. `converted`: a solid tile's numbers in another form. `in_order`: element
    by element what the sources are.
    """

    sources: frozenset[int]
    solid: bool
    converted: bool = False
    in_order: bool = True


@dataclass(slots=True, eq=False)
class _Memory:
    """Steps being given memory; `kept` tiles are results, `added` ones are added to an argument as soon as they are made."""

    kept: frozenset[Tile]
    added: frozenset[Tile]
    readers: Counter[Tile]
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    placed: dict[Tile, _Placed] = field(default_factory=dict[Tile, _Placed])
    products: set[int] = field(default_factory=set[int])  # values that contractions made
    rows: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])  # what row reductions made -> what they read
    waiting: list[_Placed] = field(default_factory=list[_Placed])  # what is still to be added

    def place(self, tile: Tile) -> _Placed:
        """Where a tile is; what no step has made is an argument."""
        return self.placed.setdefault(tile, _Placed(frozenset(), solid=True))

    def run(self, step: TileStep) -> None:
        """Take one step."""
        match step:
            case Exchange(read=read, made=made):
                self.solidify(read)
                self._make((made,), self.place(read).sources, in_place=False)
                self._settle(made)
            case Compute(makes=makes):
                self._compute(step)
                for tile in makes:
                    self._settle(tile)

    def solidify(self, tile: Tile) -> None:
        """Have a tile lie in memory."""
        one = self.place(tile)
        if not one.solid:
            by_rows = any(self.rows.get(source, NOTHING) & one.sources for source in one.sources)
            self._make((tile,), one.sources, in_place=one.in_order and not by_rows)

    def add_waiting(self) -> None:
        """Add what was made to its arguments: XLA does so only beside the next product, so that two of them lie in memory."""
        while self.waiting:
            self.lifetimes.run(self.waiting.pop().sources, (), in_place=True)

    def _compute(self, step: Compute) -> None:
        reads, makes = step.reads, step.makes
        match step.work:
            case Work.FUSED | Work.CONVERSION | Work.TRANSPOSITION:
                placed = [self.place(tile) for tile in reads]
                converted = step.work is not Work.FUSED and all(one.solid or one.converted for one in placed)
                in_order = step.work is not Work.TRANSPOSITION and all(one.in_order for one in placed)
                for tile in makes:
                    self.placed[tile] = _Placed(self._sources(reads), solid=False, converted=converted, in_order=in_order)
            case Work.REDUCTION | Work.ROW_REDUCTION:
                self._make(makes, self._sources(reads), in_place=False)
                if step.work is Work.ROW_REDUCTION:
                    self.rows.update((made, self._sources(reads)) for tile in makes for made in self.placed[tile].sources)
            case Work.CONTRACTION | Work.SCATTER:
                beside = self._beside(step)
                for tile in reads:
                    if not (self.place(tile).converted and self.readers[tile] == 1):
                        self.solidify(tile)
                self._make(makes, self._sources(reads), in_place=step.work is Work.SCATTER, beside=beside)
                self.products.update(*(self.placed[tile].sources for tile in makes))

    def _beside(self, step: Compute) -> float:
        """Bytes that a step needs only while it runs."""
        copied = step.turned.num_bytes if step.turned is not None and self.place(step.turned).solid else 0.0
        return max([copied, *(_lifetimes(program, (), ()).peak_bytes() for program in step.inside)])

    def _make(self, tiles: Sequence[Tile], sources: frozenset[int], *, in_place: bool, beside: float = 0.0) -> None:
        """A kernel that makes tiles; `beside` = bytes that it needs only while it runs."""
        *values, _ = self.lifetimes.run(sources, (*(tile.num_bytes for tile in tiles), beside), in_place=in_place)
        for tile, value in zip(tiles, values, strict=True):
            self.placed[tile] = _Placed(frozenset((value,)), solid=True)

    def _settle(self, tile: Tile) -> None:
        """What becomes of a tile that was just made."""
        one = self.placed[tile]
        if tile in self.added and one.sources & self.products:
            self.add_waiting()
            self.waiting.append(one)
        elif tile in self.added:
            self.lifetimes.run(one.sources, (), in_place=True)
        elif tile in self.kept:
            self.solidify(tile)
            self.lifetimes.kept |= self.placed[tile].sources
        elif self.readers[tile] > 1 and sum(self.lifetimes.sizes[source] for source in one.sources) > tile.num_bytes:
            self.solidify(tile)

    def _sources(self, tiles: Sequence[Tile]) -> frozenset[int]:
        return frozenset(source for tile in tiles for source in self.place(tile).sources)


def _lifetimes(steps: Sequence[TileStep], kept: Sequence[Tile], added: Sequence[Tile]) -> Lifetimes:
    """What the steps make, and how long it lies in memory."""
    readers = Counter(tile for step in steps for tile in (step.reads if isinstance(step, Compute) else (step.read,)))
    memory = _Memory(frozenset(kept), frozenset(added), readers)
    for step in steps:
        memory.run(step)
    memory.add_waiting()
    return memory.lifetimes
