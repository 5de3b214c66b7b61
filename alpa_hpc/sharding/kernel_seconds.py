"""Seconds that XLA believes in when it puts kernels for GPUs in order, whatever the cluster: those of H100s, eight a node.

Fitted by eye to what its estimators say of themselves (`TF_CPP_VMODULE=sol_latency_estimator=10`) of 16-bit products and collectives of
GPT, MoE and Wide-ResNet on one node and on two; products of 32 bits and permutes are assumed to go with them. They decide what waits for
what, so how much lies in memory, and nothing else: the cost model has a cluster's own rates.
"""

from dataclasses import dataclass, replace

from alpa_hpc.sharding.resharding import CollectiveKind, Lane

MEMORY_BANDWIDTH = 3.35e12  # bytes/s
PRODUCT_RATES = {2: 8.5e13, 4: 4.2e13}  # FLOP/s by bytes an element
CONVOLUTION = 1e-5  # of any

_IN_NODE = {
    CollectiveKind.ALL_REDUCE: (4e-5, 1.9e11),
    CollectiveKind.ALL_GATHER: (3e-5, 3.4e11),
    CollectiveKind.REDUCE_SCATTER: (3e-5, 3.4e11),
    CollectiveKind.ALL_TO_ALL: (6e-5, 6.2e11),
    CollectiveKind.COLLECTIVE_PERMUTE: (3e-5, 3.4e11),
}  # seconds of any, and bytes/s of the larger side
_ACROSS_NODES = {
    CollectiveKind.ALL_REDUCE: (1.8e-4, 1e11),
    CollectiveKind.ALL_GATHER: (1.4e-4, 2e11),
    CollectiveKind.REDUCE_SCATTER: (1.4e-4, 2e11),
    CollectiveKind.ALL_TO_ALL: (3.4e-4, 3.3e10),
    CollectiveKind.COLLECTIVE_PERMUTE: (1.4e-4, 2e11),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """What is under way between two kernels: bytes a device of the larger side and of what arrives; whether groups span nodes."""

    lane: Lane
    itemsize: int
    moved: float
    arriving: float
    across: bool

    def with_other(self, other: "Collective | None") -> "Collective":
        """Both as one."""
        if other is None:
            return self
        return replace(self, moved=self.moved + other.moved, arriving=self.arriving + other.arriving)


def streaming_seconds(num_bytes: float) -> float:
    """Of a kernel that reads and writes so many bytes."""
    return num_bytes / MEMORY_BANDWIDTH


def product_seconds(flop: float, num_bytes: float, itemsize: int) -> float:
    """Of a product of matrices with elements of `itemsize` bytes."""
    return max(flop / PRODUCT_RATES[2 if itemsize <= 2 else 4], streaming_seconds(num_bytes))  # noqa: PLR2004 - bytes of 16 bits


def collective_seconds(collective: Collective) -> float:
    """From the start of a collective to its end."""
    latency, rate = (_ACROSS_NODES if collective.across else _IN_NODE)[collective.lane.kind]
    return latency + collective.moved / rate
