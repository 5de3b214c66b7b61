"""Seconds that XLA believes in when it puts kernels for GPUs in order, whatever the cluster: those of H100s, eight a node.

Fitted by eye to what its estimators say of themselves (`TF_CPP_VMODULE=sol_latency_estimator=10`): of products of 16 and 32 bits from
2048 x 64 x 4096 to 32768 x 1024 x 4096; of collectives on two nodes, of GPT, MoE and Wide-ResNet; on one node of collectives of 1 and 64
MiB, among two, four and eight devices. Permutes across nodes are assumed to go with the others. They decide what waits for what, so how
much lies in memory, and nothing else: the cost model has a cluster's own rates.
"""

from dataclasses import dataclass, replace

from alpa_hpc.sharding.resharding import CollectiveKind, Lane

MEMORY_BANDWIDTH = 3.35e12  # bytes/s
PRODUCT_RATES = {"bfloat16": 8e14, "float32": 4e14}  # FLOP/s by dtype, of products that sum over LONG_SUM or more
OTHER_PRODUCT_RATE = 1e14  # of what XLA's table of measured products has not, such as float16
LONG_SUM = 4096
CONVOLUTION = 1e-5  # of any

_IN_NODE = {
    CollectiveKind.ALL_REDUCE: {2: (1.6e-5, 2.1e11), 4: (3.8e-5, 1.9e11), 8: (4.7e-5, 2e11)},
    CollectiveKind.ALL_GATHER: {2: (1.5e-5, 4.6e11), 4: (1.8e-5, 3.8e11), 8: (2.8e-5, 3.6e11)},
    CollectiveKind.REDUCE_SCATTER: {2: (1.2e-5, 3.2e11), 4: (2.6e-5, 3.4e11), 8: (1.7e-5, 3.3e11)},
    CollectiveKind.ALL_TO_ALL: {2: (3.4e-5, 4.9e11), 4: (3.1e-5, 3.3e11), 8: (5.2e-5, 4e11)},
    CollectiveKind.COLLECTIVE_PERMUTE: {2: (2.4e-5, 1.2e11), 4: (2.2e-5, 7.8e10), 8: (2.2e-5, 7.8e10)},
}  # by how many devices exchange it: seconds of any, and bytes/s of the larger side
_ACROSS_NODES = {
    CollectiveKind.ALL_REDUCE: (1.8e-4, 1e11),
    CollectiveKind.ALL_GATHER: (1.4e-4, 2e11),
    CollectiveKind.REDUCE_SCATTER: (1.4e-4, 2e11),
    CollectiveKind.ALL_TO_ALL: (3.4e-4, 3.3e10),
    CollectiveKind.COLLECTIVE_PERMUTE: (1.4e-4, 2e11),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """What is under way between two kernels: bytes a device of the larger side, and of what arrives.

    devices: how many exchange it with each other
    across:  whether they are on several nodes
    """

    lane: Lane
    itemsize: int
    moved: float
    arriving: float
    devices: int
    across: bool

    def with_other(self, other: "Collective | None") -> "Collective":
        """Both as one."""
        if other is None:
            return self
        return replace(self, moved=self.moved + other.moved, arriving=self.arriving + other.arriving)


def streaming_seconds(num_bytes: float) -> float:
    """Of a kernel that reads and writes so many bytes."""
    return num_bytes / MEMORY_BANDWIDTH


def product_seconds(flop: float, elements: float, num_bytes: float, dtype: str) -> float:
    """Of a product of matrices of this dtype that makes so many elements, and reads so many bytes; what it writes counts for nothing.

    It has the fewer FLOP/s the shorter its sums are.
    """
    summed = flop / max(2 * elements, 1.0)
    rate = PRODUCT_RATES.get(dtype, OTHER_PRODUCT_RATE) * (min(max(summed, 1.0), LONG_SUM) / LONG_SUM) ** 0.25
    return max(flop / rate, streaming_seconds(num_bytes))


def collective_seconds(collective: Collective) -> float:
    """From the start of a collective to its end."""
    kind = collective.lane.kind
    latency, rate = _ACROSS_NODES[kind] if collective.across else _IN_NODE[kind][_measured(collective.devices)]
    return latency + collective.moved / rate


def _measured(devices: int) -> int:
    """The number of devices whose times are known, and hold for this one."""
    return next((known for known in (2, 4) if devices <= known), 8)
