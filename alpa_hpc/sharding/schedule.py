"""Kernels as a program lists them -> kernels as XLA runs them on GPUs: siblings as one, collectives hidden behind what can wait.

Kernels that go through arrays of the same size and read a common one become one kernel, if neither needs the other: all that they make then
lies in memory together. And while a collective is under way XLA runs what nobody waits for, gradients of parameters above all, the last
collective first: so what they are made of lies in memory until then.
"""

import heapq
from collections.abc import Sequence, Set
from dataclasses import replace

from alpa_hpc.sharding.lifetimes import Kernel


def as_scheduled(kernels: Sequence[Kernel], barriers: Set[int] = frozenset()) -> list[Kernel]:
    """The kernels that XLA makes of these, in the order in which it runs them; `barriers` are values that are no arrays."""
    return _hiding(_joined(_beside(kernels), barriers))


def _beside(kernels: Sequence[Kernel]) -> list[Kernel]:
    """A kernel with that of a reduction of what it makes is one, which writes nothing over an operand."""
    reduced = {(value, kernel.elements) for kernel in kernels if kernel.elements > 0 and not kernel.over for value in kernel.reads}
    return [
        replace(kernel, over=frozenset()) if any((value, kernel.elements) in reduced for value in kernel.over) else kernel
        for kernel in kernels
    ]


def _joined(kernels: Sequence[Kernel], barriers: Set[int]) -> list[Kernel]:
    """Siblings as one, each where the last of them stood; those that read what was made last first, as XLA does."""
    groups = list(range(len(kernels)))  # the kernel that a kernel has become part of
    needs = _needs(kernels)
    readers: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.elements > 0:
            for value in kernel.reads - barriers:
                readers.setdefault(value, []).append(index)
    for value in sorted(readers, reverse=True):
        siblings = readers[value]
        for position, one in enumerate(siblings):
            for other in siblings[position + 1 :]:
                _join(kernels, groups, needs, one, other)
    return _as_one(kernels, groups)


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


def _join(kernels: Sequence[Kernel], groups: list[int], needs: list[int], one: int, other: int) -> None:
    """Make one kernel of the groups of two, if they go through as many elements and neither needs the other."""
    first, second = sorted((groups[one], groups[other]))
    related = needs[first] >> second & 1 or needs[second] >> first & 1
    if first == second or related or kernels[first].elements != kernels[second].elements:
        return
    both = 1 << first | 1 << second
    together = needs[first] | needs[second]
    for index, mine in enumerate(needs):
        if mine & both:
            needs[index] = mine | both | together
    needs[first] = needs[second] = together
    for index, group in enumerate(groups):
        if group == first:
            groups[index] = second


def _as_one(kernels: Sequence[Kernel], groups: Sequence[int]) -> list[Kernel]:
    members: dict[int, list[Kernel]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(kernels[index])
    return [_union(members[group]) for group in sorted(members)]


def _union(parts: Sequence[Kernel]) -> Kernel:
    if len(parts) == 1:
        return parts[0]
    return Kernel(
        reads=frozenset(value for part in parts for value in part.reads),
        makes=tuple(value for part in parts for value in part.makes),
        over=frozenset(value for part in parts for value in part.over),
        elements=parts[0].elements,
        seconds=max(part.seconds for part in parts),
    )


def _hiding(kernels: Sequence[Kernel]) -> list[Kernel]:
    """From the last kernel backward, always the last one listed of those that nobody waits for; one with hidden seconds waits itself."""
    maker = {value: index for index, kernel in enumerate(kernels) for value in kernel.makes}
    before = [{maker[value] for value in kernel.reads if value in maker} for kernel in kernels]
    waited_for = [0] * len(kernels)
    for found in before:
        for index in found:
            waited_for[index] += 1
    ready = [-index for index, count in enumerate(waited_for) if count == 0]
    heapq.heapify(ready)
    hidden: list[tuple[float, int]] = []
    order: list[Kernel] = []
    now = 0.0
    while ready or hidden:
        while hidden and (hidden[0][0] <= now or not ready):
            now = max(now, hidden[0][0])
            heapq.heappush(ready, heapq.heappop(hidden)[1])
        index = -heapq.heappop(ready)
        order.append(kernels[index])
        now += kernels[index].seconds
        for one in before[index]:
            waited_for[one] -= 1
            if waited_for[one] == 0 and kernels[one].hidden > 0:
                heapq.heappush(hidden, (now + kernels[one].hidden, -one))
            elif waited_for[one] == 0:
                heapq.heappush(ready, -one)
    return order[::-1]
