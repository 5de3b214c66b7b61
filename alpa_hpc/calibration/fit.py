"""(described ClusterSpec, CalibrationRows) -> Fit: the cluster with links and rates as measured, and how well they explain the rows.

The cost model is linear in what is fitted: seconds = bytes-like * (1 / bandwidth) + rounds * latency, or work * (1 / rate). So its
coefficients are asked of the cost model itself, at unit constants, and the fit is its inverse: least squares of log (predicted / measured),
with no negative constant. A small and a large primitive count alike, and so do half and double the seconds: of errors relative to what was
measured the first could be 1/2 and the second 1, and where rows scatter the fit would end far below them. A device's own work is timed as
a program, whose start has a constant of its own that no task's seconds have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import assert_never

import numpy as np
import numpy.typing as npt

from alpa_hpc.calibration.rows import CalibrationRow
from alpa_hpc.calibration.traffic import pass_bytes, product_flop
from alpa_hpc.calibration.trials import CollectiveTrial, MessageTrial, PassTrial, Precision, ProductTrial, Trial, crosses_nodes
from alpa_hpc.cluster.compute import compute_seconds
from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.errors import StoreError
from alpa_hpc.sharding.resharding import AllGather, AllReduce, AllToAll, CollectiveKind, ReduceScatter, Step, step_seconds
from alpa_hpc.simulate.costs import transfer_seconds

_NO_BOUND = 1e300  # bytes a second, at which no number of bytes takes a time that counts
_FREE = Link(_NO_BOUND, 0.0)
_PER_BYTE = Link(1.0, 0.0)
_PER_ROUND = Link(_NO_BOUND, 1.0)
REWEIGHINGS = 100  # what the last ones still change is below the noise by far
FloatArray = npt.NDArray[np.float64]
Point = tuple[float, float, float]  # (a, b, t) of a x + b y = t


@dataclass(frozen=True, slots=True)
class Agreement:
    """Predicted by measured seconds of the rows of one label: least, median and largest."""

    label: str
    num_rows: int
    least: float
    middle: float
    largest: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cluster, and how it agrees with what was measured.

    `unrest` is how far the middle half of a primitive's repeats spreads, relative to their median: the median over all primitives.
    """

    cluster: ClusterSpec
    agreement: tuple[Agreement, ...]
    unrest: float


def fit_cluster(described: ClusterSpec, rows: Sequence[CalibrationRow], name: str) -> Fit:
    """The cluster called `name`; memory, and links that nothing went over, stay as described. A lone device's path is its node's.

    Raises StoreError where rows do not suffice, such as products in one precision only.
    """
    talks = [row for row in rows if isinstance(row.trial, CollectiveTrial | MessageTrial)]
    inter = fit_link(described, [row for row in talks if _crosses(described, row.trial)], described.inter_node)
    intra = fit_link(described, [row for row in talks if not _crosses(described, row.trial)], described.intra_node)
    is_lone = described.devices_per_node == 1
    device = fit_device(described.device, rows)
    cluster = replace(described, name=name, device=device, intra_node=inter if is_lone else intra, inter_node=inter)
    return Fit(cluster, agreement(cluster, rows), median(_unrest(row) for row in rows))


def _unrest(row: CalibrationRow) -> float:
    low, high = np.quantile(row.seconds, (0.25, 0.75))
    return float(high - low) / row.median


def fit_device(described: DeviceSpec, rows: Sequence[CalibrationRow]) -> DeviceSpec:
    """The device with measured rates: `flops_*` are the highest that were seen, `efficiency` is what products reach on the whole of it.

    One efficiency holds for both precisions, that of 32 bits; the 16-bit peak is put where it gives what 16-bit products reach.
    """
    passes = [(pass_bytes(row.trial), 1.0, row.median) for row in rows if isinstance(row.trial, PassTrial)]
    products = {precision: _product_points(rows, precision) for precision in Precision}
    lacking = [name for name, points in (("passes", passes), *((key.value, points) for key, points in products.items())) if not points]
    if lacking:
        raise StoreError(f"the calibration has no rows of {', '.join(lacking)}: measure again")
    reached = {precision: 1 / fit_line(points)[0] for precision, points in products.items()}
    best = max(reached[Precision.BITS_32], *(flop / seconds for flop, _, seconds in products[Precision.BITS_32]))
    efficiency = reached[Precision.BITS_32] / best
    return replace(
        described,
        flops_32bit=best,
        flops_16bit=reached[Precision.BITS_16] / efficiency,
        memory_bandwidth=1 / fit_line(passes)[0],
        efficiency=efficiency,
    )


def _product_points(rows: Sequence[CalibrationRow], precision: Precision) -> list[Point]:
    trials = ((row.trial, row.median) for row in rows)
    return [
        (float(product_flop(trial)), 1.0, seconds)
        for trial, seconds in trials
        if isinstance(trial, ProductTrial) and trial.precision is precision
    ]


