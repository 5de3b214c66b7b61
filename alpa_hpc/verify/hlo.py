"""Text of a compiled program (optimised HLO) -> its collectives: what is checked on the programs that run, not on what was planned.

XLA may combine or split collectives, run them in the background or move them, but it cannot hide them: bytes are counted by kind and by
which devices talk to each other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from alpa_hpc.sharding.resharding import CollectiveKind

Groups = tuple[tuple[int, ...], ...]  # devices that talk to each other, by their numbers in the mesh (row-major)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective; `parts` = bytes a device of each array of its larger side (what enters a reduce-scatter, what leaves an all-gather).

    `groups` of a collective-permute are its pairs (source, target). `origin` = the traced operation that it comes from, as XLA remembers
    it; of those that it combined, the first.
    """

    kind: CollectiveKind
    parts: tuple[int, ...]
    groups: Groups
    origin: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes a device of the larger side."""
        return sum(self.parts)


_KINDS = "|".join(kind.value for kind in CollectiveKind)
_DEVICES = re.compile(r"^HloModule .*\bnum_partitions=(\d+)", re.MULTILINE)
_DEFINITION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = ")
_OPCODE = re.compile(rf" (?P<kind>{_KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_BITS = re.compile(r"^[a-z]+(\d+)")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_TILED = re.compile(r"replica_groups=\[(?P<tiles>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=@?mesh\[(?P<axes>[^\]]*)\]\s*\{(?P<used>[^}]*)\}")


def collectives(hlo_text: str) -> tuple[Collective, ...]:
    """Every collective of a program, in the order of its text; asynchronous ones count once, at their start."""
    header = _DEVICES.search(hlo_text)
    return tuple(_collectives(hlo_text, int(header[1]) if header else 1))


def _collectives(hlo_text: str, num_devices: int) -> Iterator[Collective]:
    for line in hlo_text.splitlines():
        definition = _DEFINITION.match(line)
        result = _type_at(line, definition.end()) if definition else ""
        opcode = _OPCODE.match(line, definition.end() + len(result)) if definition else None
        if opcode:
            kind, groups = CollectiveKind(opcode["kind"]), _groups(line, num_devices)
            origin = _ORIGIN.search(line)
            yield Collective(kind, _larger_side(kind, result, groups, opcode["start"]), groups, origin[1] if origin else "")


def _larger_side(kind: CollectiveKind, result: str, groups: Groups, start: str | None) -> tuple[int, ...]:
    """Bytes of each array that enters or leaves, whichever is more; the result of a start holds both."""
    if start and kind is not CollectiveKind.ALL_REDUCE:
        return max(map(_array_sizes, _elements(result)[:2]), key=sum)
    factor = len(groups[0]) if kind is CollectiveKind.REDUCE_SCATTER else 1
    return tuple(size * factor for size in _array_sizes(result))


def _type_at(line: str, start: int) -> str:
    """The type that begins at `start`: up to the next space, or the whole of a tuple."""
    depth = 0
    for index in range(start, len(line)):
        depth += (line[index] == "(") - (line[index] == ")")
        if depth == 0 and line[index] == " ":
            return line[start:index]
    return line[start:]


def _elements(tuple_text: str) -> list[str]:
    """The types of a tuple type."""
    elements, depth = [""], 0
    for character in tuple_text[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _array_sizes(type_text: str) -> tuple[int, ...]:
    """Bytes of an array type, or of each array of a tuple type."""
    return tuple(_array_bytes(match["dtype"], match["dims"]) for match in _ARRAY.finditer(type_text))


def _array_bytes(dtype: str, dims: str) -> int:
    bits = _BITS.match(dtype)
    itemsize = max(1, int(bits[1]) // 8) if bits else 1  # pred is one byte
    return prod(_numbers(dims)) * itemsize


def _groups(line: str, num_devices: int) -> Groups:
    """Who talks to whom. HLO writes it in three ways, and not at all where all devices are one group."""
    if listed := _LISTED.search(line):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if tiled := _TILED.search(line):
        return _tiled_groups(_numbers(tiled["tiles"]), _numbers(tiled["dims"]), _numbers(tiled["order"] or ""))
    if named := _NAMED.search(line):
        return _named_groups(named["axes"], named["used"])
    return (tuple(range(num_devices)),)


def _tiled_groups(tiles: tuple[int, ...], dims: tuple[int, ...], order: tuple[int, ...]) -> Groups:
    """`[4,2]<=[2,4]T(1,0)`: the devices laid out as 2 x 4, transposed, and read off as 4 groups of 2."""
    devices = np.arange(prod(dims)).reshape(dims).transpose(order or range(len(dims)))
    return _rows(devices.reshape(tiles[0], -1))


def _named_groups(axes: str, used: str) -> Groups:
    """`mesh['x'=2,'y'=4] {'y'}`: one group for each place on the axes that are not used."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    joined = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", used)]
    devices = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    left = [axis for axis in range(len(sizes)) if axis not in joined]
    return _rows(devices.transpose(left + joined).reshape(-1, prod(devices.shape[axis] for axis in joined)))


def _rows(devices: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> Groups:
    return tuple(tuple(int(device) for device in row) for row in devices)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
