"""Costs over few variables each, to be added up, in a few long arrays: what elimination takes and leaves.

A variable with one state decides nothing: it is in no scope, and a table of such variables alone is part of the constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_hpc.kernels import Floats, Ints
from alpa_hpc.sharding.flat import FlatProblem, starts_of


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """`constant` and tables over variables `names[i]` (distinct) of `sizes[i]` > 1 states; +inf = not allowed, never NaN.

    Table t has the variables `scopes[scope_starts[t]:scope_starts[t + 1]]` (numbers i, at least one) and its entries from
    `scores[offsets[t]]` on, axes in scope order, the last one fastest.
    """

    names: Ints
    sizes: Ints
    scope_starts: Ints
    scopes: Ints
    offsets: Ints
    scores: Floats
    constant: float

    @property
    def variables(self) -> frozenset[int]:
        """Names of the variables in scopes."""
        return frozenset(self.names[np.unique(self.scopes)].tolist())

    def column(self, name: int, size: int) -> Floats:
        """The sum as an array over the states of the one variable that tables have."""
        assert self.variables <= {name}, "no other variable is left"
        return self.constant + sum((self.scores[offset : offset + size] for offset in self.offsets.tolist()), np.zeros(size))

    def renamed(self, names: Ints) -> "Tables":
        """The same tables, variable i called names[i]."""
        return replace(self, names=names)


def make_tables(names: Ints, sizes: Ints, scope_starts: Ints, scopes: Ints, offsets: Ints, scores: Floats) -> Tables:
    """The tables, freed of variables with one state."""
    wide = sizes > 1
    number = np.cumsum(wide) - 1
    in_scope = wide[scopes]
    lengths = np.diff(starts_of(in_scope.astype(np.int64))[scope_starts])
    constant = float(scores[offsets[lengths == 0]].sum())
    kept = lengths > 0
    return Tables(names[wide], sizes[wide], starts_of(lengths[kept]), number[scopes[in_scope]], offsets[kept], scores, constant)


def flat_tables(problem: FlatProblem) -> Tables:
    """Costs of nodes and edges; memory is left aside."""
    return pair_tables(problem.sizes, problem.costs, problem.ends, problem.offsets, problem.tables)


def pair_tables(sizes: Ints, costs: Floats, ends: Ints, offsets: Ints, tables: Floats) -> Tables:
    """Costs of nodes one after the other, and of edges `ends[e]`, from `tables[offsets[e]]` on."""
    num_nodes, num_edges = len(sizes), len(ends)
    scopes = np.concatenate([np.arange(num_nodes), ends.ravel()])
    scope_starts = np.concatenate([np.arange(num_nodes), np.arange(num_nodes, num_nodes + 2 * num_edges + 1, 2)])
    starts = np.concatenate([starts_of(sizes)[:-1], len(costs) + offsets[:num_edges]])
    return make_tables(np.arange(num_nodes), sizes, scope_starts, scopes, starts, np.concatenate([costs, tables]))


def joined(parts: Sequence[Tables]) -> Tables:
    """All tables of several sums; variables of one name are one."""
    every = np.concatenate([part.names for part in parts])
    names, first, number = np.unique(every, return_index=True, return_inverse=True)
    shifts, tables = starts_of([len(part.names) for part in parts]).tolist(), starts_of([len(part.scores) for part in parts]).tolist()
    return Tables(
        names=names,
        sizes=np.concatenate([part.sizes for part in parts])[first],
        scope_starts=starts_of(np.concatenate([np.diff(part.scope_starts) for part in parts])),
        scopes=number[np.concatenate([part.scopes + shift for part, shift in zip(parts, shifts, strict=False)])],
        offsets=np.concatenate([part.offsets + shift for part, shift in zip(parts, tables, strict=False)]),
        scores=np.concatenate([part.scores for part in parts]),
        constant=sum(part.constant for part in parts),
    )
