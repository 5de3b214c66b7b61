"""Kernels -> those that XLA for GPUs makes one behind all fusion, so that all of what they make is there at once.

Those are kernels that go through as many elements, if one makes what the other reads or both read a value, and nothing has to run between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from alpa_hpc.sharding.priority_fusion import FusedKernel, Value


def joined_kernels(kernels: Sequence[FusedKernel]) -> list[list[FusedKernel]]:
    """Which kernels are one, in an order in which they can run; `kernels` are in such an order, too."""
    joined = _Joined(kernels, [{index} for index in range(len(kernels))])
    for one, other in _candidates(kernels):
        joined.join(one, other)
    return joined.in_order()


def _candidates(kernels: Sequence[FusedKernel]) -> Iterator[tuple[int, int]]:
    """From the last value to the first: who reads it, then its maker with one of these; values from outside are the first."""
    maker = {one.made: index for index, one in enumerate(kernels)}
    readers: dict[Value, list[int]] = {}
    for index, one in enumerate(kernels):
        for value in one.operands:
            readers.setdefault(value, []).append(index)
    for value in sorted(readers, key=lambda value: -maker.get(value, -1)):
        found = readers[value]
        yield from ((one, other) for position, one in enumerate(found) for other in found[position + 1 :])
        if value in maker and kernels[maker[value]].reduction is None:
            yield from ((maker[value], reader) for reader in found)


@dataclass(slots=True, eq=False)
class _Joined:
    """Kernels, and for each of them all that it is one with."""

    kernels: Sequence[FusedKernel]
    groups: list[set[int]]

    def join(self, one: int, other: int) -> None:
        """Make two kernels one, if they can be."""
        both = self.groups[one] | self.groups[other]
        if self.groups[one] is self.groups[other] or not self._are_alike(both) or self._has_between(both):
            return
        for index in both:
            self.groups[index] = both

    def in_order(self) -> list[list[FusedKernel]]:
        """The kernels that there are, each behind what it reads."""
        order: dict[int, list[FusedKernel]] = {}
        for index in range(len(self.kernels)):
            self._put(index, order)
        return list(order.values())

    def _put(self, index: int, order: dict[int, list[FusedKernel]]) -> None:
        group = self.groups[index]
        if min(group) not in order:
            for before in self._needs(group):
                self._put(before, order)
            order[min(group)] = [self.kernels[one] for one in sorted(group)]

    def _are_alike(self, group: set[int]) -> bool:
        """Whether all go through as many elements, and those that reduce reduce alike, for others than these."""
        members = [self.kernels[index] for index in group]
        reducing = [one for one in members if one.reduction]
        reduced = {one.made for one in reducing}
        return (
            all(one.fused and reduced.isdisjoint(one.operands) for one in members)
            and len({one.reduction for one in reducing}) <= 1
            and len(set(map(_elements, members))) == 1
        )

    def _has_between(self, group: set[int]) -> bool:
        """Whether a group needs what needs some of it."""
        waiting = list(self._needs(group))
        seen: set[int] = set()
        while waiting:
            needed = self._needs(self.groups[waiting.pop()])
            if needed & group:
                return True
            waiting += needed - seen
            seen |= needed
        return False

    def _needs(self, group: set[int]) -> set[int]:
        """The kernels outside that make what a group reads."""
        read = {value for index in group for value in self.kernels[index].operands}
        return {index for index, one in enumerate(self.kernels) if one.made in read and index not in group}


def _elements(kernel: FusedKernel) -> int:
    one = kernel.reduction
    return prod((one.major, one.reduced, one.minor)) if one else kernel.made.elements
