"""Kernels as a program lists them -> kernels as XLA runs them on GPUs: siblings as one, and in order (`kernel_order`).

Kernels that go through arrays of the same size and read a common one become one kernel, if neither needs the other: all that they make then
lies in memory together. What such a kernel alone reads, element by element, is not made at all.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from alpa_hpc.sharding.kernel_order import ordered
from alpa_hpc.sharding.lifetimes import Kernel


def as_scheduled(kernels: Sequence[Kernel], barriers: Set[int] = frozenset(), kept: Set[int] = frozenset()) -> list[Kernel]:
    """The kernels that XLA makes of these, in the order in which it runs them.

    `barriers` are values that are no arrays, `kept` ones are results.
    """
    return ordered(_absorbed(_joined(_beside(kernels), barriers), kept))


def _beside(kernels: Sequence[Kernel]) -> list[Kernel]:
    """A kernel with that of a reduction of what it makes is one, which writes nothing over an operand."""
    reduced = {(value, kernel.elements) for kernel in kernels if kernel.elements > 0 and not kernel.over for value in kernel.reads}
    return [
        replace(kernel, over=frozenset()) if any((value, kernel.elements) in reduced for value in kernel.over) else kernel
        for kernel in kernels
    ]


def _joined(kernels: Sequence[Kernel], barriers: Set[int]) -> list[Kernel]:
    """Siblings as one, each where the last of them stood; those that read what was made last first, as XLA does."""
    groups = Groups(kernels)
    readers: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.elements > 0:
            for value in kernel.reads - barriers:
                readers.setdefault(value, []).append(index)
    for value in sorted(readers, reverse=True):
        siblings = readers[value]
        for position, one in enumerate(siblings):
            for other in siblings[position + 1 :]:
                if kernels[one].elements == kernels[other].elements:
                    groups.join(one, other)
    return groups.kernels()


def _absorbed(kernels: Sequence[Kernel], kept: Set[int]) -> list[Kernel]:
    """Elementwise kernels as part of the one that alone reads what they make, if it goes through as many elements."""
    result = dict(enumerate(kernels))
    readers: dict[int, set[int]] = {}
    for index, kernel in result.items():
        for value in kernel.reads:
            readers.setdefault(value, set()).add(index)
    for index in reversed(range(len(kernels))):
        one = result[index]
        wanting = {reader for value in one.makes for reader in readers.get(value, ())}
        if len(wanting) != 1 or not one.over or not kept.isdisjoint(one.makes):
            continue
        [reader] = wanting
        other = result[reader]
        if one.elements == other.elements > 0:
            result[reader] = replace(other, reads=other.reads.difference(one.makes) | one.reads)
            for value in one.reads:
                readers[value] = readers[value] - {index} | {reader}
            del result[index]
    return list(result.values())


class Groups:
    """Kernels of which some become one, each group where the last of its members stood."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._kernels = kernels
        self._groups = list(range(len(kernels)))  # the kernel that a kernel has become part of
        self._needs = _needs(kernels)

    def join(self, one: int, other: int) -> bool:
        """Make one of the groups of two, if they are two and neither needs the other; whether they are one now."""
        first, second = sorted((self._groups[one], self._groups[other]))
        if first == second:
            return True
        if self._needs[first] >> second & 1 or self._needs[second] >> first & 1:
            return False
        both = 1 << first | 1 << second
        together = self._needs[first] | self._needs[second]
        for index, mine in enumerate(self._needs):
            if mine & both:
                self._needs[index] = mine | both | together
        self._needs[first] = self._needs[second] = together
        self._groups = [second if group == first else group for group in self._groups]
        return True

    def kernels(self) -> list[Kernel]:
        """The kernels that there are now."""
        members: dict[int, list[Kernel]] = {}
        for index, group in enumerate(self._groups):
            members.setdefault(group, []).append(self._kernels[index])
        return [_union(members[group]) for group in sorted(members)]


def _needs(kernels: Sequence[Kernel]) -> list[int]:
    """For each kernel, those that must have run before it, as the bits of a number."""
    maker = {value: index for index, kernel in enumerate(kernels) for value in kernel.makes}
    needs: list[int] = []
    for kernel in kernels:
        mine = 0
        for before in {maker[value] for value in kernel.reads if value in maker}:
            mine |= needs[before] | 1 << before
        needs.append(mine)
    return needs


def _union(parts: Sequence[Kernel]) -> Kernel:
    if len(parts) == 1:
        return parts[0]
    return Kernel(
        reads=frozenset(value for part in parts for value in part.reads),
        makes=tuple(value for part in parts for value in part.makes),
        over=frozenset(value for part in parts for value in part.over),
        elements=parts[0].elements,
        seconds=max(part.seconds for part in parts),
        moved=sum(part.moved for part in parts),
        ends=parts[0].ends,
    )
