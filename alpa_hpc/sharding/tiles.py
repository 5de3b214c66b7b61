"""A layer's programs -> the steps that one device takes on its tiles, collectives included: what is asked of memory and of the network.

Equal functions of equal tiles are one step, as XLA's elimination of common subexpressions makes them, and what nobody wants is no step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from alpa_hpc.ir.flops import aval_bytes
from alpa_hpc.ir.graph import aval_of, variables
from alpa_hpc.sharding.build import Program
from alpa_hpc.sharding.equation_work import NESTS, itemsize_of
from alpa_hpc.sharding.graph import FREE, EquationRecord
from alpa_hpc.sharding.needed import needed
from alpa_hpc.sharding.resharding import CollectiveKind, Lane, Move, Slice, reshard_moves
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.splits import AbstractSplit
from alpa_hpc.sharding.strategies.nested import nested_split
from alpa_hpc.sharding.strategies.registry import rule_of
from alpa_hpc.sharding.strategies.rule import Combine, shape_of
from alpa_hpc.sharding.work_kind import Side, Work, changes_nothing, is_turned, laid_along, lying_apart, makes_kernel, sides, swaps, work_of


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A device's piece of a tensor, as it is in some spec; `original` = what it repeats, if it is a broadcast."""

    num_bytes: float
    dtype: str
    itemsize: int
    original: "Original | None" = None

    @property
    def elements(self) -> float:
        """How many numbers it holds."""
        return self.num_bytes / self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """What a broadcast repeats: a tile, and which dims of the broadcast are its own."""

    tile: Tile
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The equation of a program that wants a step; the number behind the last one stands for what takes the program's results."""

    program: Program
    equation: int


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """What a device does by itself; `inside` = the programs that it runs on the way, one at a time.

    `turned` = an operand that it wants in an order of its own, as libraries for convolutions their kernels: a copy of what lies in memory;
    `turns` = its result lies in such an order, so that it is turned where it goes.
    `found` = bytes of what it finds in its last operand before it begins, `flop` = what it computes, `name` = its primitive's, or `CUT`;
    `swaps`: a transposition that brings the last dims before the first ones; `apart` = operands over whose batches no library strides;
    `sides` = how a product reads each operand; `along` = the dim in which it lays operands one behind the other for products.
    """

    work: Work
    reads: tuple[Tile, ...]
    makes: tuple[Tile, ...]
    inside: tuple[tuple["Compute", ...], ...] = ()
    turned: Tile | None = None
    turns: bool = False
    found: float = 0.0
    flop: float = 0.0
    name: str = ""
    swaps: int | None = None
    apart: tuple[Tile, ...] = ()
    sides: tuple[Side, ...] = ()
    along: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """A barrier: none of what is behind it is there before all of them are, where they lay; nobody knows that they are the same."""

    reads: tuple[Tile, ...]
    makes: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A collective; what it reads and makes lies in memory.

    `how`: the resharding's move, or how what is no sum is joined. `repeated`: a broadcast is made of it afterwards; `turned`: it sums along
    an inner dim, for which XLA turns what it reads.
    """

    lane: Lane
    read: Tile
    made: Tile
    origin: Origin
    how: Move | Combine
    repeated: bool = False
    turned: bool = False


TileStep = Compute | Hold | Exchange

INDEX_BYTES = 4
CUT = "cut"  # the name of a step that takes this device's piece of a tile
COMMUTATIVE = frozenset({"add", "add_any", "mul", "max", "min", "and", "or", "xor"})  # whose operands XLA compares in any order

Functions = dict[tuple[object, ...], tuple[Tile, ...]]
"""What was computed of which tiles -> what it made."""


@dataclass(slots=True, eq=False)
class LayerTiles:
    """The tiles of a layer that were made so far, in every spec that somebody asked for, and the steps that made them.

    Layers that run in one task share `functions`: what one of them has made of the same tiles, another does not make again.
    `gpu`: whether XLA compiles for GPUs: a barrier then hides that what is behind it is the same, and instead of a broadcast its original
    is gathered.
    `left` = the specs of tensors that stay as they are made; `kept` = tiles that are wanted when the task is over.
    """

    split: AbstractSplit
    functions: Functions = field(default_factory=Functions)
    gpu: bool = True
    left: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    steps: list[TileStep] = field(default_factory=list[TileStep])
    kept: set[Tile] = field(default_factory=set[Tile])
    _tiles: dict[tuple[int, Spec], Tile] = field(default_factory=dict[tuple[int, Spec], Tile])
    _arriving: dict[int, tuple[Tile, Spec]] = field(default_factory=dict[int, tuple[Tile, Spec]])

    def run(self, program: Program, wanted: Iterable[int]) -> None:
        """Take the steps that `wanted` tensors need. What nobody has made is an argument, or costs nothing to have."""
        texts = _function_texts(program.jaxpr.jaxpr)
        for number, results in needed(program, wanted).equations:
            origin = Origin(program, number)
            if program.records[number].plans:
                self._run(origin, texts[number], results)
            else:
                self.hold(results, origin)

    def leave(self, program: Program, position: int, spec: Spec) -> Tile:
        """Result number `position` of a program that was run, in the spec in which it is wanted outside."""
        return self._in_spec(program.outputs[position], spec, Origin(program, len(program.records)))

    def put(self, tensor: int, tile: Tile, spec: Spec) -> None:
        """Have a tensor's tile from elsewhere; the first that wants it brings it to its own spec."""
        self._arriving[tensor] = (tile, spec)

    def hold(self, tensors: Iterable[int], origin: Origin) -> None:
        """A barrier in front of tensors, each in its own spec; what they are in other specs is forgotten."""
        if not self.gpu:
            return
        held = {tensor: self.get(tensor, origin) for tensor in tensors}
        signature = ("barrier", *held.values())
        if signature not in self.functions:
            made = tuple(Tile(tile.num_bytes, tile.dtype, tile.itemsize) for tile in held.values())
            self.steps.append(Hold(tuple(held.values()), made))
            self.functions[signature] = made
        self._tiles = {key: tile for key, tile in self._tiles.items() if key[0] not in held}
        for tensor, tile in zip(held, self.functions[signature], strict=True):
            self._tiles[tensor, self.split.own(tensor)] = tile

    def add(self, one: Tile, other: Tile) -> Tile:
        """The sum of two tiles that are in the same spec."""
        signature = ("add", one, other)
        if signature not in self.functions:
            self.functions[signature] = (Tile(one.num_bytes, one.dtype, one.itemsize),)
            self.steps.append(Compute(Work.FUSED, (one, other), self.functions[signature], name="add_any"))
        return self.functions[signature][0]

    def get(self, tensor: int, origin: Origin) -> Tile:
        """A tensor's tile in its own spec."""
        return self._in_spec(tensor, self.split.own(tensor), origin)

    def _tile(self, tensor: int, spec: Spec, original: Original | None = None) -> Tile:
        return Tile(self.split.num_bytes(tensor, spec), self.split.dtype(tensor), self.split.itemsize(tensor), original)

    def _in_spec(self, tensor: int, spec: Spec, origin: Origin) -> Tile:
        """The tile of a tensor in a spec, brought there if it was not yet."""
        if (tensor, spec) not in self._tiles:
            own = self.split.own(tensor)
            if spec != own:
                made = self._moved(self.get(tensor, origin), tensor, own, spec, origin)
            elif tensor in self._arriving:
                tile, arriving = self._arriving[tensor]
                made = self._moved(tile, tensor, arriving, own, origin)
            else:
                made = self._tile(tensor, own)
            self._tiles[tensor, spec] = made
        return self._tiles[tensor, spec]

    def _run(self, origin: Origin, text: str, wanted: tuple[int, ...]) -> None:
        record, eqn = origin.program.records[origin.equation], origin.program.jaxpr.jaxpr.eqns[origin.equation]
        operands = [(tensor, spec) for tensor, spec in zip(record.operands, self.split.read(record), strict=True) if tensor >= 0]
        reads = tuple(self._in_spec(tensor, spec, origin) for tensor, spec in operands)
        specs = tuple(self.split.made(record))
        if changes_nothing(eqn) and specs == (operands[0][1],):
            made = reads
        else:
            made = self._computed(eqn, record, text, reads, specs)
        for tensor, tile, spec in zip(record.results, made, specs, strict=True):
            if tensor not in wanted:
                continue
            own = self.left.get(tensor, self.split.own(tensor))
            self._tiles[tensor, own] = self._moved(self._joined(tile, record, origin), tensor, spec, own, origin)

    def _computed(
        self, eqn: JaxprEqn, record: EquationRecord, text: str, reads: tuple[Tile, ...], specs: tuple[Spec, ...]
    ) -> tuple[Tile, ...]:
        """What an equation makes in specs of tiles that it reads; computed if it was not yet."""
        signature = (text, frozenset(reads) if eqn.primitive.name in COMMUTATIVE else reads, specs)
        if signature not in self.functions:
            broadcast = eqn.primitive.name == "broadcast_in_dim" and reads
            original = Original(reads[0], eqn.params["broadcast_dimensions"]) if broadcast else None
            made = tuple(self._tile(tensor, spec, original) for tensor, spec in zip(record.results, specs, strict=True))
            work = Work.FUSED if record.node == FREE else work_of(eqn)
            turned = reads[-1] if work is Work.CONVOLUTION and reads and is_turned(eqn) else None
            turns = work is Work.CONVOLUTION and makes_kernel(eqn)
            found = _picked_bytes(eqn, reads) if work is Work.REDUCTION else 0.0
            flop = record.work.flop / self.split.num_parts(record)
            inside, name = self._inside(eqn, record), eqn.primitive.name
            is_whole = len(reads) == len(eqn.invars)
            self.steps.append(
                Compute(
                    work, reads, made, inside, turned, turns, found, flop, name, swaps(eqn),
                    apart=tuple(reads[position] for position in lying_apart(eqn)) if is_whole else (),
                    sides=sides(eqn) if is_whole else (),
                    along=laid_along(eqn),
                )
            )  # fmt: skip
            self.functions[signature] = made
        return self.functions[signature]

    def _inside(self, eqn: JaxprEqn, record: EquationRecord) -> tuple[tuple[Compute, ...], ...]:
        """The steps of a nest's programs: nothing is exchanged in them."""
        if eqn.primitive.name not in NESTS:
            return ()
        nest = nested_split(rule_of, eqn)
        tiles: dict[Var, Tile] = {}

        def tile_of(var: Var) -> Tile:
            num_bytes = aval_bytes(aval_of(var)) / self.split.num_pieces(record, nest.dims[var])
            return tiles.setdefault(var, Tile(num_bytes, str(aval_of(var).dtype), itemsize_of(var)))

        def compute(inner: JaxprEqn) -> Compute:
            return Compute(work_of(inner), tuple(map(tile_of, variables(inner.invars))), tuple(map(tile_of, inner.outvars)))

        return tuple(tuple(compute(step.eqn) for step in steps) for steps in nest.steps)

    def _joined(self, tile: Tile, record: EquationRecord, origin: Origin) -> Tile:
        """A result that is no sum, once devices have joined it."""
        for combine, axes in self.split.joined(record).items():
            tile = self._exchanged(Lane(CollectiveKind.ALL_REDUCE, axes), combine, tile, tile.num_bytes, origin)
        return tile

    def _moved(self, tile: Tile, tensor: int, source: Spec, target: Spec, origin: Origin) -> Tile:
        """A tile after a resharding, each move of it once."""
        for move in reshard_moves(source, target, self.split.shape):
            num_bytes = self.split.num_bytes(tensor, move.after)
            if move.is_local:
                tile = self._made_of(tile, move, num_bytes, _cut_original(tile, move))
            elif self.gpu and tile.original and move.lane.kind is CollectiveKind.ALL_GATHER:
                original = tile.original.tile
                gathered = self._exchanged(
                    move.lane, move, original, original.num_bytes * num_bytes / tile.num_bytes, origin, repeated=True
                )
                tile = self._made_of(gathered, ("broadcast", num_bytes), num_bytes)
            else:
                before = move.before.local_shape(self.split.problem.tensors[tensor].shape, self.split.shape)
                tile = self._exchanged(move.lane, move, tile, num_bytes, origin, turned=move.sums_inside(before))
        return tile

    def _made_of(self, tile: Tile, how: object, num_bytes: float, original: Original | None = None) -> Tile:
        signature = (how, tile)
        if signature not in self.functions:
            made = Tile(num_bytes, tile.dtype, tile.itemsize, original)
            self.steps.append(Compute(Work.FUSED, (tile,), (made,), name=CUT if isinstance(how, Move) else ""))
            self.functions[signature] = (made,)
        return self.functions[signature][0]

    def _exchanged(  # noqa: PLR0913 - an exchange's
        self, lane: Lane, how: Move | Combine, tile: Tile, num_bytes: float, origin: Origin, *, repeated: bool = False, turned: bool = False
    ) -> Tile:
        signature = (lane, how, tile)
        if signature not in self.functions:
            made = Tile(num_bytes, tile.dtype, tile.itemsize)
            self.steps.append(Exchange(lane, tile, made, origin, how, repeated, turned))
            self.functions[signature] = (made,)
        return self.functions[signature][0]


