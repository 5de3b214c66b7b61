"""Program + the tensors that are wanted of it -> which of its equations are run: XLA removes the others."""

from collections.abc import Iterable
from dataclasses import dataclass

from alpa_hpc.sharding.build import Program


@dataclass(frozen=True, slots=True)
class Needed:
    """What somebody needs: the numbers of equations, in order, each with those of its results; the tensors that must be there before."""

    equations: tuple[tuple[int, tuple[int, ...]], ...]
    before: frozenset[int]


def needed(program: Program, wanted: Iterable[int]) -> Needed:
    """What `wanted` tensors depend on. A barrier, which makes nothing, holds back only what is needed behind it."""
    live = set(wanted)
    found: list[tuple[int, tuple[int, ...]]] = []
    for index in range(len(program.records) - 1, -1, -1):
        record = program.records[index]
        results = tuple(tensor for tensor in dict.fromkeys(record.results) if tensor in live)
        if results:
            found.append((index, results))
            if record.plans:
                live.difference_update(results)
                live.update(record.operands)
    return Needed(tuple(reversed(found)), frozenset(live))
