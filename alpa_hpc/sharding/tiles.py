"""A layer's programs -> the steps that one device takes on its tiles, collectives included: what is asked of memory and of the network.

Equal functions of equal tiles are one step, as XLA's elimination of common subexpressions makes them, and what nobody wants is no step.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from alpa_hpc.ir.flops import aval_bytes
from alpa_hpc.ir.graph import aval_of, variables
from alpa_hpc.sharding.build import Program
from alpa_hpc.sharding.equation_work import CONTRACTIONS, NESTS, itemsize_of
from alpa_hpc.sharding.graph import FREE, EquationRecord
from alpa_hpc.sharding.needed import needed_equations
from alpa_hpc.sharding.resharding import CollectiveKind, Lane, reshard_moves
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.splits import AbstractSplit
from alpa_hpc.sharding.strategies.elementwise import ELEMENTWISE
from alpa_hpc.sharding.strategies.nested import nested_split
from alpa_hpc.sharding.strategies.registry import rule_of
from alpa_hpc.sharding.strategies.rule import shape_of


class Work(enum.Enum):
    """What a step does with memory."""

    FUSED = "fused"
    """element by element, or a view: can be made where it is read"""
    FUNCTION = "function"
    """of one array, which it reads once, element by element: a product of matrices can work it out as it reads"""
    CONVERSION = "conversion"
    """the same numbers in another dtype or shape: a contraction can do that as it reads"""
    TRANSPOSITION = "transposition"
    """likewise in another order, so that it is never made where its operand lies"""
    REDUCTION = "reduction"
    """reads what may be fused; its result lies in memory"""
    ROW_REDUCTION = "row reduction"
    """likewise over the last dim: one kernel can reduce a row, and make another of it and of the result"""
    CONTRACTION = "contraction"
    """operands and results lie in memory"""
    CONVOLUTION = "convolution"
    """likewise; a library works out nothing as it reads, and has an order of its own for kernels"""
    SCATTER = "scatter"
    """likewise, and the result takes its operand's place"""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A device's piece of a tensor, as it is in some spec."""

    num_bytes: float
    itemsize: int

    @property
    def elements(self) -> float:
        """How many numbers it holds."""
        return self.num_bytes / self.itemsize


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
    `beside` = bytes that it needs only while it runs, `flop` = what it computes.
    """

    work: Work
    reads: tuple[Tile, ...]
    makes: tuple[Tile, ...]
    inside: tuple[tuple["Compute", ...], ...] = ()
    turned: Tile | None = None
    turns: bool = False
    beside: float = 0.0
    flop: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A collective; what it reads and makes lies in memory."""

    lane: Lane
    read: Tile
    made: Tile
    origin: Origin


TileStep = Compute | Exchange

REDUCTIONS = (
    "gather",
    "reduce_",
    "select_and_",
    "arg",
    "cum",
    "top_k",
)  # a lookup reads its table only where it looks something up: it need not lie there whole
SCATTERS = ("scatter", "dynamic_update_slice", "sort")
ROW_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
CONVERSIONS = frozenset("convert_element_type copy copy_p reshape squeeze".split())
FUNCTIONS = frozenset(
    "exp exp2 expm1 log log1p tanh logistic sin cos sqrt rsqrt neg sign abs floor ceil round not max min add sub mul div".split()
)  # of one operand, or of it and a number
REORDERINGS = frozenset({"transpose", "rev"})
LONGEST_ROW = 1 << 14  # elements: twice as many do not find room in the registers of a GPU's multiprocessor
INDEX_BYTES = 4


@dataclass(slots=True, eq=False)
class LayerTiles:
    """The tiles of a layer that were made so far, in every spec that somebody asked for, and the steps that made them."""

    split: AbstractSplit
    steps: list[TileStep] = field(default_factory=list[TileStep])
    _tiles: dict[tuple[int, Spec], Tile] = field(default_factory=dict[tuple[int, Spec], Tile])
    _functions: dict[tuple[object, ...], tuple[Tile, ...]] = field(default_factory=dict[tuple[object, ...], tuple[Tile, ...]])

    def run(self, program: Program, wanted: Iterable[int]) -> None:
        """Take the steps that `wanted` tensors need. What nobody has made is an argument, or costs nothing to have."""
        texts = _function_texts(program.jaxpr.jaxpr)
        for number in needed_equations(program, wanted):
            if program.records[number].plans:
                self._run(Origin(program, number), texts[number])

    def leave(self, program: Program, position: int, spec: Spec) -> Tile:
        """Result number `position` of a program that was run, in the spec in which it is wanted outside."""
        return self._in_spec(program.outputs[position], spec, Origin(program, len(program.records)))

    def put(self, tensor: int, tile: Tile) -> None:
        """Have a tensor's tile, in its own spec, from elsewhere."""
        self._tiles[tensor, self.split.own(tensor)] = tile

    def get(self, tensor: int) -> Tile:
        """A tensor's tile in its own spec."""
        own = self.split.own(tensor)
        return self._tiles.setdefault((tensor, own), self._tile(tensor, own))

    def _tile(self, tensor: int, spec: Spec) -> Tile:
        return Tile(self.split.num_bytes(tensor, spec), self.split.itemsize(tensor))

    def _in_spec(self, tensor: int, spec: Spec, origin: Origin) -> Tile:
        """The tile of a tensor in a spec, brought there if it was not yet."""
        if (tensor, spec) not in self._tiles:
            self._tiles[tensor, spec] = self._moved(self.get(tensor), tensor, self.split.own(tensor), spec, origin)
        return self._tiles[tensor, spec]

    def _run(self, origin: Origin, text: str) -> None:
        record, eqn = origin.program.records[origin.equation], origin.program.jaxpr.jaxpr.eqns[origin.equation]
        operands = zip(record.operands, self.split.read(record), strict=True)
        reads = tuple(self._in_spec(tensor, spec, origin) for tensor, spec in operands if tensor >= 0)
        specs = tuple(self.split.made(record))
        signature = (text, tuple(map(id, reads)), specs)
        if signature not in self._functions:
            made = tuple(self._tile(tensor, spec) for tensor, spec in zip(record.results, specs, strict=True))
            work = Work.FUSED if record.node == FREE else _work(eqn)
            turned = reads[-1] if work is Work.CONVOLUTION and reads and _is_turned(eqn) else None
            turns = work is Work.CONVOLUTION and _makes_kernel(eqn)
            beside = _picked_bytes(eqn, reads) if work is Work.REDUCTION else 0.0
            flop = record.work.flop / self.split.num_parts(record)
            self.steps.append(Compute(work, reads, made, self._inside(eqn, record), turned, turns, beside, flop))
            self._functions[signature] = made
        for tensor, tile, spec in zip(record.results, self._functions[signature], specs, strict=True):
            own = self.split.own(tensor)
            self._tiles[tensor, own] = self._moved(self._joined(tile, record, origin), tensor, spec, own, origin)

    def _inside(self, eqn: JaxprEqn, record: EquationRecord) -> tuple[tuple[Compute, ...], ...]:
        """The steps of a nest's programs: nothing is exchanged in them."""
        if eqn.primitive.name not in NESTS:
            return ()
        nest = nested_split(rule_of, eqn)
        tiles: dict[Var, Tile] = {}

        def tile_of(var: Var) -> Tile:
            num_bytes = aval_bytes(aval_of(var)) / self.split.num_pieces(record, nest.dims[var])
            return tiles.setdefault(var, Tile(num_bytes, itemsize_of(var)))

        def compute(inner: JaxprEqn) -> Compute:
            return Compute(_work(inner), tuple(map(tile_of, variables(inner.invars))), tuple(map(tile_of, inner.outvars)))

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
                tile = self._cut(tile, move, num_bytes)
            else:
                tile = self._exchanged(move.lane, move, tile, num_bytes, origin)
        return tile

    def _cut(self, tile: Tile, how: object, num_bytes: float) -> Tile:
        signature = (how, id(tile))
        if signature not in self._functions:
            made = Tile(num_bytes, tile.itemsize)
            self.steps.append(Compute(Work.FUSED, (tile,), (made,)))
            self._functions[signature] = (made,)
        return self._functions[signature][0]

    def _exchanged(self, lane: Lane, how: object, tile: Tile, num_bytes: float, origin: Origin) -> Tile:
        signature = (lane, how, id(tile))
        if signature not in self._functions:
            made = Tile(num_bytes, tile.itemsize)
            self.steps.append(Exchange(lane, tile, made, origin))
            self._functions[signature] = (made,)
        return self._functions[signature][0]


