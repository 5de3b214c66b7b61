"""Kernels as a program lists them -> kernels as XLA runs them on GPUs: siblings as one, and in order (`kernel_order`).

Kernels that go through arrays of the same size and read a common one become one kernel, if neither needs the other: all that they make then
lies in memory together. What such a kernel alone reads, element by element, is not made at all. Several all-reduces that become one go
through one array, into which their operands are copied and out of which each reader's part is.
"""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from alpa_hpc.sharding.kernel_order import ordered
from alpa_hpc.sharding.kernel_seconds import Collective, streaming_seconds
from alpa_hpc.sharding.lifetimes import Kernel, Lifetimes
from alpa_hpc.sharding.resharding import CollectiveKind, Lane

COMBINED = frozenset({CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE})
COMBINED_BYTES = 30 << 20  # up to which XLA makes one collective of several, by default (`xla_gpu_all_gather_combine_threshold_bytes`)


def as_scheduled(lifetimes: Lifetimes, *, hiding: bool) -> list[Kernel]:
    """The kernels that XLA makes of those listed, in the order in which it runs them; `hiding` as DeviceSpec has it."""
    groups = Groups(_beside(lifetimes.kernels))
    _join_siblings(groups, lifetimes.barriers)
    _join_collectives(groups, _before(groups.members, lifetimes.results))
    return ordered(_contiguous(_absorbed(groups.kernels(), lifetimes.kept), lifetimes), hiding=hiding)


def with_collectives_joined(lifetimes: Lifetimes) -> list[Kernel]:
    """Collectives of a kind among the same devices as one, in their order."""
    groups = Groups(lifetimes.kernels)
    _join_collectives(groups, range(len(lifetimes.kernels)))
    return _contiguous(groups.kernels(), lifetimes)


def _contiguous(kernels: Sequence[Kernel], lifetimes: Lifetimes) -> list[Kernel]:
    """All-reduces of several arrays as those of one, in its place: what they read is copied into it, and what arrives out of it.

    So XLA does behind all fusion, so that the copies are kernels of their own.
    """
    starts = {max(kernel.makes): kernel for kernel in kernels if _sums_several(kernel)}
    arrays = {last: lifetimes.values((sum(lifetimes.sizes[part] for part in start.makes), 0.0, 0.0)) for last, start in starts.items()}
    result: list[Kernel] = []
    for kernel in kernels:
        last = max(kernel.makes, default=-1) if kernel.starts else max(kernel.reads, default=-1) if kernel.ends else -1
        if last not in starts:
            result.append(kernel)
            continue
        array, under_way, arrived = arrays[last]
        if kernel.starts:
            result.append(_copy(kernel.reads, (array,), lifetimes))
            result.append(replace(kernel, reads=frozenset((array,)), makes=(under_way,)))
        else:
            result.append(replace(kernel, reads=frozenset((array, under_way)), makes=(arrived,)))
            result += [_copy(frozenset((array, arrived)), (part, part + 1), lifetimes) for part in starts[last].makes]
    return result


def _sums_several(kernel: Kernel) -> bool:
    return kernel.starts is not None and kernel.starts.lane.kind is CollectiveKind.ALL_REDUCE and len(kernel.makes) > 1


def _copy(reads: frozenset[int], makes: tuple[int, ...], lifetimes: Lifetimes) -> Kernel:
    return Kernel(reads, makes, frozenset(), seconds=streaming_seconds(2 * sum(lifetimes.sizes[value] for value in makes)))


def _beside(kernels: Sequence[Kernel]) -> list[Kernel]:
    """A kernel with that of a reduction of what it makes is one, which writes nothing over an operand."""
    reduced = {(value, kernel.elements) for kernel in kernels if kernel.elements > 0 and not kernel.over for value in kernel.reads}
    return [
        replace(kernel, over=frozenset()) if any((value, kernel.elements) in reduced for value in kernel.over) else kernel
        for kernel in kernels
    ]


def _join_siblings(groups: "Groups", barriers: Set[int]) -> None:
    """Make siblings one, each where the last of them stood; those that read what was made last first, as XLA does."""
    kernels = groups.members
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


def _join_collectives(groups: "Groups", order: Iterable[int]) -> None:
    """Make collectives of a kind among the same devices one, as long as what arrives is not too much; met in this order of kernels."""
    kernels = groups.members
    end = {max(kernel.reads): index for index, kernel in enumerate(kernels) if kernel.ends}  # by what arrives, numbered right before
    latest: dict[tuple[Lane, int], tuple[int, float]] = {}  # the start that others of its kind may join, and what arrives by then
    for start in order:
        one = kernels[start].starts
        if one is None or one.lane.kind not in COMBINED or one.arriving > COMBINED_BYTES:
            continue
        kind = (one.lane, 0 if one.lane.kind is CollectiveKind.ALL_GATHER else one.itemsize)
        first, so_far = latest.get(kind, (start, math.inf))
        if so_far + one.arriving <= COMBINED_BYTES and groups.join(first, start):
            groups.join(end[kernels[first].makes[0]], end[kernels[start].makes[0]])
            latest[kind] = (first, so_far + one.arriving)
        else:
            latest[kind] = (start, one.arriving)


def _before(kernels: Sequence[Kernel], results: Sequence[int]) -> list[int]:
    """All kernels in the order in which XLA meets them: what makes the first result, each behind what it reads, then the next one's."""
    maker = {value: index for index, kernel in enumerate(kernels) for value in kernel.makes}
    order: dict[int, None] = {}
    waiting = [(index, False) for index in (*reversed(range(len(kernels))), *(maker[value] for value in reversed(results)))]
    while waiting:
        index, done = waiting.pop()
        if done:
            order[index] = None
        elif index not in order:
            waiting.append((index, True))
            waiting += [(maker[value], False) for value in sorted(kernels[index].reads, reverse=True) if value in maker]
    return list(order)


class Groups:
    """Kernels of which some become one, each group where the last of its members stood."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.members = kernels
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
            members.setdefault(group, []).append(self.members[index])
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


def _together(collectives: Iterable[Collective | None]) -> Collective | None:
    whole: Collective | None = None
    for one in collectives:
        whole = whole if one is None else one.with_other(whole)
    return whole


def _union(parts: Sequence[Kernel]) -> Kernel:
    if len(parts) == 1:
        return parts[0]
    return Kernel(
        reads=frozenset(value for part in parts for value in part.reads),
        makes=tuple(value for part in parts for value in part.makes),
        over=frozenset(value for part in parts for value in part.over),
        elements=parts[0].elements,
        seconds=max(part.seconds for part in parts),
        starts=_together(part.starts for part in parts),
        ends=parts[0].ends,
    )
