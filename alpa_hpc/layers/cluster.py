"""Forward equations as numbers -> where to cut them into layers (paper, Eq. 6).

    minimise over cuts  max over layers of C(layer),   C(i..k) = bytes that equations i..k read of what earlier equations made
    subject to          FLOP(layer) <= (1 + imbalance) * max(total / num_layers, largest equation)
                        FLOP(layer) >= total / num_layers / (1 + imbalance), where that can be met

The lower bound is not in the paper: without it the cheapest last layer is the last few scalars of the loss. Ties: smaller sum of C; then,
among sums within 0.1 %, equal middle layers if there are such (a repeated block is cut at one place of its pattern, the same in a deeper
model: `layers.repeats`); then smaller variance of FLOP.

All of it is exact, in O(L (n + reads) log n) for n equations: tens of thousands take a second or two.
"""

from collections.abc import Sequence

import numpy as np

from alpa_hpc.errors import TraceError
from alpa_hpc.kernels import Floats
from alpa_hpc.layers.blocks import find_block
from alpa_hpc.layers.bottleneck import Limits, flop_limits, smallest_bottleneck, stops_within
from alpa_hpc.layers.received import Crossing, Reads, flat_reads
from alpa_hpc.layers.repeats import Repeats, equal_middle
from alpa_hpc.layers.smallest_sum import smallest_sum

_SAME_SUM = 1e-3  # a share; a PRNG seed that crosses or not must not decide against equal layers
_FEWEST_REPEATS = 2


def cluster_equations(
    flops: Sequence[float], crossings: Sequence[Crossing], patterns: Sequence[object], *, num_layers: int, imbalance: float
) -> tuple[int, ...]:
    """Starts of layers 1.. (num_layers - 1 increasing positions), by the rule above; `patterns` are equal for equations that repeat.

    Raises TraceError if there are too few equations, or no cut keeps the layers balanced.
    """
    work = np.asarray(flops, dtype=np.float64)
    check_num_layers(len(work), num_layers)
    if num_layers == 1:
        return ()
    reads = flat_reads(len(work), crossings)
    limits, most_bytes = _limits(reads, work, num_layers, imbalance)
    stops = stops_within(reads, limits, most_bytes)
    average = max(float(work.sum()) / num_layers, 1.0)
    before = _before(work) / average
    cuts, total = smallest_sum(reads, limits, stops, before)
    times = num_layers - 2
    if times >= _FEWEST_REPEATS:
        numbers = {pattern: number for number, pattern in enumerate(dict.fromkeys(patterns))}
        codes = np.array([numbers[pattern] for pattern in patterns])
        block = find_block(flops, patterns)
        repeats = Repeats(reads, limits, stops, codes, block.places(len(work)), before)
        equal = equal_middle(repeats, times, float(total) * (1 + _SAME_SUM), block)
        if equal:
            return equal
    return tuple(cuts.tolist())


def _limits(reads: Reads, work: Floats, num_layers: int, imbalance: float) -> tuple[Limits, int]:
    """The FLOP limits that can be met, and the smallest largest C under them."""
    average = float(work.sum()) / num_layers
    most = (1 + imbalance) * max(average, float(work.max())) if work.any() else 0.0  # any number of times nothing is nothing
    for least in (average / (1 + imbalance), 0.0):
        limits = flop_limits(_before(work), num_layers, least, most)
        most_bytes = smallest_bottleneck(reads, limits)
        if most_bytes >= 0:
            return limits, int(most_bytes)
    raise TraceError(
        f"no cut into {num_layers} layers keeps each below {1 + imbalance:g} times the average FLOP. "
        "Choose fewer layers or a larger imbalance."
    )


def _before(work: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(work)])


def equal_counts(num_equations: int, num_layers: int) -> tuple[int, ...]:
    """Starts of layers 1.. where each has as many equations, to within one. Raises TraceError if there are too few equations."""
    check_num_layers(num_equations, num_layers)
    return tuple(index * num_equations // num_layers for index in range(1, num_layers))


def check_num_layers(num_equations: int, num_layers: int) -> None:
    """Raise TraceError unless each of the layers can have an equation."""
    if not 1 <= num_layers <= max(1, num_equations):
        raise TraceError(
            f"{num_equations} forward equations cannot be cut into {num_layers} layers. Choose between 1 and {num_equations} layers."
        )
