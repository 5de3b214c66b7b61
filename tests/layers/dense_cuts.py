"""The rule of `alpa_hpc.layers.cluster` written down plainly, by matrices with an entry a possible layer: the oracle."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from alpa_hpc.errors import TraceError
from alpa_hpc.layers.blocks import find_block
from alpa_hpc.layers.received import Crossing

Floats = NDArray[np.float64]
_SAME_SUM = 1e-3  # a share; a PRNG seed that crosses or not must not decide against equal layers


def dense_cuts(
    flops: Sequence[float], crossings: Sequence[Crossing], patterns: Sequence[object], *, num_layers: int, imbalance: float
) -> tuple[int, ...]:
    """As `cluster_equations`."""
    work = np.asarray(flops, dtype=np.float64)
    if num_layers == 1:
        return ()
    received = received_bytes(len(work), crossings)
    average = float(work.sum()) / num_layers
    for least in (average / (1 + imbalance), 0.0):
        costs = _allowed_costs(received, work, least=least, most=(1 + imbalance) * max(average, float(work.max())))
        smallest_max = _smallest_max(costs, num_layers)
        if np.isfinite(smallest_max):
            break
    if not np.isfinite(smallest_max):
        raise TraceError("no cut into layers")
    costs = np.where(costs <= smallest_max, costs, np.inf)
    cuts, smallest_sum = _smallest_sum(costs, _deviation(work, num_layers), num_layers)
    return _equal_middle_layers(costs, work, patterns, num_layers, smallest_sum) or cuts


def received_bytes(num_equations: int, crossings: Sequence[Crossing]) -> Floats:
    """C[i, k]: bytes that equations i..k-1 read of what equations before i made (0 <= i <= k <= n)."""
    size = num_equations + 2
    steps = np.zeros((size, size))
    for value in crossings:
        previous = value.producer
        for reader in sorted(set(value.readers)):
            steps[previous + 1, reader + 1] += value.size
            steps[reader + 1, reader + 1] -= value.size
            previous = reader
    return np.cumsum(np.cumsum(steps, axis=0), axis=1)[: num_equations + 1, : num_equations + 1]


def _allowed_costs(received: Floats, work: Floats, *, least: float, most: float) -> Floats:
    """C, with inf for layers that are empty or hold too little or too much work."""
    before = np.concatenate([[0.0], np.cumsum(work)])
    layer_work = before[None, :] - before[:, None]
    positions = np.arange(len(before))
    slack = 1e-9 * before[-1]
    allowed = (positions[None, :] > positions[:, None]) & (layer_work <= most + slack) & (layer_work >= least - slack)
    return np.where(allowed, received, np.inf)


def _smallest_max(costs: Floats, num_layers: int) -> float:
    best = costs[0]
    for _ in range(num_layers - 1):
        best = np.min(np.maximum(best[:, None], costs), axis=0)
    return float(best[-1])


def _deviation(work: Floats, num_layers: int) -> Floats:
    """Squared distance of each possible layer's FLOP from the average, as a share of it."""
    before = np.concatenate([[0.0], np.cumsum(work)])
    average = max(before[-1] / num_layers, 1.0)
    return ((before[None, :] - before[:, None]) / average - 1) ** 2


def _smallest_sum(costs: Floats, deviation: Floats, num_layers: int) -> tuple[tuple[int, ...], float]:
    """Cuts with the smallest (sum of C, sum of deviations): both add up, so the lexicographic programme is exact."""
    best_sum, best_deviation = costs[0], np.where(np.isfinite(costs[0]), deviation[0], np.inf)
    choices: list[NDArray[np.intp]] = []
    columns = np.arange(costs.shape[1])
    for _ in range(num_layers - 1):
        sums = best_sum[:, None] + costs
        smallest = sums.min(axis=0)
        deviations = np.where(sums <= smallest, best_deviation[:, None] + deviation, np.inf)
        choice = deviations.argmin(axis=0)
        choices.append(choice)
        best_sum, best_deviation = smallest, np.where(np.isfinite(smallest), deviations[choice, columns], np.inf)
    cuts: list[int] = []
    end = costs.shape[1] - 1
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return tuple(reversed(cuts)), float(best_sum[-1])


def _equal_middle_layers(costs: Floats, work: Floats, patterns: Sequence[object], num_layers: int, smallest_sum: float) -> tuple[int, ...]:
    """Cuts as good in (max, sum) whose middle layers repeat one pattern, best by (place in the block, variance); () if none are."""
    num_middle = num_layers - 2
    if num_middle < 2:
        return ()
    ids = {pattern: number for number, pattern in enumerate(dict.fromkeys(patterns))}
    codes = np.array([ids[pattern] for pattern in patterns])
    block = find_block(work.tolist(), patterns)
    good: list[tuple[float, float, int, tuple[int, ...]]] = []
    for length in range(1, (len(codes) - 2) // num_middle + 1):
        for start in _repeated_starts(codes, length, num_middle):
            cuts = start + length * np.arange(num_middle + 1)
            layers = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(codes)]])
            if costs[layers].sum() <= smallest_sum * (1 + _SAME_SUM):
                flop = np.add.reduceat(work, layers[0])
                spreads = [round(_spread(one), 9) for one in (_evened(flop, block.times * block.length / length), flop)]
                good.append((spreads[0], spreads[1], int(block.places(len(codes))[start]), tuple(cuts.tolist())))
    if not good:
        return ()
    place = good[[evened for evened, *_ in good].index(min(evened for evened, *_ in good))][2]
    return min((spread, number, cuts) for number, (_, spread, where, cuts) in enumerate(good) if where == place)[2]


def _evened(flop: Floats, layers_of_blocks: float) -> Floats:
    """The first layer without what all blocks together have more than as many middle layers as there are layers."""
    surplus = (layers_of_blocks - len(flop)) * flop[1:-1].mean()
    return np.concatenate([[flop[0] - surplus], flop[1:]])


def _spread(flop: Floats) -> float:
    return float(((flop / max(flop.mean(), 1.0 / len(flop)) - 1) ** 2).sum())


def _repeated_starts(codes: NDArray[np.intp], length: int, times: int) -> NDArray[np.intp]:
    """Positions >= 1 from which `length` equations occur `times` times in a row, with at least one equation after them."""
    matches = np.concatenate([[0], np.cumsum(codes[length:] == codes[:-length])])
    span = length * (times - 1)
    last = len(codes) - length * times - 1
    starts = np.arange(1, last + 1)
    return starts[matches[starts + span] - matches[starts] == span]
