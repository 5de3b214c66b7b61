"""Hardware that cannot be is refused, whatever it is that is wrong."""

from dataclasses import replace
from math import inf, nan

import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
from alpa_hpc.errors import ConfigError

DEVICE = DeviceSpec("test", 2**30, 1e12, 2e12, 1e11, 0.5)
LINK = Link(1e9, 1e-5)


@pytest.mark.parametrize("wrong", [0, -1, nan, inf, -inf])
@pytest.mark.parametrize("field", ["memory", "flops_32bit", "flops_16bit", "memory_bandwidth", "efficiency"])
def test_a_device_has_real_memory_and_rates(field: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match="device 'test' needs positive, finite|DeviceSpec: memory is .* expected a whole number"):
        replace(DEVICE, **{field: wrong})


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (-1, 0), (nan, 0), (1, -1), (1, nan), (1, inf)])
def test_a_link_takes_a_time(bandwidth: float, latency: float) -> None:
    with pytest.raises(ConfigError, match="link needs bandwidth > 0 and a finite latency >= 0"):
        Link(bandwidth, latency)


@pytest.mark.parametrize(("nodes", "devices"), [(0, 1), (1, 0), (-1, -1)])
def test_a_cluster_has_devices(nodes: int, devices: int) -> None:
    with pytest.raises(ConfigError, match="at least one node"):
        ClusterSpec("test", nodes, devices, DEVICE, LINK, LINK)
