"""The order in which XLA runs kernels on GPUs: collectives, one at a time, hidden behind what can wait.

While a collective is under way XLA runs what nobody waits for, gradients of parameters above all: so what they are made of lies in memory
until then. The order is found from the last kernel backward, as XLA's latency hiding scheduler does.
"""

import heapq
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from alpa_hpc.sharding.lifetimes import Kernel

LATENCY, RATE = 2e-5, 4e11  # seconds of any collective and bytes/s of its larger side, as XLA thinks of those of H100s in a node


def ordered(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels, which may be listed in any order, as XLA runs them."""
    maker = {value: index for index, kernel in enumerate(kernels) for value in kernel.makes}
    needs = [{maker[value] for value in kernel.reads if value in maker} for kernel in kernels]
    order = _Order(kernels, needs, _depths(kernels, needs))
    return order.from_the_last()[::-1]


def _depths(kernels: Sequence[Kernel], needs: Sequence[Set[int]]) -> list[float]:
    """For each kernel the seconds of collectives that must have passed before it."""
    depths = [0.0] * len(kernels)
    readers: list[list[int]] = [[] for _ in kernels]
    waits_for = [len(found) for found in needs]
    for index, found in enumerate(needs):
        for one in found:
            readers[one].append(index)
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
    return LATENCY + kernel.moved / RATE if kernel.moved else 0.0


_Queue = list[tuple[float, int]]


@dataclass(slots=True, eq=False)
class _Order:
    """Kernels being put in order from the last one backward; `needs` = the kernels that each waits for.

    Of those that nobody waits for, the end of a collective comes first if none is under way; then what has the most seconds of collectives
    before it, and of these the last one listed. A collective's start waits until the seconds have passed that it takes; one that has no
    collective before it, until there is nothing else.
    """

    kernels: Sequence[Kernel]
    needs: Sequence[Set[int]]
    depths: Sequence[float]
    now: float = 0.0
    under_way: bool = False
    others: _Queue = field(default_factory=_Queue)
    ends: _Queue = field(default_factory=_Queue)
    starts: _Queue = field(default_factory=_Queue)

    def from_the_last(self) -> list[Kernel]:
        """All kernels, the last one first."""
        readers = [0] * len(self.kernels)
        for found in self.needs:
            for one in found:
                readers[one] += 1
        for index, count in enumerate(readers):
            if count == 0:
                self._free(index)
        order: list[Kernel] = []
        while self.others or self.ends or self.starts:
            index = self._next()
            order.append(self.kernels[index])
            self.now += self.kernels[index].seconds
            for one in self.needs[index]:
                readers[one] -= 1
                if readers[one] == 0:
                    self._free(one)
        return order

    def _free(self, index: int) -> None:
        """Nobody waits for a kernel any more."""
        kernel = self.kernels[index]
        if kernel.moved:
            heapq.heappush(self.starts, (self.now + _seconds(kernel), index))
        else:
            heapq.heappush(self.ends if kernel.ends else self.others, (-self.depths[index], -index))

    def _next(self) -> int:
        while self.starts and (self.starts[0][0] <= self.now or not self.others):
            since, index = heapq.heappop(self.starts)
            self.now = max(self.now, since)
            heapq.heappush(self.others, (-self.depths[index] or math.inf, -index))
        found = self.ends if self.ends and not self.under_way else self.others
        index = -heapq.heappop(found)[1]
        if self.kernels[index].ends or self.kernels[index].moved:
            self.under_way = self.kernels[index].ends
        return index
