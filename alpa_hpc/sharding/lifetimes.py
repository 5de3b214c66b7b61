"""Kernels in the order they run, the values they make and read -> the most bytes that lie in memory at once.

A value lives from the kernel that makes it to the last one that reads it; a *kept* value lives to the end. An elementwise kernel writes its
result over an operand of the same size that nobody reads later.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alpa_hpc.sharding.kernel_seconds import Collective


@dataclass(frozen=True, slots=True)
class Kernel:
    """One step: the values it reads and makes, and those of them that may take the place of an operand.

    elements: of the array that it goes through; 0 where it cannot be one kernel with others that go through as many
    seconds:  how long it is thought to run
    starts:   the collective that is under way from then on
    ends:     whether it is the end of a collective
    """

    reads: frozenset[int]
    makes: tuple[int, ...]
    over: frozenset[int]
    elements: float = 0.0
    seconds: float = 0.0
    starts: Collective | None = None
    ends: bool = False


@dataclass(slots=True, eq=False)
class Lifetimes:
    """Kernels being listed; values are numbered as they are made. `barriers` are those that are no arrays: who reads one waits for it.

    instead: of a kept value the one that was there from the start, whose place it takes
    results: values without size that stand for what is added to arguments, in the order of a program's results
    """

    sizes: list[float] = field(default_factory=list[float])
    kernels: list[Kernel] = field(default_factory=list[Kernel])
    kept: set[int] = field(default_factory=set[int])
    barriers: set[int] = field(default_factory=set[int])
    instead: dict[int, int] = field(default_factory=dict[int, int])
    results: list[int] = field(default_factory=list[int])

    def value(self) -> int:
        """A value that is there from the start, and counted elsewhere."""
        self.sizes.append(0.0)
        return len(self.sizes) - 1

    def run(
        self, reads: frozenset[int], sizes: tuple[float, ...], *, in_place: bool, elements: float = 0.0, seconds: float = 0.0
    ) -> tuple[int, ...]:
        """A kernel that makes values of these sizes; their numbers. `in_place`: element by element, so that they may lie over operands."""
        made = self.values(sizes)
        over = frozenset(made) if in_place else frozenset[int]()
        self.kernels.append(Kernel(reads, made, over, elements, seconds))
        return made

    def exchange(self, reads: frozenset[int], collective: Collective) -> frozenset[int]:
        """A collective: its start and its end, two kernels. What arrives, and what says that it is there.

        What arrives has memory of its own from the start on, and what leaves keeps its until the end. The value after it stands for its
        having arrived (`schedule` counts on that).
        """
        [arriving], [arrived] = self.values((collective.arriving,)), self.values((0.0,))
        self.kernels.append(Kernel(reads, (arriving,), frozenset(), starts=collective))
        self.kernels.append(Kernel(reads | {arriving}, (arrived,), frozenset(), ends=True))
        return frozenset((arriving, arrived))

    def put_off(self, wider: Mapping[int, float]) -> None:
        """List kernels that add to an argument larger than what they read (`wider`: bytes of it, by kernel) where XLA's scheduler does.

        That knows nothing of results in place of arguments: an addition seems to take memory, and waits as long as there is something else
        that takes no more.
        """
        last = {value: index for index, kernel in enumerate(self.kernels) for value in kernel.reads}
        taken = [
            wider.get(index, sum(self.sizes[value] for value in kernel.makes))
            - sum(self.sizes[value] for value in kernel.reads if last[value] == index)
            for index, kernel in enumerate(self.kernels)
        ]
        order: list[int] = []
        waiting: list[int] = []
        for index in range(len(self.kernels)):
            if index in wider:
                waiting.append(index)
            else:
                order += [one for one in waiting if taken[one] < taken[index]]
                waiting = [one for one in waiting if taken[one] >= taken[index]]
                order.append(index)
        self.kernels = [self.kernels[index] for index in (*order, *waiting)]

    def values(self, sizes: tuple[float, ...]) -> tuple[int, ...]:
        """Values of these sizes that some kernel is going to make."""
        first = len(self.sizes)
        self.sizes += sizes
        return tuple(range(first, len(self.sizes)))

    def bytes_beside_kept(self, order: Sequence[Kernel]) -> float:
        """The most bytes at once that need memory beside that of the kept values, if the kernels run in `order`.

        Memory of a kept value has room, until that is made, for one other at a time that is no larger; where it takes another one's place,
        from when that was read for the last time; one that nobody reads keeps its memory for it.
        """
        made = {value: index for index, kernel in enumerate(order) for value in kernel.makes}
        last = {value: index for index, kernel in enumerate(order) for value in (*kernel.makes, *kernel.reads)}
        over = {value for kernel in order for value in kernel.over}
        homes = sorted(self.kept & made.keys(), key=self.sizes.__getitem__)
        begins = [last.get(self.instead[home], len(order)) if home in self.instead else -1 for home in homes]
        guests: list[list[int]] = [[] for _ in homes]
        for value in sorted(
            (value for value in made if self.sizes[value] and value not in self.kept), key=lambda value: -self.sizes[value]
        ):
            for number in range(bisect_left(homes, self.sizes[value], key=self.sizes.__getitem__), len(homes)):
                ends = made[homes[number]] + (homes[number] in over and self.sizes[homes[number]] == self.sizes[value])
                if begins[number] < made[value] and last[value] < ends:
                    if all(last[value] < made[guest] or last[guest] < made[value] for guest in guests[number]):
                        guests[number].append(value)
                        break
        housed = self.kept.union(*guests)
        sizes = [0.0 if value in housed else size for value, size in enumerate(self.sizes)]
        return Lifetimes(sizes).peak_bytes(order)

    def peak_bytes(self, order: Sequence[Kernel] | None = None) -> float:
        """The most bytes that all values hold at once, if the kernels run in `order`, or as they are listed."""
        kernels = self.kernels if order is None else order
        last = {value: index for index, kernel in enumerate(kernels) for value in (*kernel.makes, *kernel.reads)}
        held = peak = 0.0
        for index, kernel in enumerate(kernels):
            dying = [value for value in kernel.reads if last[value] == index and value not in self.kept]
            made = sum(self.sizes[value] for value in kernel.makes)
            taken = _taken_over([self.sizes[value] for value in kernel.over], [self.sizes[value] for value in dying])
            peak = max(peak, held + made - taken)
            unread = [value for value in kernel.makes if last[value] == index and value not in self.kept]
            held += made - sum(self.sizes[value] for value in (*dying, *unread))
        return peak


def _taken_over(made: list[float], dying: list[float]) -> float:
    """Bytes of results that lie where operands lay, each over one of its own size."""
    free = list(dying)
    taken = 0.0
    for size in made:
        if size in free:
            free.remove(size)
            taken += size
    return taken
