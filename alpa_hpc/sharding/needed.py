"""Program + the tensors that are wanted of it -> which of its equations are run: XLA removes the others."""

from collections.abc import Iterable

from alpa_hpc.sharding.build import Program


def needed_equations(program: Program, wanted: Iterable[int]) -> tuple[int, ...]:
    """The numbers of the equations that `wanted` tensors depend on, in order; barriers count where what they hold back is needed."""
    live = set(wanted)
    found: list[int] = []
    for index in range(len(program.records) - 1, -1, -1):
        record = program.records[index]
        if any(tensor in live for tensor in record.results):
            live.update(record.operands)
            found.append(index)
    return tuple(reversed(found))
