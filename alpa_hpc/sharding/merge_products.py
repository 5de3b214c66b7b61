"""Small products of matrices that read one operand alike -> one product, of which each of them is a part.

So XLA for GPUs makes them: what query, key and value are made of, say, or the gradients of two weights of one sum. The whole product lies
in memory until the last of its parts was read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from alpa_hpc.sharding.kernel_order import by_place
from alpa_hpc.sharding.lifetimes import Kernel
from alpa_hpc.sharding.reassociate import reads_of
from alpa_hpc.sharding.schedule import Groups
from alpa_hpc.sharding.tiles import Compute, Exchange, Tile, TileStep
from alpa_hpc.sharding.work_kind import Side, Work

SMALL = 64 << 20  # bytes of operands and result: at least one of two that XLA merges has no more (`xla_gpu_dot_merger_threshold_mb`)
PART = "part"  # the name of a step that takes one product out of a merged one


@dataclass(frozen=True, slots=True, eq=False)
class _Products:
    """Products that are one; `steps` = their numbers, `shared` = what all of them read, `others` = what else each of them does.

    place: whether the first of them reads what is shared on its left (0) or on its right; `side` = how, `sides` = how the others are read
    """

    steps: tuple[int, ...]
    shared: Tile
    others: tuple[Tile, ...]
    made: tuple[Tile, ...]
    place: int
    side: Side
    sides: tuple[Side, ...]

    @property
    def num_bytes(self) -> float:
        """Bytes of operands and result."""
        return self.shared.num_bytes + sum(tile.num_bytes for tile in (*self.others, *self.made))

    def with_other(self, other: "_Products") -> "_Products":
        """Both as one."""
        return replace(
            self,
            steps=(*self.steps, *other.steps),
            others=(*self.others, *other.others),
            made=(*self.made, *other.made),
            sides=(*self.sides, *other.sides),
        )


def merge_products(steps: Sequence[TileStep]) -> list[TileStep]:
    """Steps with merged products in the place of the last of them, in an order in which they can run."""
    readers = {shared: found for shared, found in _readers(steps).items() if len(found) > 1 and any(map(_is_small, found))}
    if not readers:
        return list(steps)
    groups = Groups(_as_kernels(steps))
    merged: dict[int, _Products] = {}
    for shared in _by_age(readers, steps):
        for one in _merged([product for product in readers[shared] if product.steps[0] not in merged], groups):
            merged.update(dict.fromkeys(one.steps, one))
    return _in_order(list(_rewritten(steps, merged))) if merged else list(steps)


def _readers(steps: Sequence[TileStep]) -> dict[Tile, list[_Products]]:
    """Products by what they read."""
    found: dict[Tile, list[_Products]] = {}
    for number, step in enumerate(steps):
        if isinstance(step, Compute) and step.sides:
            for place, tile in enumerate(dict.fromkeys(step.reads)):
                others, sides = step.reads[1 - place], step.sides[1 - place]
                one = _Products((number,), tile, (others,), step.makes, place, step.sides[place], (sides,))
                found.setdefault(tile, []).append(one)
    return found


def _by_age(tiles: Iterable[Tile], steps: Sequence[TileStep]) -> list[Tile]:
    """Arguments first, then what is made first."""
    made = {tile: number for number, step in enumerate(steps) for tile in _made_by(step)}
    return sorted(tiles, key=lambda tile: made.get(tile, -1))


def _merged(products: Sequence[_Products], groups: Groups) -> Iterator[_Products]:
    """Of products that read one tile, those that are several by now; each takes in what it can of those behind it."""
    left = list(products)
    while left:
        one, *behind = left
        left = []
        for other in behind:
            if (_is_small(one) or _is_small(other)) and _are_alike(one, other) and groups.join(one.steps[0], other.steps[0]):
                one = one.with_other(other)
            else:
                left.append(other)
        if len(one.steps) > 1:
            yield one


def _is_small(product: _Products) -> bool:
    return product.num_bytes <= SMALL


def _are_alike(one: _Products, other: _Products) -> bool:
    """Whether two products read what they share in the same way, or one of them the transposed matrix that the other one reads."""
    if (one.others[0].dtype, one.made[0].dtype) != (other.others[0].dtype, other.made[0].dtype):
        return False
    return one.side == other.side if one.place == other.place else _is_of_matrices(one.side) and one.side == other.side


def _is_of_matrices(side: Side) -> bool:
    return not side.batch and side.rank == len("mk")


def _as_kernels(steps: Sequence[TileStep]) -> list[Kernel]:
    """What they read and make, as numbers."""
    numbers: dict[Tile, int] = {}

    def number(tiles: Iterable[Tile]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(tile, len(numbers)) for tile in tiles)

    return [Kernel(frozenset(number(reads_of(step))), number(_made_by(step)), frozenset()) for step in steps]


def _made_by(step: TileStep) -> tuple[Tile, ...]:
    return (step.made,) if isinstance(step, Exchange) else step.makes


def _rewritten(steps: Sequence[TileStep], merged: dict[int, _Products]) -> Iterator[TileStep]:
    """Steps with what was merged in the place of its last product."""
    for number, step in enumerate(steps):
        one = merged.get(number)
        if one is None:
            yield step
        elif number == max(one.steps):
            yield from _whole(one, [step for step in map(steps.__getitem__, one.steps) if isinstance(step, Compute)])


def _whole(one: _Products, parts: Sequence[Compute]) -> Iterator[Compute]:
    """A merged product, and what it is the whole of."""
    made = Tile(sum(tile.num_bytes for tile in one.made), one.made[0].dtype, one.made[0].itemsize)
    apart = tuple(dict.fromkeys(tile for part in parts for tile in part.apart))
    flop = sum(part.flop for part in parts)
    yield Compute(
        Work.CONTRACTION, (one.shared, *one.others), (made,), flop=flop, name=parts[0].name, apart=apart, sides=(one.side, *one.sides)
    )
    for part in parts:
        yield Compute(Work.FUSED, (made,), part.makes, name=PART)


def _in_order(steps: Sequence[TileStep]) -> list[TileStep]:
    """Steps as they are listed, but each behind what makes what it reads."""
    maker = {tile: number for number, step in enumerate(steps) for tile in _made_by(step)}
    readers: list[set[int]] = [set() for _ in steps]
    waiting: list[int] = []
    for number, step in enumerate(steps):
        needed = {maker[tile] for tile in reads_of(step) if tile in maker}
        waiting.append(len(needed))
        for one in needed:
            readers[one].add(number)
    return [steps[number] for number in by_place(range(len(steps)), readers, waiting)]
