"""(Link, group size, bytes) -> seconds of one collective: the alpha-beta model (paper, section 4.1).

`num_bytes` is always the FULL tensor of the group, the gathered side: each of the n devices holds num_bytes / n of it
where it is split. The bandwidth term is the ring's, which is optimal; the latency term counts ceil(log2 n) rounds, since
libraries switch to trees and recursive doubling where latency decides. A group of one device costs nothing. `num_bytes`
may be a float or a numpy array; the seconds have its form.
"""

from math import ceil, log2
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from alpa_hpc.cluster.hardware import Link

FloatArray = npt.NDArray[np.float64]
Bytes = TypeVar("Bytes", float, FloatArray)


def all_reduce(link: Link, num_devices: int, num_bytes: Bytes) -> Bytes:
    """Seconds to sum a tensor of `num_bytes` that each device holds whole: a reduce-scatter, then an all-gather."""
    return reduce_scatter(link, num_devices, num_bytes) + all_gather(link, num_devices, num_bytes)


def all_gather(link: Link, num_devices: int, num_bytes: Bytes) -> Bytes:
    """Seconds until each device holds all `num_bytes` of a tensor that was split: (n - 1) / n of it enters each device."""
    return num_bytes * ((num_devices - 1) / num_devices / link.bandwidth) + _rounds(num_devices) * link.latency


def reduce_scatter(link: Link, num_devices: int, num_bytes: Bytes) -> Bytes:
    """Seconds until each device holds its tile of the sum of tensors of `num_bytes`: the all-gather run backwards."""
    return num_bytes * ((num_devices - 1) / num_devices / link.bandwidth) + _rounds(num_devices) * link.latency


def all_to_all(link: Link, num_devices: int, num_bytes: Bytes) -> Bytes:
    """Seconds to move a split of `num_bytes` from one dim to another: (n - 1) / n of each tile leaves its device.

    `link` is one of a mesh's `exchange_links`: pairs share network cards otherwise than rings do.
    """
    return num_bytes * ((num_devices - 1) / num_devices**2 / link.bandwidth) + _rounds(num_devices) * link.latency


def permute(link: Link, num_devices: int, num_bytes: Bytes) -> Bytes:
    """Seconds for each device to hand its tile, num_bytes / n, to one other device of the group."""
    if num_devices == 1:
        return num_bytes * 0.0
    return point_to_point(link, num_bytes * (1 / num_devices))


def point_to_point(link: Link, num_bytes: Bytes) -> Bytes:
    """Seconds for `num_bytes` to go from one end of `link` to the other."""
    return num_bytes * (1 / link.bandwidth) + link.latency


def _rounds(num_devices: int) -> int:
    assert num_devices >= 1, f"a group needs at least one device, found {num_devices}"
    return ceil(log2(num_devices))
