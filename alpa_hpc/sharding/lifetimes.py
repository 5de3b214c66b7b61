"""Kernels in the order they run, the values they make and read -> the most bytes that lie in memory at once.

A value lives from the kernel that makes it to the last one that reads it; a *kept* value lives to the end. An elementwise kernel writes its
result over an operand of the same size that nobody reads later.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kernel:
    """One step: the values it reads and makes; `in_place`: element by element, so that results may take the place of operands."""

    reads: frozenset[int]
    makes: tuple[int, ...]
    in_place: bool


@dataclass(slots=True, eq=False)
class Lifetimes:
    """Kernels being listed; values are numbered as they are made."""

    sizes: list[float] = field(default_factory=list[float])
    kernels: list[Kernel] = field(default_factory=list[Kernel])
    kept: set[int] = field(default_factory=set[int])

    def run(self, reads: frozenset[int], sizes: tuple[float, ...], *, in_place: bool) -> tuple[int, ...]:
        """A kernel that makes values of these sizes; their numbers."""
        first = len(self.sizes)
        self.sizes += sizes
        made = tuple(range(first, len(self.sizes)))
        self.kernels.append(Kernel(reads, made, in_place))
        return made

    @property
    def kept_bytes(self) -> float:
        """Bytes of the kept values."""
        return sum(self.sizes[value] for value in self.kept)

    def peak_bytes(self) -> float:
        """The most bytes that all values hold at once."""
        last = {value: index for index, kernel in enumerate(self.kernels) for value in (*kernel.makes, *kernel.reads)}
        held = peak = 0.0
        for index, kernel in enumerate(self.kernels):
            dying = [value for value in kernel.reads if last[value] == index and value not in self.kept]
            made = [self.sizes[value] for value in kernel.makes]
            peak = max(peak, held + sum(made) - (_taken_over(made, [self.sizes[value] for value in dying]) if kernel.in_place else 0.0))
            unread = [value for value in kernel.makes if last[value] == index and value not in self.kept]
            held += sum(made) - sum(self.sizes[value] for value in (*dying, *unread))
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
