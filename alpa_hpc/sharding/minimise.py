"""Min-sum bucket elimination of tables, states found on the way back: tables over many variables -> tables over the kept ones, and Undo.

The order of leaving is found first, from scopes and sizes alone (`eliminate.py`); then variables leave one after the other (`min_sum.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from alpa_hpc.kernels import Floats, Ints
from alpa_hpc.sharding.eliminate import elimination_order
from alpa_hpc.sharding.min_sum import run_steps, states_back
from alpa_hpc.sharding.min_sum_steps import Steps, make_steps, tables_left
from alpa_hpc.sharding.tables import Tables


@dataclass(frozen=True, slots=True, eq=False)
class Undo:
    """What finds the states of the variables that left: `names` of variables by when they leave, and every table of the way forwards."""

    names: Ints
    steps: Steps
    entries: Floats

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return self.entries.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Minimum:
    """Tables over the kept variables (and over those that were too wide), not merged; their sum is the minimum over all others."""

    tables: Tables
    undo: Undo
    left: frozenset[int]
    """the variables that remain"""


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """How variables are going to leave: `steps` with `names` and sizes of variables by when they leave."""

    tables: Tables
    names: Ints
    steps: Steps

    @property
    def num_leaving(self) -> int:
        """Variables that leave."""
        return len(self.steps.splits)

    @property
    def is_complete(self) -> bool:
        """Whether all variables leave."""
        return self.num_leaving == len(self.names)

    @property
    def num_entries(self) -> int:
        """Entries of all tables together."""
        return int(self.steps.num_entries)

    @property
    def num_sums(self) -> float:
        """Entries of all joint tables together: how long it takes."""
        made = np.diff(np.append(self.steps.offsets[len(self.tables.offsets) :], self.steps.num_entries))
        return float(made @ self.steps.sizes[: self.num_leaving].astype(np.float64))


def minimise(tables: Tables, keep: frozenset[int], table_cap: int) -> Minimum:
    """Let every variable outside `keep` leave whose sum of tables has at most `table_cap` entries."""
    return carry_out(prepare(tables, keep, table_cap))


def prepare(tables: Tables, keep: frozenset[int], table_cap: int) -> Elimination:
    """Find the order and the steps, which take next to no time."""
    kept = np.isin(tables.names, np.fromiter(keep, np.int64, len(keep)))
    order = elimination_order(tables.sizes, tables.scope_starts, tables.scopes, kept, float(table_cap))
    stays = np.ones(len(tables.sizes), dtype=np.bool_)
    stays[order] = False
    by_leaving = np.concatenate([order, np.flatnonzero(stays)])
    place = np.empty(len(by_leaving), dtype=np.int64)
    place[by_leaving] = np.arange(len(by_leaving))
    sizes = tables.sizes[by_leaving]
    steps = make_steps(place, sizes, tables.scope_starts, tables.scopes, tables.offsets, len(tables.scores), len(order))
    return Elimination(tables, tables.names[by_leaving], steps)


def carry_out(elimination: Elimination) -> Minimum:
    """Let the variables leave."""
    tables, steps, count = elimination.tables, elimination.steps, elimination.num_leaving
    entries = run_steps(steps, tables.scores)
    scope_starts, scopes, offsets, scores = tables_left(steps, entries)
    constant = tables.constant + float(entries[steps.offsets[steps.constants]].sum())
    left = Tables(elimination.names[count:], steps.sizes[count:], scope_starts, scopes - count, offsets, scores, constant)
    return Minimum(left, Undo(elimination.names, steps, entries), left.variables)


def restore(undo: Undo, choices: Mapping[int, int]) -> dict[int, int]:
    """Complete an assignment of the variables that remained by the best states of the others; of equal states the lowest wins."""
    names = undo.names.tolist()
    states = np.array([choices.get(name, 0) for name in names], dtype=np.int64)
    states_back(undo.steps, undo.entries, states)
    return dict(choices) | dict(zip(names, states.tolist(), strict=True))
