"""Collective times: worked numbers, identities and monotonicity."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.collectives import all_gather, all_reduce, all_to_all, permute, point_to_point, reduce_scatter
from alpa_hpc.cluster.hardware import Link

Collective = Callable[[Link, int, Any], Any]
ALL: list[Collective] = [all_reduce, all_gather, reduce_scatter, all_to_all, permute]
LINK = Link(1e9, 1e-3)


def test_worked_numbers() -> None:
    assert all_gather(LINK, 4, 8e9) == pytest.approx(6.0 + 2e-3)
    assert reduce_scatter(LINK, 4, 8e9) == pytest.approx(6.0 + 2e-3)
    assert all_reduce(LINK, 4, 8e9) == pytest.approx(12.0 + 4e-3)
    assert all_to_all(LINK, 4, 8e9) == pytest.approx(1.5 + 2e-3)
    assert permute(LINK, 4, 8e9) == pytest.approx(2.0 + 1e-3)
    assert point_to_point(LINK, 8e9) == pytest.approx(8.0 + 1e-3)


@pytest.mark.parametrize("collective", ALL)
def test_one_device_costs_nothing(collective: Collective) -> None:
    assert collective(LINK, 1, 1e9) == 0.0


@pytest.mark.parametrize("collective", ALL)
@settings(deadline=None)
@given(num_devices=st.integers(2, 512), num_bytes=st.floats(0, 1e12), more=st.floats(1, 1e12), factor=st.floats(1, 100))
def test_monotone_in_bytes_bandwidth_and_latency(
    collective: Collective, num_devices: int, num_bytes: float, more: float, factor: float
) -> None:
    base = collective(LINK, num_devices, num_bytes)
    assert base > 0
    assert collective(LINK, num_devices, num_bytes + more) >= base
    assert collective(Link(LINK.bandwidth * factor, LINK.latency), num_devices, num_bytes) <= base
    assert collective(Link(LINK.bandwidth, LINK.latency * factor), num_devices, num_bytes) >= base


@pytest.mark.parametrize("collective", [all_reduce, all_gather, reduce_scatter])
@settings(deadline=None)
@given(num_devices=st.integers(1, 511), num_bytes=st.floats(0, 1e12))
def test_monotone_in_devices_at_equal_full_bytes(collective: Collective, num_devices: int, num_bytes: float) -> None:
    assert collective(LINK, num_devices + 1, num_bytes) >= collective(LINK, num_devices, num_bytes)


@settings(deadline=None)
@given(num_devices=st.integers(1, 64), num_bytes=st.floats(0, 1e12))
def test_an_all_to_all_never_costs_more_than_the_all_gather(num_devices: int, num_bytes: float) -> None:
    assert all_to_all(LINK, num_devices, num_bytes) <= all_gather(LINK, num_devices, num_bytes)


@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_arrays_give_the_same_as_floats(collective: Collective, num_devices: int) -> None:
    sizes = np.array([0.0, 1.0, 1e6, 3e9])
    np.testing.assert_allclose(collective(LINK, num_devices, sizes), [collective(LINK, num_devices, float(size)) for size in sizes])
