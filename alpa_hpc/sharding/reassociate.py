"""Two collectives of which only the sum is wanted -> the sum, and one collective, as XLA for GPUs makes of them.

So it does with sums over devices that are added up (or of maxima the maximum is taken), and with gathered pieces of which any function is
made that does not mind their order. Transposes and reshapes may lie between. So what several parts of a layer send is often sent once: the
cotangents of the inputs of query, key and value, say, or the gradients of a weight that is read at every step in time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.strategies.rule import Combine
from alpa_hpc.sharding.tiles import COMMUTATIVE, Compute, Exchange, LayerTiles, Tile, TileStep

SEEN_THROUGH = frozenset({"transpose", "reshape", "squeeze"})
SAME_REDUCTION = {"add": Combine.SUM, "add_any": Combine.SUM, "max": Combine.MAX, "min": Combine.MIN}


def join_sums(layers: Sequence[LayerTiles]) -> None:
    """Rewrite the steps of a task's layers, in the order in which they run."""
    joining = _Joining(Counter(tile for one in layers for step in one.steps for tile in set(reads_of(step))))
    joining.kept.update(tile for one in layers for tile in one.kept)
    rewritten = [joining.layer(one.steps) for one in layers]
    for one, steps in zip(layers, rewritten, strict=True):
        one.steps[:] = [step for step in steps if step not in joining.gone]


def reads_of(step: TileStep) -> tuple[Tile, ...]:
    """The tiles that a step reads."""
    return (step.read,) if isinstance(step, Exchange) else step.reads


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What a collective brought, and the steps that turned it to what is read: the last first."""

    exchange: Exchange
    turns: tuple[Compute, ...]


@dataclass(slots=True, eq=False)
class _Joining:
    """A task on its way; `readers` = how many steps read a tile, `gone` = steps that are no more."""

    readers: Counter[Tile]
    kept: set[Tile] = field(default_factory=set[Tile])
    makers: dict[Tile, TileStep] = field(default_factory=dict[Tile, TileStep])
    gone: set[TileStep] = field(default_factory=set[TileStep])

    def layer(self, steps: Sequence[TileStep]) -> list[TileStep]:
        """The steps of a layer after those before; some of them may turn out to be `gone` later."""
        mine: list[TileStep] = []
        for step in steps:
            for one in self._rewritten(step, mine):
                made = (one.made,) if isinstance(one, Exchange) else one.makes
                self.makers.update(dict.fromkeys(made, one))
                mine.append(one)
        return mine

    def _rewritten(self, step: TileStep, mine: Sequence[TileStep]) -> list[TileStep]:
        """A step, or what takes its place; a collective that is named after one of this layer stays in it."""
        match step:
            case Compute(name=name, reads=(one, other), makes=(made,)) if name in COMMUTATIVE and one is not other:
                first, second = self._arrival(one), self._arrival(other)
            case _:
                return [step]
        if first is None or second is None or not _are_alike(first, second, name):
            return [step]
        named = next((arrival for arrival in (second, first) if arrival.exchange in mine), None)
        if named is None:
            return [step]
        self.gone.update((first.exchange, second.exchange, *first.turns, *second.turns))
        return self._one_instead(step, made, first.exchange.read, second.exchange.read, named, mine)

    def _one_instead(
        self, step: Compute, made: Tile, one: Tile, other: Tile, arrival: _Arrival, mine: Sequence[TileStep]
    ) -> list[TileStep]:
        """The function of what was sent, what of that is sent once, and the turns it takes."""
        summed = Tile(one.num_bytes, one.dtype, one.itemsize)
        self.readers[summed] = 1
        turns = [replace(turn) for turn in reversed(arrival.turns)]
        exchange = replace(arrival.exchange, read=summed, made=arrival.exchange.made if turns else made)
        if turns:
            turns[-1] = replace(turns[-1], makes=(made,))
        return [*self._rewritten(replace(step, reads=(one, other), makes=(summed,)), mine), exchange, *turns]

    def _arrival(self, tile: Tile) -> _Arrival | None:
        """The collective that a tile comes from, if nobody wants anything else of what it brought."""
        turns: list[Compute] = []
        while self.readers[tile] == 1 and tile not in self.kept:
            match self.makers.get(tile):
                case Exchange() as exchange:
                    return _Arrival(exchange, tuple(turns))
                case Compute(name=name, reads=(read,)) as turn if name in SEEN_THROUGH:
                    turns.append(turn)
                    tile = read
                case _:
                    return None
        return None


def _are_alike(first: _Arrival, second: _Arrival, name: str) -> bool:
    """Whether two collectives do the same with tiles of one size, and it makes no difference whether `name` is done before or after."""
    one, other = first.exchange, second.exchange
    same = (one.lane, one.how, one.read.num_bytes, one.read.dtype) == (other.lane, other.how, other.read.num_bytes, other.read.dtype)
    if not same or [turn.name for turn in first.turns] != [turn.name for turn in second.turns]:
        return False
    match one.lane.kind:
        case CollectiveKind.ALL_GATHER:
            return True
        case CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE_SCATTER:
            return SAME_REDUCTION.get(name) is (one.how if isinstance(one.how, Combine) else Combine.SUM)
        case _:
            return False
