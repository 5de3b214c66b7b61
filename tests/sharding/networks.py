"""Tables of tests, each with its own array, and as the long arrays that elimination takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from alpa_hpc.sharding.flat import starts_of
from alpa_hpc.sharding.problem import Costs
from alpa_hpc.sharding.tables import Tables, make_tables


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Costs over the variables of `scope`, axes in its order."""

    scope: tuple[int, ...]
    score: Costs


def random_table(rng: np.random.Generator, scope: Sequence[int], sizes: Sequence[int]) -> Table:
    """Small whole numbers, so that sums are exact and ties occur; some entries are not allowed."""
    shape = tuple(sizes[v] for v in scope)
    return Table(tuple(scope), np.where(rng.random(shape) < 0.15, np.inf, rng.integers(0, 4, shape).astype(float)))


def tables_of(tables: Sequence[Table]) -> Tables:
    sizes = {v: size for table in tables for v, size in zip(table.scope, table.score.shape, strict=True)}
    names = sorted(sizes)
    return make_tables(
        names=np.array(names, dtype=np.int64),
        sizes=np.array([sizes[v] for v in names], dtype=np.int64),
        scope_starts=starts_of([len(table.scope) for table in tables]),
        scopes=np.array([names.index(v) for table in tables for v in table.scope], dtype=np.int64),
        offsets=starts_of([table.score.size for table in tables])[:-1],
        scores=np.concatenate([np.zeros(0), *(table.score.ravel() for table in tables)]),
    )


def separate(tables: Tables) -> list[Table]:
    """The tables one by one, the constant first."""
    found = [Table((), np.array(tables.constant))]
    for t, offset in enumerate(tables.offsets.tolist()):
        scope = tables.scopes[tables.scope_starts[t] : tables.scope_starts[t + 1]]
        shape = tables.sizes[scope].tolist()
        found.append(Table(tuple(tables.names[scope].tolist()), tables.scores[offset : offset + prod(shape)].reshape(shape)))
    return found


def entry(tables: Sequence[Table], states: Mapping[int, int]) -> float:
    """The sum at one assignment."""
    return float(sum(table.score[tuple(states[v] for v in table.scope)] for table in tables))


def whole(tables: Sequence[Table], variables: Sequence[int], sizes: Sequence[int]) -> Costs:
    """The sum as one array over `variables`, which have `sizes[v]` states."""
    total = np.zeros([sizes[v] for v in variables])
    for table in tables:
        by_place = sorted(range(len(table.scope)), key=lambda axis: variables.index(table.scope[axis]))
        total = total + table.score.transpose(by_place).reshape([sizes[v] if v in table.scope else 1 for v in variables])
    return total
