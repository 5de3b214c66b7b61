"""Knobs that cannot work are refused by name; the three shipped configs say where and how much is measured."""

import pytest

from alpa_hpc.errors import ConfigError
from alpa_hpc.profiling.options import CostSource, Extent, ProfilingOptions

GOOD = {
    "source": CostSource.MEASURED,
    "extent": Extent.MESH,
    "max_rounds": 2,
    "tasks_per_round": 3,
    "max_parallel": 8,
    "max_pending_minutes": 0.5,
    "max_stage_minutes": 0.5,
    "repeats": 5,
    "store": "",
}


@pytest.mark.parametrize("name", ["max_rounds", "tasks_per_round", "max_parallel", "repeats", "max_pending_minutes", "max_stage_minutes"])
def test_nothing_is_less_than_it_must_be(name: str) -> None:
    assert ProfilingOptions(**GOOD).max_parallel == 8  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=f"{name} is 0, expected"):
        ProfilingOptions(**{**GOOD, name: 0})  # pyright: ignore[reportArgumentType]