def _cut_original(tile: Tile, move: Move) -> Original | None:
    """What a cut of a broadcast repeats, if that need not be cut itself."""
    match move.steps[0]:
        case Slice(_, dim) if tile.original and dim not in tile.original.dims:
            return tile.original
        case _:
            return None


@lru_cache(maxsize=512)
def _function_texts(jaxpr: Jaxpr) -> tuple[str, ...]:
    """Each equation's primitive, parameters and literals, as a text: what tells apart functions of the same tiles."""
    return tuple(f"{eqn.primitive.name} {eqn.params} {_literals(eqn)}" for eqn in jaxpr.eqns)


def _literals(eqn: JaxprEqn) -> list[str]:
    """The literals among an equation's operands, each in its place, if that matters."""
    texts = [str(atom) if isinstance(atom, Literal) else "" for atom in eqn.invars]
    return sorted(texts) if eqn.primitive.name in COMMUTATIVE else texts


def _picked_bytes(eqn: JaxprEqn, reads: tuple[Tile, ...]) -> float:
    """Bytes of the places that a scatter to the picked one of each window finds first, an index a dim, and of what it finds there."""
    if eqn.primitive.name != "select_and_scatter_add":
        return 0.0
    return reads[0].elements * INDEX_BYTES * len(shape_of(eqn.invars[0])) + reads[0].num_bytes
