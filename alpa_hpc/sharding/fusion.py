"""Steps of a device -> kernels and what they keep in memory, as XLA makes them for GPUs.

A simple model, held against code that XLA compiles (`benchmarks/gpu_hlo.py`). Results of contractions, reductions and collectives lie in
memory, and so does every operand of a contraction or collective, made as late as its first reader allows; but a product of matrices works
out as it reads what is a function of one array, converts what it alone reads, and reads what lies piece by piece, one behind the other; but
of a batch of products whose dims lie apart, as those of heads behind a sequence do, it reads a copy. What it makes it adds to an
argument of the same dtype as it writes. All else is fused into its readers, which then read what it is made from, unless several kernels
want it and that is clearly more to read than the thing itself. So is what costs next to nothing to work out of a part of a product, even if
it is kept: of that a copy is made beside, when there is time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.fused_into import kernels_of
from alpa_hpc.sharding.kernel_seconds import CONVOLUTION, Collective, product_seconds, streaming_seconds
from alpa_hpc.sharding.lifetimes import Lifetimes
from alpa_hpc.sharding.merge_products import PART
from alpa_hpc.sharding.spec import split_of
from alpa_hpc.sharding.tiles import Compute, Exchange, Hold, Tile, TileStep
from alpa_hpc.sharding.work_kind import Work

NOTHING: frozenset[int] = frozenset()
LONE = MeshShape(1, 1)
CHEAP = frozenset(
    [*"add sub mul div neg broadcast_in_dim convert_element_type slice split squeeze reshape copy".split(), PART]
)  # XLA works them out twice
MORE_TO_READ = 1.25  # times what a thing holds: above that it is made once for its readers; the mean of a batch beside it is no more


def lifetimes_of(
    steps: Sequence[TileStep],
    kept: Sequence[Tile] = (),
    added: Sequence[Tile] = (),
    mesh: MeshShape = LONE,
    spanning: tuple[bool, bool] = (False, False),
) -> Lifetimes:
    """What the steps make on a device of a mesh, and how long it lies in memory.

    `kept`, `added` as in _Memory, `added` in the order of a program's results; `spanning` as in LayerProblem.
    """
    readers = Counter(tile for step in steps for tile in ((step.read,) if isinstance(step, Exchange) else step.reads))
    memory = _Memory(mesh, spanning, frozenset(kept), frozenset(added), readers, kernels_of(steps, {*kept, *added}))
    for step in steps:
        memory.run(step)
    memory.add_waiting()
    memory.lifetimes.put_off(memory.wider)
    memory.copy_first()
    memory.lifetimes.results = [value for tile in added for value in memory.sums.get(tile, ())]
    return memory.lifetimes


@dataclass(slots=True, eq=False)
class _Placed:
    """Where a tile is: in memory by itself (`solid`), or fused; `sources` = the values that it is read from.

    `converted`: a solid tile's numbers in another form; `same`: and of as many bytes each. `worked_out`: a function of one solid tile.
    `cheap`: a function or a part of solid tiles that costs next to nothing to work out again; `shared`: others read what it is made from.
    `finishes`: a function of a product alone, which the kernel of the product can work out as it writes.
    `in_order`: element by element what the sources are. `joined`: the dim along which solid tiles lie one behind the other.
    """

    sources: frozenset[int]
    solid: bool
    converted: bool = False
    same: bool = False
    worked_out: bool = False
    cheap: bool = False
    shared: bool = False
    finishes: bool = False
    in_order: bool = True
    joined: int | None = None


@dataclass(frozen=True, slots=True)
class _MatrixProduct:
    """The place of its kernel, and how many dims of a batch it has."""

    kernel: int
    batch: int


_Kernel = tuple[frozenset[int], float]  # what it is read from, and its bytes


@dataclass(slots=True, eq=False)
class _Memory:
    """Steps of a device of a mesh; `kept` tiles are results, `added` ones are added to an argument as soon as they are made."""

    mesh: MeshShape
    spanning: tuple[bool, bool]
    kept: frozenset[Tile]
    added: frozenset[Tile]
    readers: Counter[Tile]
    kernels_of: Mapping[Tile, Set[Tile]]
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    placed: dict[Tile, _Placed] = field(default_factory=dict[Tile, _Placed])
    products: set[int] = field(default_factory=set[int])  # values that contractions made
    matrices: dict[int, _MatrixProduct] = field(default_factory=dict[int, "_MatrixProduct"])  # those that products of matrices made
    arrived: set[int] = field(default_factory=set[int])  # those that collectives brought
    turned: set[int] = field(default_factory=set[int])  # those among them in an order of a library's own
    kernels: dict[_Kernel, frozenset[int]] = field(default_factory=dict[_Kernel, frozenset[int]])  # copies that convolutions read
    copies: dict[Tile, frozenset[int]] = field(default_factory=dict[Tile, frozenset[int]])  # of operands whose batch dims lie apart
    rows: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])  # what row reductions made -> what they read
    waiting: list[Tile] = field(default_factory=list[Tile])  # what is still to be added
    sums: dict[Tile, tuple[int, ...]] = field(default_factory=dict[Tile, tuple[int, ...]])  # values that stand for what was added
    wider: dict[int, float] = field(default_factory=dict[int, float])  # kernels that seem to take memory for what they add to -> its bytes

    def place(self, tile: Tile) -> _Placed:
        """Where a tile is; what no step has made is an argument."""
        if tile not in self.placed:
            self.placed[tile] = _Placed(frozenset((self.lifetimes.value(),)), solid=True)
        return self.placed[tile]

    def run(self, step: TileStep) -> None:
        """Take one step."""
        match step:
            case Exchange(read=read, made=made):
                self.solidify(read)
                self._exchange(step)
                self._settle(made)
            case Hold():
                self._hold(step)
            case Compute(makes=makes):
                self._compute(step)
                for tile in makes:
                    self._settle(tile)

    def solidify(self, tile: Tile) -> None:
        """Have a tile lie in memory."""
        one = self.place(tile)
        if not one.solid:
            by_rows = any(not one.sources.isdisjoint(self.rows.get(source, NOTHING)) for source in one.sources)
            elements = 0.0 if by_rows else tile.elements
            self._stream((tile,), one.sources, elements, in_place=one.in_order and not by_rows)

    def copy_first(self) -> None:
        """List copies of arguments first: XLA's scheduler for memory takes what needs little before what needs much."""
        if self.copies:
            kernels, copies = self.lifetimes.kernels, frozenset[int]().union(*self.copies.values())
            made = {value for kernel in kernels for value in kernel.makes}
            kernels.sort(key=lambda kernel: not (copies.issuperset(kernel.makes) and made.isdisjoint(kernel.reads)))

    def add_waiting(self) -> None:
        """Add what was made to its arguments: XLA does so only beside the next product, so that two of them lie in memory.

        What a library made in an order of its own is added in the argument's, and that is copied to where the argument is.
        """
        while self.waiting:
            tile = self.waiting.pop()
            one = self.placed[tile]
            seconds = self._adding_seconds(tile)
            if one.sources & self.turned:
                summed = self.lifetimes.run(one.sources, (tile.num_bytes,), in_place=False, seconds=seconds)
                self.sums[tile] = self.lifetimes.run(frozenset(summed), (0.0,), in_place=True)  # XLA takes a copy for nothing
            else:
                if tile.num_bytes > sum(self.lifetimes.sizes[source] for source in one.sources):
                    self.wider[len(self.lifetimes.kernels)] = tile.num_bytes
                self.sums[tile] = self.lifetimes.run(one.sources, (0.0,), in_place=True, seconds=seconds)

    def _exchange(self, step: Exchange) -> None:
        read, made = step.read.num_bytes, step.made.num_bytes
        across = any(self.spanning[axis] for axis in step.lane.axes)
        devices = split_of(step.lane.axes, self.mesh)
        collective = Collective(step.lane, step.made.itemsize, max(read, made), made, devices, across)
        sources = self.place(step.read).sources
        if step.turned and sources & self.products:
            sources = frozenset(self.lifetimes.run(sources, (read,), in_place=False, seconds=streaming_seconds(2 * read)))
        arrived = self.lifetimes.exchange(sources, collective)
        self.arrived |= arrived
        self.placed[step.made] = _Placed(arrived, solid=True)

    def _hold(self, step: Hold) -> None:
        """Every tile lies where it lay, and whoever reads it waits for all of them."""
        for tile in step.reads:
            self.solidify(tile)
        barrier = frozenset(self.lifetimes.run(self._sources(step.reads), (0.0,), in_place=False))
        self.lifetimes.barriers |= barrier
        for read, made in zip(step.reads, step.makes, strict=True):
            self.placed[made] = replace(self.place(read), sources=self.place(read).sources | barrier)

    def _compute(self, step: Compute) -> None:
        reads, makes = step.reads, step.makes
        match step.work:
            case Work.FUSED | Work.FUNCTION | Work.CONVERSION | Work.TRANSPOSITION:
                for tile in makes:
                    self.placed[tile] = self._fused(step, tile)
            case Work.REDUCTION | Work.ROW_REDUCTION:
                elements = max((tile.elements for tile in reads), default=0.0)
                self._stream(makes, self._sources(reads) | self._places(step), elements, in_place=False)
                if step.work is Work.ROW_REDUCTION:
                    counted = self._counted(self._sources(reads))
                    self.rows.update((made, counted) for tile in makes for made in self.placed[tile].sources)
            case Work.CONTRACTION | Work.CONVOLUTION | Work.SCATTER:
                self._contract(step)

    def _places(self, step: Compute) -> frozenset[int]:
        """What a scatter to the picked one of each window finds first, which needs nothing but the windows: often long before."""
        if not step.found:
            return NOTHING
        windows, seconds = self._sources(step.reads[-1:]), streaming_seconds(step.found)
        return frozenset(self.lifetimes.run(windows, (step.found,), in_place=False, seconds=seconds))

    def _fused(self, step: Compute, tile: Tile) -> _Placed:
        """A tile that is made where it is read."""
        placed = [self.place(one) for one in step.reads]
        converted = step.work not in (Work.FUSED, Work.FUNCTION) and all(one.solid or one.converted for one in placed)
        same = converted and all(one.solid or one.same for one in placed) and all(one.itemsize == tile.itemsize for one in step.reads)
        as_small = all(one.num_bytes <= tile.num_bytes for one in step.reads)
        worked_out = step.work is Work.FUNCTION and as_small and all(one.solid or one.worked_out for one in placed)
        cheap = step.name in CHEAP and all(one.solid or one.cheap for one in placed)
        swapped = step.swaps is not None and self.readers[step.reads[0]] == 1 and self._is_product_of_batch(placed[0], step.swaps)
        return _Placed(
            self._sources(step.reads),
            solid=False,
            converted=converted,
            same=same,
            worked_out=worked_out,
            cheap=cheap,
            shared=len(step.makes) > 1 or any(map(self._is_shared, step.reads)),
            finishes=(cheap or swapped or step.work is Work.FUNCTION) and all(self._is_product(one) or one.finishes for one in placed),
            in_order=(swapped or step.work is not Work.TRANSPOSITION) and all(one.in_order for one in placed),
            joined=step.along if all(one.solid for one in placed) else None,
        )

    def _is_shared(self, tile: Tile) -> bool:
        """Whether others than one reader want a tile, if it is no argument, or what it is worked out of."""
        one = self.place(tile)
        return one.shared or (self.readers[tile] > 1 and bool(self._counted(one.sources)))

    def _contract(self, step: Compute) -> None:
        beside = max((lifetimes_of(program).peak_bytes() for program in step.inside), default=0.0)
        sources = NOTHING
        copied = [tile for tile in step.apart if self._is_read_as_it_is(step, tile)]
        for tile in step.reads:
            as_it_is = self._is_read_as_it_is(step, tile)
            if tile in copied:
                sources |= self._copy(tile)
            elif tile is step.turned or (not as_it_is and _is_kernel(step, tile)):
                sources |= self._kernel(tile)
            elif not as_it_is:
                self.solidify(tile)
        sources |= self._sources([tile for tile in step.reads if tile not in copied])
        if step.work is Work.CONVOLUTION:
            seconds = CONVOLUTION
        else:
            seconds = product_seconds(step.flop, step.makes[0].elements, self._bytes_moved((), sources), step.makes[0].dtype)
        self._make(step.makes, sources, seconds, in_place=step.work is Work.SCATTER, beside=beside)
        made = [value for tile in step.makes for value in self.placed[tile].sources]
        self.products.update(made)
        if step.sides:
            self.matrices.update(dict.fromkeys(made, _MatrixProduct(len(self.lifetimes.kernels) - 1, len(step.sides[0].batch))))
        if step.turns:
            self.turned.update(made)

    def _copy(self, tile: Tile) -> frozenset[int]:
        """What batches of products read of a tile whose batch dims lie apart, as no library strides over what lies between."""
        if tile not in self.copies:
            self.copies[tile] = frozenset(self.lifetimes.run(self.place(tile).sources, (tile.num_bytes,), in_place=False))
        return self.copies[tile]

    def _kernel(self, tile: Tile) -> frozenset[int]:
        """A convolution's kernel in the order of the library: the same copy for its gradient, if one program has both."""
        sources, num_bytes = self.place(tile).sources, tile.num_bytes
        if (sources, num_bytes) not in self.kernels:
            self.kernels[sources, num_bytes] = frozenset(self.lifetimes.run(sources, (num_bytes,), in_place=False))
        return self.kernels[sources, num_bytes]

    def _is_read_as_it_is(self, step: Compute, tile: Tile) -> bool:
        """Whether a contraction needs no copy of an operand but, maybe, one in another order."""
        one = self.place(tile)
        if one.solid:
            return True
        if step.work is Work.CONVOLUTION:
            return one.same
        if one.joined is not None and _sums_along(step, tile).isdisjoint((one.joined,)):
            return True
        return one.worked_out or (one.converted and self.readers[tile] == 1)

    def _stream(self, tiles: Sequence[Tile], sources: frozenset[int], elements: float, *, in_place: bool) -> None:
        """A kernel that takes as long as memory does to read and write what it reads and makes."""
        self._make(tiles, sources, streaming_seconds(self._bytes_moved(tiles, sources)), in_place=in_place, elements=elements)

    def _bytes_moved(self, tiles: Sequence[Tile], sources: frozenset[int]) -> float:
        return sum(self.lifetimes.sizes[source] for source in sources) + sum(tile.num_bytes for tile in tiles)

    def _make(  # noqa: PLR0913 - a kernel's
        self, tiles: Sequence[Tile], sources: frozenset[int], seconds: float, *, in_place: bool, beside: float = 0.0, elements: float = 0.0
    ) -> None:
        """A kernel that makes tiles; `beside` = bytes that it needs only while it runs."""
        sizes = (*(tile.num_bytes for tile in tiles), beside)
        *values, _ = self.lifetimes.run(sources, sizes, in_place=in_place, elements=elements, seconds=seconds)
        for tile, value in zip(tiles, values, strict=True):
            self.placed[tile] = _Placed(frozenset((value,)), solid=True)

    def _settle(self, tile: Tile) -> None:
        """What becomes of a tile that was just made."""
        one = self.placed[tile]
        if tile in self.added and one.sources & self.products:
            self.add_waiting()
            if self._is_added_as_it_is_made(tile):
                self._add_inside(tile)
            else:
                self.waiting.append(tile)
        elif tile in self.added:
            self._add(tile)
        elif tile in self.kept and self._is_what_a_product_makes(tile):
            self.placed[tile] = _Placed(one.sources, solid=True)
            self.lifetimes.kept |= one.sources
        elif tile in self.kept and one.cheap and one.shared and self._counted(one.sources) <= self.products:
            self._keep_a_copy(tile)
        elif tile in self.kept:
            self.solidify(tile)
            self.lifetimes.kept |= self.placed[tile].sources
        elif (
            len(self.kernels_of[tile]) > 1
            and self.readers[tile] > 1
            and sum(self.lifetimes.sizes[source] for source in one.sources) > MORE_TO_READ * tile.num_bytes
        ):
            self.solidify(tile)

    def _is_product(self, one: _Placed) -> bool:
        return one.solid and bool(one.sources) and one.sources <= self.products

    def _is_product_of_batch(self, one: _Placed, num_dims: int) -> bool:
        """Whether it is a product whose batch has so many dims."""
        return self._is_product(one) and all(self._batch_of(value) == num_dims for value in one.sources)

    def _batch_of(self, value: int) -> int:
        return self.matrices[value].batch if value in self.matrices else 0

    def _is_what_a_product_makes(self, tile: Tile) -> bool:
        """Whether a product's kernel can make a tile in place of its product, which nobody else wants."""
        one = self.placed[tile]
        return (
            one.finishes and one.in_order and not one.shared and [self.lifetimes.sizes[value] for value in one.sources] == [tile.num_bytes]
        )

    def _is_added_as_it_is_made(self, tile: Tile) -> bool:
        """Whether the kernel of a product of matrices adds to the argument what it makes: a tile in the dtype of the product."""
        one = self.placed[tile]
        return one.sources <= self.matrices.keys() and not self.readers[tile] and (one.solid or self._is_what_a_product_makes(tile))

    def _add_inside(self, tile: Tile) -> None:
        """The product itself is nowhere in memory; to XLA's scheduler its kernel seems to take as much as the argument."""
        [value] = self.placed[tile].sources
        self.lifetimes.sizes[value] = 0.0
        self.wider[self.matrices[value].kernel] = tile.num_bytes
        self.sums[tile] = (value,)

    def _keep_a_copy(self, tile: Tile) -> None:
        """Keep what costs next to nothing to work out of a product; who reads it works it out for itself, and nobody waits for the copy."""
        one = self.placed[tile]
        seconds = streaming_seconds(self._bytes_moved((tile,), one.sources))
        self.lifetimes.kept.update(self.lifetimes.run(one.sources, (tile.num_bytes,), in_place=one.in_order, seconds=seconds))

    def _add(self, tile: Tile) -> None:
        """Add a tile to its argument; what a collective brought in an order of its own, to which XLA takes a copy."""
        sources = self.placed[tile].sources
        self.sums[tile] = self.lifetimes.run(sources, (0.0,), in_place=True, seconds=self._adding_seconds(tile))
        if sources & self.arrived:
            self.sums[tile] = self.lifetimes.run(frozenset(self.sums[tile]), (0.0,), in_place=True)

    def _adding_seconds(self, tile: Tile) -> float:
        """Of the kernel that adds a tile to an accumulator of its dtype; of what the tile is made of it reads as much as the tile holds."""
        read = sum(min(self.lifetimes.sizes[source], tile.num_bytes) for source in self.placed[tile].sources)
        return streaming_seconds(read + 2 * tile.num_bytes)

    def _sources(self, tiles: Sequence[Tile]) -> frozenset[int]:
        return frozenset(source for tile in tiles for source in self.place(tile).sources)

    def _counted(self, values: frozenset[int]) -> frozenset[int]:
        """Those that are no arguments."""
        return frozenset(value for value in values if self.lifetimes.sizes[value] > 0)


def _sums_along(step: Compute, tile: Tile) -> frozenset[int]:
    """The dims of an operand that a product sums over."""
    return frozenset(dim for read, side in zip(step.reads, step.sides, strict=False) if read is tile for dim in side.contracted)


def _is_kernel(step: Compute, tile: Tile) -> bool:
    """Whether a tile is what a convolution slides over images."""
    return step.work is Work.CONVOLUTION and not step.turns and tile is step.reads[-1]
