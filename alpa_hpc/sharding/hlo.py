"""Text of a compiled program (HLO) -> its collectives: what is checked on the programs that train, not on what was planned.

Deferred gradient sync and weight-update sharding (paper, section 4.2) promise that no collective the size of a gradient runs once a
microbatch; XLA may combine or split collectives, but it cannot hide them.
"""

import enum
import re
from dataclasses import dataclass
from math import prod

from alpa_hpc.errors import ProgramError


class CollectiveKind(enum.Enum):
    """The collectives of HLO by their opcodes."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective; `num_bytes` = bytes a device of its larger side (what enters a reduce-scatter, what leaves an all-gather)."""

    kind: CollectiveKind
    num_bytes: int


_KINDS = "|".join(kind.value for kind in CollectiveKind)
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<result>\(.*?\)|\S+) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<operands>.*)")
_OPERAND = re.compile(r"%[\w.\-]+|\b[\w\-]+\.\d+\b")
_DEFINITION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<result>\(.*?\)|\S+) ")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_BITS = re.compile(r"^[a-z]+(\d+)")


def collectives(hlo_text: str) -> tuple[Collective, ...]:
    """Every collective of a program, in the order of its text; asynchronous ones count once, at their start."""
    lines = hlo_text.splitlines()
    sizes = {match["name"]: _num_bytes(match["result"]) for match in map(_DEFINITION.match, lines) if match}
    found: list[Collective] = []
    for match in map(_INSTRUCTION.match, lines):
        if match:
            operands = _operand_bytes(match["operands"], sizes)
            # The result of a start holds the operands, too.
            result = _num_bytes(match["result"]) - (operands if match["start"] and match["kind"] != "all-reduce" else 0)
            found.append(Collective(CollectiveKind(match["kind"]), max(operands, result)))
    return tuple(found)


def check_deferred_sync(forward_text: str, backward_text: str, smallest_gradient_bytes: int) -> None:
    """Raise ProgramError if a collective of at least `smallest_gradient_bytes` a device in forward or backward sums over devices."""
    for name, text in (("forward", forward_text), ("backward", backward_text)):
        large = [one for one in collectives(text) if one.num_bytes >= smallest_gradient_bytes and one.kind in _SYNCHRONISING]
        if large:
            worst = max(large, key=lambda one: one.num_bytes)
            raise ProgramError(
                f"{name} has {len(large)} collectives the size of a gradient (the largest: {worst.kind.value} of {worst.num_bytes} bytes a "
                f"device; gradients begin at {smallest_gradient_bytes}). Gradients are synchronised once an iteration: look at the plan's "
                "strategies of this stage."
            )


_SYNCHRONISING = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER})


def _operand_bytes(text: str, sizes: dict[str, int]) -> int:
    """Bytes of the operands: their types stand with them, or else at their definitions."""
    inside = _up_to_closing(text)
    typed = _num_bytes(inside)
    return typed or sum(sizes.get(name.lstrip("%"), 0) for name in _OPERAND.findall(inside))


def _up_to_closing(text: str) -> str:
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:index]
    return text


def _num_bytes(type_text: str) -> int:
    """Bytes of an array type, or of all arrays of a tuple type."""
    return sum(_array_bytes(match["dtype"], match["dims"]) for match in _ARRAY.finditer(type_text))


def _array_bytes(dtype: str, dims: str) -> int:
    bits = _BITS.match(dtype)
    itemsize = max(1, int(bits[1]) // 8) if bits else 1  # pred is one byte
    return prod(int(size) for size in dims.split(",") if size) * itemsize
