"""The door to MIP solvers: a model solved in a process of its own is the model solved here."""

import numpy as np
import pytest

from alpa_hpc.sharding.linear import HighsSolver, LinearModel


def covering(seed: int, num_columns: int = 40, num_rows: int = 30) -> LinearModel:
    """Choose columns at least cost so that every row has one of its four."""
    rng = np.random.default_rng(seed)
    columns = np.stack([np.sort(rng.choice(num_columns, 4, replace=False)) for _ in range(num_rows)]).reshape(-1)
    return LinearModel(
        costs=rng.integers(1, 20, num_columns).astype(float),
        upper=np.ones(num_columns),
        is_whole=np.ones(num_columns, dtype=np.bool_),
        row_starts=np.arange(0, 4 * num_rows + 1, 4),
        columns=columns,
        coefficients=np.ones(4 * num_rows),
        row_lower=np.ones(num_rows),
        row_upper=np.full(num_rows, 4.0),
        start=np.ones(num_columns),
        gap=0.5,
    )


def test_a_large_model_is_solved_in_a_process_as_it_is_here(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        model = covering(seed)
        here, there = HighsSolver().solve(model, 20.0), HighsSolver(child_size=1).solve(model, 20.0)
        assert np.array_equal(here.values.round(), there.values.round())
        assert here.bound == there.bound > 0
    assert capfd.readouterr().out == ""


def test_a_solver_that_is_late_has_found_nothing() -> None:
    answer = HighsSolver(grace_seconds=0.0).solve(covering(0, num_columns=6000, num_rows=4000), 0.0)
    assert len(answer.values) == 0
    assert answer.bound == -np.inf
