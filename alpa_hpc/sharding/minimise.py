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


def minimise(tables: Tables, keep: frozenset[int], table_cap: int) -> Minimum:
    """Let every variable outside `keep` leave whose sum of tables has at most `table_cap` entries."""
    order = _order(tables, keep, table_cap)
    stays = np.ones(len(tables.sizes), dtype=np.bool_)
    stays[order] = False
    by_leaving = np.concatenate([order, np.flatnonzero(stays)])
    place = np.empty(len(by_leaving), dtype=np.int64)
    place[by_leaving] = np.arange(len(by_leaving))
    sizes, names = tables.sizes[by_leaving], tables.names[by_leaving]
    steps = make_steps(place, sizes, tables.scope_starts, tables.scopes, tables.offsets, len(tables.scores), len(order))
    entries = run_steps(steps, tables.scores)
    scope_starts, scopes, offsets, scores = tables_left(steps, entries)
    constant = tables.constant + float(entries[steps.offsets[steps.constants]].sum())
    left = Tables(names[len(order) :], sizes[len(order) :], scope_starts, scopes - len(order), offsets, scores, constant)
    return Minimum(left, Undo(names, steps, entries), left.variables)


def is_too_wide(tables: Tables, table_cap: int) -> bool:
    """Whether not all variables can leave."""
    return len(_order(tables, frozenset(), table_cap)) < len(tables.names)


def _order(tables: Tables, keep: frozenset[int], table_cap: int) -> Ints:
    kept = np.isin(tables.names, np.fromiter(keep, np.int64, len(keep)))
    return elimination_order(tables.sizes, tables.scope_starts, tables.scopes, kept, float(table_cap))


def restore(undo: Undo, choices: Mapping[int, int]) -> dict[int, int]:
    """Complete an assignment of the variables that remained by the best states of the others; of equal states the lowest wins."""
    names = undo.names.tolist()
    states = np.array([choices.get(name, 0) for name in names], dtype=np.int64)
    states_back(undo.steps, undo.entries, states)
    return dict(choices) | dict(zip(names, states.tolist(), strict=True))
