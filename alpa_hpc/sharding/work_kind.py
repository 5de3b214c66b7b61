"""An equation -> what it does with memory, as XLA compiles it for GPUs."""

import enum
from dataclasses import dataclass
from math import prod

from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import aval_of, variables
from alpa_hpc.sharding.equation_work import CONTRACTIONS
from alpa_hpc.sharding.strategies.elementwise import ELEMENTWISE
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


@dataclass(frozen=True, slots=True)
class Side:
    """How a product reads an operand: dims that it sums over, those of the batch, and how many there are."""

    contracted: tuple[int, ...]
    batch: tuple[int, ...]
    rank: int


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
UNCHANGING = frozenset("convert_element_type copy copy_p reshape squeeze slice".split())  # if shape and dtype stay
REORDERINGS = frozenset({"transpose", "rev"})
BLOCK = 64  # rows of an operand that XLA's kernels of products read at once
LONGEST_ROW = 1 << 14  # elements: twice as many do not find room in the registers of a GPU's multiprocessor


def work_of(eqn: JaxprEqn) -> Work:
    """What an equation does."""
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


def is_turned(convolution: JaxprEqn) -> bool:
    """Whether its kernel lies in another order than the library wants: output channels, then pixels, then input channels.

    Of a convolution that spreads its images out, the gradient of one with strides, it wants the other one's kernel.
    """
    out, entering, *pixels = convolution.params["dimension_numbers"].rhs_spec
    if makes_kernel(convolution):
        return False
    if any(spread > 1 for spread in convolution.params["lhs_dilation"]):
        out, entering = entering, out
    shape = shape_of(convolution.invars[1])
    order = [dim for dim in (out, *pixels, entering) if shape[dim] > 1]
    return order != sorted(order)


def makes_kernel(convolution: JaxprEqn) -> bool:
    """Whether it is the gradient of a kernel, which slides whole images over images."""
    numbers = convolution.params["dimension_numbers"]
    kernel, result = shape_of(convolution.invars[1]), shape_of(convolution.outvars[0])
    return prod(kernel[dim] for dim in numbers.rhs_spec[2:]) > prod(result[dim] for dim in numbers.out_spec[2:])


def sides(eqn: JaxprEqn) -> tuple[Side, ...]:
    """How a product reads each of its operands; nothing of what is no product."""
    if eqn.primitive.name != "dot_general":
        return ()
    contracted, batch = eqn.params["dimension_numbers"]
    ranks = (len(shape_of(atom)) for atom in eqn.invars)
    return tuple(Side(tuple(summed), tuple(rows), rank) for summed, rows, rank in zip(contracted, batch, ranks, strict=True))


def laid_along(eqn: JaxprEqn) -> int | None:
    """The dim in which it lays its operands one behind the other, if products can read them so: a block of theirs is of one operand."""
    if eqn.primitive.name != "concatenate":
        return None
    dim = eqn.params["dimension"]
    return dim if all(shape_of(atom)[dim] % BLOCK == 0 for atom in eqn.invars) else None


def lying_apart(eqn: JaxprEqn) -> tuple[int, ...]:
    """The operands of a batch of products whose batch dims have others between them."""
    if eqn.primitive.name != "dot_general":
        return ()
    _, batches = eqn.params["dimension_numbers"]
    return tuple(number for number, (atom, dims) in enumerate(zip(eqn.invars, batches, strict=True)) if _lie_apart(shape_of(atom), dims))


def _lie_apart(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether some of these dims have others of more than one element between them."""
    places = [place for place, dim in enumerate(dim for dim, size in enumerate(shape) if size > 1) if dim in dims]
    return bool(places) and places[-1] - places[0] >= len(places)


def swaps(eqn: JaxprEqn) -> int | None:
    """How many dims a transposition leaves in front of those of which it brings the last before the first: None where it does other things.

    Of a product with so many dims of a batch, it brings those of one operand before the other's.
    """
    if eqn.primitive.name != "transpose":
        return None
    order = eqn.params["permutation"]
    front = next((place for place, dim in enumerate(order) if dim != place), len(order))
    behind = [dim - front for dim in order[front:]]
    return front if behind == [(place + behind[0]) % len(behind) for place in range(len(behind))] else None


def changes_nothing(eqn: JaxprEqn) -> bool:
    """Whether the result is the operand as it stands, so that XLA removes the equation; dims of one element have one order."""
    operands = variables(eqn.invars)
    if len(operands) != 1 or len(eqn.outvars) != 1:
        return False
    before, after = aval_of(operands[0]), aval_of(eqn.outvars[0])
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    match eqn.primitive.name:
        case "rev" | "transpose":
            return not _changes_order(eqn)
        case "broadcast_in_dim":
            return eqn.params["broadcast_dimensions"] == tuple(range(len(before.shape)))
        case name:
            return name in UNCHANGING


def _fits_a_kernel(reduction: JaxprEqn) -> bool:
    """Whether it reduces the last dim, and a kernel keeps a row at once."""
    shape = shape_of(reduction.invars[0])
    return len(shape) - 1 in reduction.params["axes"] and shape[-1] <= LONGEST_ROW


def _changes_order(eqn: JaxprEqn) -> bool:
    """Whether dims of more than one element change places, or their elements do."""
    shape = shape_of(eqn.invars[0])
    if eqn.primitive.name == "rev":
        return any(shape[dim] > 1 for dim in eqn.params["dimensions"])
    order = [dim for dim in eqn.params["permutation"] if shape[dim] > 1]
    return order != sorted(order)
