"""The order in which XLA runs kernels on GPUs: as a program lists them, or with collectives, one at a time, hidden behind what can wait.

The latter where its latency hiding scheduler is on, as it is from Hopper on. While a collective is under way that runs what nobody waits
for, gradients of parameters above all: so what they are made of lies in memory until then. The order is found from the last kernel
backward, as the scheduler does.
"""

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from alpa_hpc.sharding.kernel_seconds import collective_seconds
from alpa_hpc.sharding.lifetimes import Kernel

STEP = 1e-6  # seconds from any kernel to what it reads, as XLA thinks


def ordered(kernels: Sequence[Kernel], *, hiding: bool) -> list[Kernel]:
    """The kernels, which may be listed in any order, as XLA runs them; `hiding` as DeviceSpec has it."""
    maker = {value: index for index, kernel in enumerate(kernels) for value in kernel.makes}
    needs = [{maker[value] for value in kernel.reads if value in maker} for kernel in kernels]
    readers: list[set[int]] = [set() for _ in kernels]
    for index, found in enumerate(needs):
        for one in found:
            readers[one].add(index)
    waiting = [len(found) for found in readers]
    if not any(kernel.starts for kernel in kernels):
        return [kernels[-index] for index in by_place([-index for index in range(len(kernels))], needs, waiting)][::-1]
    if not hiding:
        return [kernels[index] for index in by_place(range(len(kernels)), readers, [len(found) for found in needs])]
    return _Order(kernels, needs, _depths(kernels, needs, readers), waiting).from_the_last()[::-1]


def by_place(places: Sequence[int], follow: Sequence[Set[int]], waiting: list[int]) -> list[int]:
    """Places of kernels, the least first, each once none is left that it waits for; `follow` = those that wait for a kernel."""
    ready = [place for place, count in zip(places, waiting, strict=True) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for one in follow[abs(place)]:
            waiting[one] -= 1
            if waiting[one] == 0:
                heapq.heappush(ready, places[one])
    return order


def _depths(kernels: Sequence[Kernel], needs: Sequence[Set[int]], readers: Sequence[Set[int]]) -> list[float]:
    """For each kernel the seconds of collectives that must have passed before it."""
    depths = [0.0] * len(kernels)
    waits_for = [len(found) for found in needs]
    ready = [index for index, count in enumerate(waits_for) if count == 0]
    while ready:
        one = ready.pop()
        for index in readers[one]:
            depths[index] = max(depths[index], depths[one] + _seconds(kernels[one]))
            waits_for[index] -= 1
            if waits_for[index] == 0:
                ready.append(index)
    return depths


def _seconds(kernel: Kernel) -> float:
    """From the start of a collective, if it is one, to its end."""
    return collective_seconds(kernel.starts) if kernel.starts else 0.0


@dataclass(slots=True, eq=False)
class _Order:
    """Kernels being put in order from the last one backward; `needs` = the kernels that each waits for, `readers` = how many wait for it.

    Of those that nobody waits for, what has waited for STEP comes first: so something else comes between a kernel and what it reads, if
    there is anything. A collective's start waits for the seconds that it takes, and there are no other collectives meanwhile. Of what has
    waited, the end of a collective comes first, or a start that the end of another waits for; then what has the most seconds of collectives
    before it; of these what takes nearest to as long as a collective under way still has to, then what most others wait for alone, then the
    last one listed. A start that has no collective before it comes when there is nothing else.
    """

    kernels: Sequence[Kernel]
    needs: Sequence[Set[int]]
    depths: Sequence[float]
    readers: list[int]
    now: float = 0.0
    waiting: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # a heap: kernels, and when they have waited
    under_way: float | None = None  # until when, if a collective is
    ends: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # a heap: the deepest one first
    starts: list[int] = field(default_factory=list[int])
    others: dict[float, list[int]] = field(default_factory=dict[float, list[int]])  # by depth
    deepest: list[float] = field(default_factory=list[float])  # a heap of the keys of `others`, negative

    def from_the_last(self) -> list[Kernel]:
        """All kernels, the last one first."""
        for index in [index for index, count in enumerate(self.readers) if count == 0]:
            self._free(index)
        order: list[Kernel] = []
        while len(order) < len(self.kernels):
            index = self._next()
            order.append(self.kernels[index])
            self.now += max(self.kernels[index].seconds, STEP)
            for one in self.needs[index]:
                self.readers[one] -= 1
                if self.readers[one] == 0:
                    self._free(one)
        return order

    def _free(self, index: int) -> None:
        """Nobody waits for a kernel any more."""
        collective = self.kernels[index].starts
        until = self.now + (collective_seconds(collective) if collective else STEP)
        if collective:
            self.under_way = until
        heapq.heappush(self.waiting, (until, index))

    def _next(self) -> int:
        """The next kernel; if none has waited long enough, time passes."""
        self._ready()
        while (found := self._first()) is None:
            self.now = self.waiting[0][0]
            self._ready()
        return found

    def _ready(self) -> None:
        while self.waiting and self.waiting[0][0] <= self.now:
            index = heapq.heappop(self.waiting)[1]
            kernel, depth = self.kernels[index], self.depths[index]
            if kernel.starts:
                self.starts.append(index)
            elif kernel.ends:
                heapq.heappush(self.ends, (-depth, -index))
            else:
                if depth not in self.others:
                    self.others[depth] = []
                    heapq.heappush(self.deepest, -depth)
                self.others[depth].append(index)

    def _first(self) -> int | None:
        """Of what has waited, what comes first."""
        if self.ends and self.under_way is None:
            self.under_way = self.now
            return -heapq.heappop(self.ends)[1]
        if self.starts and self._may_start(self.depths[self.starts[0]]):
            self.under_way = None
            return self.starts.pop(0)
        return self._other() if self.others else None

    def _may_start(self, depth: float) -> bool:
        if self.ends:
            return True
        if not self.others:
            return depth > 0 or not self.waiting
        return depth > 0 and depth >= -self.deepest[0]

    def _other(self) -> int:
        alike = self.others[-self.deepest[0]]
        index = min(alike, key=self._rank)
        alike.remove(index)
        if not alike:
            del self.others[-heapq.heappop(self.deepest)]
        return index

    def _rank(self, index: int) -> tuple[float, int, int]:
        """Among kernels with as much before them, the least comes first."""
        misses = 0.0 if self.under_way is None else abs(self.under_way - self.now - self.kernels[index].seconds)
        return misses, -sum(self.readers[one] == 1 for one in self.needs[index]), -index
