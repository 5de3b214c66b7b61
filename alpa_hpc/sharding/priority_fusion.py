"""Operations on one device -> the kernels that XLA makes of them for GPUs, so which arrays lie in memory between them.

XLA's priority fusion works a value out where it is read, by all its readers or by none, as long as that is thought to save time
(`kernel_costs`): first what saves most. A value with several readers is made once, then, where working it out again costs more than writing
it and reading it: where it is much arithmetic, or where a reader runs in few blocks. A reduction is the end of its kernel, but for
functions of what it makes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from alpa_hpc.sharding.kernel_costs import LAUNCH, KernelWork, Read, Reduction, work_seconds


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An array on a device, or a number."""

    elements: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """What makes a value. `along`: element by element of operands, else any part of them.

    fused: whether it can be part of a kernel with others
    """

    reads: tuple[Value, ...]
    made: Value
    flop: float
    along: bool = True
    reduction: Reduction | None = None
    fused: bool = True


@dataclass(slots=True, eq=False)
class FusedKernel:
    """Operations that are one kernel. `reads`: how many times over it reads a value, by the part of the kernel that does.

    Parts go through their elements one by one, so what two operations of a part read is read once. Part 0 goes through the kernel's result.
    """

    made: Value
    reads: dict[tuple[Value, int], float]
    flop: float
    reduction: Reduction | None
    fused: bool
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.seconds = work_seconds(self.work)

    @property
    def operands(self) -> dict[Value, float]:
        """What it reads, and how many times over."""
        found: dict[Value, float] = {}
        for (value, _), times in self.reads.items():
            found[value] = found.get(value, 0.0) + times
        return found

    @property
    def work(self) -> KernelWork:
        """What it does, for the cost model."""
        reads = tuple(Read(times * value.num_bytes, value.num_bytes, value.itemsize) for value, times in self.operands.items())
        return KernelWork(reads, self.made.elements, self.reduction, self.flop, self.made.num_bytes)

    def with_producer(self, producer: "FusedKernel") -> "FusedKernel":
        """This kernel if it works out for itself what another one makes."""
        parts = {part: times for (value, part), times in self.reads.items() if value is producer.made}
        whole = sum(parts.values())
        reads = {key: times for key, times in self.reads.items() if key[0] is not producer.made}
        for (value, inner), times in producer.reads.items():
            if inner:
                reads[value, inner] = reads.get((value, inner), 0.0) + times * whole
            else:
                reads.update({(value, part): max(reads.get((value, part), 0.0), times * outer) for part, outer in parts.items()})
        return FusedKernel(self.made, reads, self.flop + producer.flop * whole, self.reduction or producer.reduction, fused=True)

    def finishes(self, producer: "FusedKernel") -> bool:
        """Whether it can be the end of a kernel that reduces: a function of each number that this one makes, and of nothing else."""
        return self.reduction is None and self.reads.keys() == {(producer.made, 0)}


def fused_kernels(operations: Sequence[Operation], results: Iterable[Value]) -> list[FusedKernel]:
    """The kernels of operations, in an order in which they can run; `results` are to lie in memory."""
    parts = count(1)
    kernels = {one.made: _alone(one, next(parts)) for one in operations}
    fusion = _Fusion(kernels, frozenset(results))
    fusion.run()
    return list(kernels.values())


def _alone(one: Operation, part: int) -> FusedKernel:
    reads = {(value, 0 if one.along else part): 1.0 if one.along else _times(one, value) for value in one.reads}
    return FusedKernel(one.made, reads, one.flop, one.reduction, one.fused)


def _times(one: Operation, value: Value) -> float:
    """What is spread is read again and again, and of what is cut a part; of several operands, and of what is reduced, each is read once."""
    return 1.0 if one.reduction or len(one.reads) > 1 else one.made.elements / max(1, value.elements)


@dataclass(slots=True, eq=False)
class _Fusion:
    """Kernels by what they make, in their order; `saved` = seconds that it saves to work a value out where it is read, where it may be."""

    kernels: dict[Value, FusedKernel]
    results: frozenset[Value]
    readers: dict[Value, dict[Value, None]] = field(default_factory=dict[Value, dict[Value, None]])
    saved: dict[Value, float] = field(default_factory=dict[Value, float])
    places: Mapping[Value, int] = field(default_factory=dict[Value, int])

    def run(self) -> None:
        """Fuse as long as it saves time."""
        self.places = {value: place for place, value in enumerate(self.kernels)}
        for made, kernel in self.kernels.items():
            for value, _ in kernel.reads:
                self.readers.setdefault(value, {})[made] = None
        self._weigh(self.kernels)
        while self.saved:
            value = max(self.saved, key=lambda one: (self.saved[one], self.places[one]))
            self._fuse(value)

    def _fuse(self, value: Value) -> None:
        producer = self.kernels.pop(value)
        del self.saved[value]
        changed: dict[Value, None] = {}
        for reader in self.readers.pop(value):
            self.kernels[reader] = self.kernels[reader].with_producer(producer)
            changed[reader] = None
            for operand, _ in self.kernels[reader].reads:
                self.readers.setdefault(operand, {})[reader] = None
                changed[operand] = None
        for operand, _ in producer.reads:
            self.readers[operand].pop(value, None)
            changed[operand] = None
        self._weigh(changed)

    def _weigh(self, values: Iterable[Value]) -> None:
        for value in values:
            if value in self.kernels:
                seconds = self._saved(value)
                if seconds is not None and seconds >= 0:
                    self.saved[value] = seconds
                else:
                    self.saved.pop(value, None)

    def _saved(self, value: Value) -> float | None:
        """Seconds; nothing where a value cannot be worked out by all its readers."""
        producer = self.kernels[value]
        readers = [self.kernels[reader] for reader in self.readers.get(value, ())]
        if value in self.results or not readers or not all(kernel.fused for kernel in (producer, *readers)):
            return None
        if producer.reduction and not all(reader.finishes(producer) for reader in readers):
            return None
        longer = sum(reader.with_producer(producer).seconds - reader.seconds for reader in readers)
        return LAUNCH + producer.seconds - longer
