"""Crossings -> C(i, k), the bytes that equations i..k-1 read of what earlier equations made, as flat arrays that kernels sweep over.

A layer receives a value once, by its first reader there. So a row a (value, reader) is enough:

    C(i, k) = sum of sizes over the rows with  first <= i <= reader < k,    first = 1 + the equation that made the value or read it before

C grows with k; with i it may grow or shrink.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Ints, Whole, inner


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value: its bytes, the equation that makes it and the equations that read it (positions)."""

    size: int
    producer: int
    readers: tuple[int, ...]


class Reads(NamedTuple):
    """The rows twice: those of reader r are `by_reader[r]` up to `by_reader[r + 1]` of `firsts` and `sizes`; and likewise by first.

    `before[p]` is the size of all rows with reader < p.
    """

    by_reader: Ints
    firsts: Ints
    sizes: Ints
    by_first: Ints
    readers: Ints
    first_sizes: Ints
    before: Ints


def flat_reads(num_equations: int, crossings: Sequence[Crossing]) -> Reads:
    """All rows of `crossings` between equations 0..num_equations - 1."""
    rows: list[tuple[int, int, int]] = []
    for value in crossings:
        previous = value.producer
        for reader in sorted(set(value.readers)):
            rows.append((previous + 1, reader, value.size))
            previous = reader
    firsts, readers, sizes = np.array(rows, np.int64).reshape(-1, 3).T
    of_reader, of_first = np.argsort(readers, kind="stable"), np.argsort(firsts, kind="stable")
    by_reader = np.searchsorted(readers[of_reader], np.arange(num_equations + 1))
    by_first = np.searchsorted(firsts[of_first], np.arange(num_equations + 2))
    before = np.concatenate([[0], np.cumsum(sizes[of_reader])])[by_reader]
    return Reads(by_reader, firsts[of_reader], sizes[of_reader], by_first, readers[of_first], sizes[of_first], before)


@inner
def received_one_further(reads: Reads, start: Whole, stop: Whole, total: Whole) -> Whole:
    """C(start + 1, stop + 1), given C(start, stop) = `total`."""
    for row in range(reads.by_reader[start], reads.by_reader[start + 1]):
        total -= reads.sizes[row]
    for row in range(reads.by_first[start + 1], reads.by_first[start + 2]):
        if reads.readers[row] < stop:
            total += reads.first_sizes[row]
    for row in range(reads.by_reader[stop], reads.by_reader[stop + 1]):
        if reads.firsts[row] <= start + 1:
            total += reads.sizes[row]
    return total