@lru_cache(maxsize=512)
def _function_texts(jaxpr: Jaxpr) -> tuple[str, ...]:
    """Each equation's primitive, parameters and literals, as a text: what tells apart functions of the same tiles."""
    literals = [[str(atom) for atom in eqn.invars if isinstance(atom, Literal)] for eqn in jaxpr.eqns]
    return tuple(f"{eqn.primitive.name} {eqn.params} {texts}" for eqn, texts in zip(jaxpr.eqns, literals, strict=True))


def _work(eqn: JaxprEqn) -> Work:
    name = eqn.primitive.name
    if name in CONVERSIONS or (name in REORDERINGS and not _changes_order(eqn)):
        return Work.CONVERSION
    if name == "transpose":
        return Work.TRANSPOSITION
    if name in ELEMENTWISE:
        return Work.FUNCTION if name in FUNCTIONS and len(variables(eqn.invars)) == 1 else Work.FUSED
    if name in ROW_REDUCTIONS and _fits_a_kernel(eqn):
        return Work.ROW_REDUCTION
    if name.startswith(REDUCTIONS):
        return Work.REDUCTION
    if name.startswith(SCATTERS):
        return Work.SCATTER
    if name == "conv_general_dilated":
        return Work.CONVOLUTION
    return Work.CONTRACTION if name in CONTRACTIONS or rule_of(eqn) is None else Work.FUSED


