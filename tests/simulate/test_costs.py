"""transfer_seconds against hand-made sums, and never below what a path's bandwidth allows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
from alpa_hpc.simulate.costs import transfer_seconds

DEVICE = DeviceSpec("test", 2**30, 1e12, 1e12, 1e11, 1.0)
CLUSTER = ClusterSpec("two nodes", 2, 4, DEVICE, intra_node=Link(100.0, 0.5), inter_node=Link(10.0, 2.0))


@pytest.mark.parametrize(
    ("sources", "targets", "seconds"),
    [
        ([0], [1], 0.5 + 1000 / 100),
        ([0, 1], [2, 3], 0.5 + 500 / 100),
        ([0], [1, 2], 0.5 + 1000 / 100),
        ([0], [4], 2.0 + 1000 / 10),
        ([0, 1, 2, 3], [4, 5, 6, 7], 2.0 + 1000 / 10),
        ([0, 1], [2, 4], 2.0 + 500 / 10),
        ([0, 4], [1, 5], 2.0 + 250 / 10),
    ],
)
def test_slowest_path_decides(sources: list[int], targets: list[int], seconds: float):
    assert transfer_seconds(CLUSTER, sources, targets, 1000) == pytest.approx(seconds)


def test_nothing_takes_no_time():
    assert transfer_seconds(CLUSTER, [0], [4], 0) == 0.0


devices = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True)


@settings(deadline=None)
@given(devices, devices, st.integers(1, 10**6))
def test_both_directions_take_the_same_and_more_bytes_take_longer(sources: list[int], targets: list[int], num_bytes: int):
    seconds = transfer_seconds(CLUSTER, sources, targets, num_bytes)
    assert seconds == pytest.approx(transfer_seconds(CLUSTER, targets, sources, num_bytes))
    assert seconds < transfer_seconds(CLUSTER, sources, targets, 2 * num_bytes)
