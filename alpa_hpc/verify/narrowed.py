"""Steps of a task in code for GPUs -> bytes an element that its collectives send, where XLA converts on the narrower side.

Its collective quantizer has an all-gather or all-to-all send the narrower of two dtypes: what is widened just before is sent as it was, and
what nobody wants but for a narrower conversion is converted first. Transposes, reshapes and cuts may lie between; it looks no further than
one collective, and not past a broadcast.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.task_tiles import all_steps
from alpa_hpc.sharding.tiles import CUT, Compute, Exchange, LayerTiles, Tile, TileStep

MOVES = frozenset({"transpose", "reshape", "squeeze", "slice", "copy", CUT})
NARROWED = frozenset({CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL})


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """Who makes a tile, who reads it, and which tiles are wanted outside."""

    makers: Mapping[Tile, TileStep]
    readers: Mapping[Tile, Sequence[TileStep]]
    kept: frozenset[Tile] = field(default_factory=frozenset[Tile])


def sent_sizes(tiles: Sequence[LayerTiles]) -> dict[Exchange, int]:
    """Bytes an element of what each collective of a task sends."""
    steps = all_steps(tiles)
    flow = _flow(steps, frozenset(tile for one in tiles for tile in one.kept))
    return {step: _sent_size(step, flow) for step in steps if isinstance(step, Exchange)}


def _flow(steps: Iterable[TileStep], kept: frozenset[Tile]) -> _Flow:
    makers: dict[Tile, TileStep] = {}
    readers: dict[Tile, list[TileStep]] = {}
    for step in steps:
        reads, makes = ((step.read,), (step.made,)) if isinstance(step, Exchange) else (step.reads, step.makes)
        makers |= dict.fromkeys(makes, step)
        for tile in dict.fromkeys(reads):
            readers.setdefault(tile, []).append(step)
    return _Flow(makers, readers, kept)


def _sent_size(one: Exchange, flow: _Flow) -> int:
    size = one.made.itemsize
    if one.repeated or one.lane.kind not in NARROWED:
        return size
    before = _size_before(one.read, flow)
    return min(size, before if before < size else _size_after(one.made, flow))


def _size_before(tile: Tile, flow: _Flow) -> int:
    """Bytes an element of what a tile was converted from."""
    match flow.makers.get(tile):
        case Compute(name=name, reads=(read,)) if name in MOVES:
            return _size_before(read, flow)
        case Compute(name="convert_element_type", reads=(read,)):
            return read.itemsize
        case _:
            return tile.itemsize


def _size_after(tile: Tile, flow: _Flow) -> int:
    """Bytes an element of what a tile is converted to, if that is all that is made of it."""
    match [] if tile in flow.kept else flow.readers.get(tile, []):
        case [Compute(name=name, makes=(made,), reads=(_,))] if name in MOVES:
            return _size_after(made, flow)
        case [Compute(name="convert_element_type", makes=(made,))]:
            return made.itemsize
        case _:
            return tile.itemsize
