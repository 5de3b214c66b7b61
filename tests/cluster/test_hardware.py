"""Hardware that cannot be is refused, whatever it is that is wrong."""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
from alpa_hpc.errors import ConfigError

DEVICE = DeviceSpec("test", 2**30, 1e12, 2e12, 1e11, 0.5)
LINK = Link(1e9, 1e-5)


@pytest.mark.parametrize("wrong", [0, -1, nan, inf, -inf])
@pytest.mark.parametrize("field", ["memory", "flops_32bit", "flops_16bit", "memory_bandwidth", "efficiency"])
def test_a_device_has_real_memory_and_rates(field: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match=f"^device 'test': {field} is {wrong}, expected .*"):
        replace(DEVICE, **{field: wrong})


@pytest.mark.parametrize("given", [0.9 * 80e9, 72e9, 72_000_000_000, np.float32(72e9), np.int64(72_000_000_000)])
def test_memory_is_a_whole_number_of_bytes_once_a_device_is_made(given: float) -> None:
    memory = replace(DEVICE, memory=given).memory
    assert type(memory) is int
    assert memory == int(given)
    with pytest.raises(ConfigError, match=r"memory is 0.9, expected bytes, a finite number >= 1"):
        replace(DEVICE, memory=0.9)


@pytest.mark.parametrize("bandwidth", [0, -1, nan, inf])
def test_a_link_has_a_bandwidth(bandwidth: float) -> None:
    with pytest.raises(ConfigError, match=f"^link: bandwidth is {bandwidth}, expected bytes a second, a finite number > 0"):
        Link(bandwidth, 0)


@pytest.mark.parametrize("latency", [-1, nan, inf])
def test_a_link_takes_a_time(latency: float) -> None:
    with pytest.raises(ConfigError, match=f"^link: latency is {latency}, expected seconds a message, a finite number >= 0"):
        Link(1, latency)


@pytest.mark.parametrize(("nodes", "devices"), [(0, 1), (1, 0), (-1, -1)])
def test_a_cluster_has_devices(nodes: int, devices: int) -> None:
    with pytest.raises(ConfigError, match="at least one node"):
        ClusterSpec("test", nodes, devices, DEVICE, LINK, LINK)