def fit_link(described: ClusterSpec, rows: Sequence[CalibrationRow], otherwise: Link) -> Link:
    """The bandwidth and latency that explain rows which all use this one kind of path; `otherwise` where there are none."""
    if not rows:
        return otherwise
    points = [(*link_coefficients(described, row.trial), row.median) for row in rows]
    per_byte, per_round = fit_line(points)
    return Link(1 / per_byte, per_round)


def link_coefficients(described: ClusterSpec, trial: Trial) -> tuple[float, float]:
    """What the cost model multiplies 1 / bandwidth and latency with, of the path that the trial goes over."""
    crosses = _crosses(described, trial)

    def at(link: Link) -> float:
        paths = (_FREE, link) if crosses else (link, _FREE)
        return talk_seconds(replace(described, intra_node=paths[0], inter_node=paths[1]), trial)

    return at(_PER_BYTE), at(_PER_ROUND)


def fit_line(points: Sequence[Point]) -> tuple[float, float]:
    """Give the (x, y), x > 0 and y >= 0, that minimise sum log^2 ((a x + b y) / t) over points (a, b, t).

    Least squares again and again, of errors weighed so that their sum has its minimum where that one has: log (p / t) / ((p - t) p).
    """
    a, b, t = np.array(points).T
    x, y = _least_squares(a, b, t, 1 / t)
    for _ in range(REWEIGHINGS):
        if x <= 0:  # all were small, or something else took the time
            raise StoreError("large primitives took no longer than small ones: measure larger ones, or on a quieter machine")
        p = a * x + b * y
        off = (p - t) / t
        weights = np.where(off == 0, 1.0, np.log1p(off) / np.where(off == 0, 1.0, off)) / (t * p)
        x, y = _least_squares(a, b, t, np.sqrt(weights))
    return x, y


def _least_squares(a: FloatArray, b: FloatArray, t: FloatArray, scale: FloatArray) -> tuple[float, float]:
    """Give the (x, y), y >= 0, that minimise sum (scale (a x + b y - t))^2."""
    x, y = np.linalg.lstsq(np.stack((a, b), axis=1) * scale[:, None], t * scale, rcond=None)[0]
    return (float(x), float(y)) if y >= 0 else (float((a * t * scale**2).sum() / (a * scale).dot(a * scale)), 0.0)


def agreement(cluster: ClusterSpec, rows: Sequence[CalibrationRow]) -> tuple[Agreement, ...]:
    """How the cost model at the cluster's constants agrees with the rows, label by label."""

    def label(row: CalibrationRow) -> str:
        return row.trial.label

    found: list[Agreement] = []
    for name, group in groupby(sorted(rows, key=label), key=label):
        ratios = [trial_seconds(cluster, row.trial) / row.median for row in group]
        found.append(Agreement(name, len(ratios), min(ratios), median(ratios), max(ratios)))
    return tuple(found)


def trial_seconds(cluster: ClusterSpec, trial: Trial) -> float:
    """Seconds of a trial's primitive by the cost model."""
    match trial:
        case CollectiveTrial() | MessageTrial():
            return talk_seconds(cluster, trial)
        case ProductTrial():
            return compute_seconds(cluster.device, product_flop(trial), 0.0, trial.precision.itemsize)
        case PassTrial():
            return compute_seconds(cluster.device, 0.0, pass_bytes(trial), Precision.BITS_32.itemsize)
        case _:
            assert_never(trial)


def talk_seconds(cluster: ClusterSpec, trial: Trial) -> float:
    """Seconds of a collective or a message by the cost model, as it prices those of plans."""
    match trial:
        case CollectiveTrial():
            whole = Submesh(cluster.num_nodes, cluster.devices_per_node)
            step, pieces = _STEPS[trial.kind](trial.axis), trial.shape.sizes[trial.axis]
            local_bytes = trial.num_bytes / (1 if isinstance(step, AllReduce | ReduceScatter) else pieces)
            return step_seconds(step, logical_mesh(cluster, whole, trial.shape), local_bytes)
        case MessageTrial() if _crosses(cluster, trial):
            return transfer_seconds(cluster, trial.senders, trial.receivers, trial.num_bytes * len(trial.senders))
        case MessageTrial():
            return transfer_seconds(cluster, trial.senders[:1], trial.receivers[:1], trial.num_bytes)
        case ProductTrial() | PassTrial():
            raise AssertionError(f"{trial.label} talks to nobody")
        case _:
            assert_never(trial)


_STEPS: Mapping[CollectiveKind, Callable[[int], Step]] = {
    CollectiveKind.ALL_REDUCE: AllReduce,
    CollectiveKind.ALL_GATHER: lambda axis: AllGather(axis, 0),
    CollectiveKind.REDUCE_SCATTER: lambda axis: ReduceScatter(axis, 0),
    CollectiveKind.ALL_TO_ALL: lambda axis: AllToAll(axis, 0, 1),
}


def _crosses(cluster: ClusterSpec, trial: Trial) -> bool:
    return isinstance(trial, CollectiveTrial | MessageTrial) and crosses_nodes(cluster, trial)
