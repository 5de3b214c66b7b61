"""The roofline on both sides of its ridge, at both widths."""

import pytest

from alpa_hpc.cluster.compute import compute_seconds, flop_rate
from alpa_hpc.cluster.hardware import DeviceSpec

DEVICE = DeviceSpec("test", 2**30, 1e12, 4e12, 1e11, 0.5)


@pytest.mark.parametrize(("itemsize", "rate"), [(1, 2e12), (2, 2e12), (4, 0.5e12), (8, 0.5e12)])
def test_rate_depends_on_the_width(itemsize: int, rate: float) -> None:
    assert flop_rate(DEVICE, itemsize) == rate


def test_the_slower_side_decides() -> None:
    assert compute_seconds(DEVICE, flop=1e12, num_bytes=1e9, itemsize=2) == pytest.approx(0.5)
    assert compute_seconds(DEVICE, flop=1e12, num_bytes=1e9, itemsize=4) == pytest.approx(2.0)
    assert compute_seconds(DEVICE, flop=1e6, num_bytes=1e9, itemsize=4) == pytest.approx(0.01)