def _fits_a_kernel(reduction: JaxprEqn) -> bool:
    """Whether it reduces the last dim, and a kernel keeps a row at once."""
    shape = shape_of(reduction.invars[0])
    return len(shape) - 1 in reduction.params["axes"] and shape[-1] <= LONGEST_ROW


def _picked_bytes(eqn: JaxprEqn, reads: tuple[Tile, ...]) -> float:
    """Bytes of the places that a scatter to the picked one of each window finds first, an index a dim, and of what it finds there."""
    if eqn.primitive.name != "select_and_scatter_add":
        return 0.0
    return reads[0].elements * INDEX_BYTES * len(shape_of(eqn.invars[0])) + reads[0].num_bytes


def _changes_order(eqn: JaxprEqn) -> bool:
    """Whether dims of more than one element change places, or their elements do."""
    shape = shape_of(eqn.invars[0])
    if eqn.primitive.name == "rev":
        return any(shape[dim] > 1 for dim in eqn.params["dimensions"])
    order = [dim for dim in eqn.params["permutation"] if shape[dim] > 1]
    return order != sorted(order)


def _is_turned(convolution: JaxprEqn) -> bool:
    """Whether its kernel lies in another order than the library wants: output channels, then pixels, then input channels.

    Of a convolution that spreads its images out, the gradient of one with strides, it wants the other one's kernel.
    """
    out, entering, *pixels = convolution.params["dimension_numbers"].rhs_spec
    if _makes_kernel(convolution):
        return False
    if any(spread > 1 for spread in convolution.params["lhs_dilation"]):
        out, entering = entering, out
    shape = shape_of(convolution.invars[1])
    order = [dim for dim in (out, *pixels, entering) if shape[dim] > 1]
    return order != sorted(order)


def _makes_kernel(convolution: JaxprEqn) -> bool:
    """Whether it is the gradient of a kernel, which slides whole images over images."""
    numbers = convolution.params["dimension_numbers"]
    kernel, result = shape_of(convolution.invars[1]), shape_of(convolution.outvars[0])
    return prod(kernel[dim] for dim in numbers.rhs_spec[2:]) > prod(result[dim] for dim in numbers.out_spec[2:])
