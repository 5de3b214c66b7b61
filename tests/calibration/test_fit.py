"""Property: from rows that a cluster would give, the fit finds the links and rates of that cluster again, whatever was described."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.calibration.clusters import cluster_text, read_cluster
from alpa_hpc.calibration.fit import Point, fit_cluster, fit_line, trial_seconds
from alpa_hpc.calibration.rows import CalibrationRow
from alpa_hpc.calibration.traffic import pass_bytes
from alpa_hpc.calibration.trials import (
    QUICK_SIZES,
    CollectiveTrial,
    MessageTrial,
    Pass,
    PassTrial,
    Precision,
    ProductTrial,
    Sizes,
    Trial,
    crosses_nodes,
    mesh_axes,
    trials_of,
)
from alpa_hpc.cluster.compute import flop_rate
from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape
from alpa_hpc.errors import ConfigError, StoreError
from alpa_hpc.sharding.resharding import CollectiveKind

SIZES = Sizes(num_bytes=(1 << 10, 1 << 14, 1 << 18, 1 << 22), products=((64, 64), (256, 128)), passes=((64, 64), (256, 256)))
DESCRIBED = ClusterSpec("described", 1, 2, DeviceSpec("cpu", 1 << 30, 1.0, 1.0, 1.0, 1.0), Link(1.0, 1.0), Link(1.0, 1.0))
NOISE = 0.01  # relative, of every repeat


def rows_of(trials: Sequence[Trial], cluster: ClusterSpec, draw: random.Random) -> list[CalibrationRow]:
    def repeats(trial: Trial) -> tuple[float, ...]:
        return tuple(trial_seconds(cluster, trial) * draw.uniform(1 - NOISE, 1 + NOISE) for _ in range(5))

    return [CalibrationRow(trial, repeats(trial), cluster.num_devices, "host", 1, 1.0) for trial in trials]


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Links between nodes are no faster than those inside, as everywhere."""
    nodes, devices = draw(st.sampled_from([(1, 2), (1, 4), (1, 6), (2, 1), (2, 2), (2, 4), (3, 2)]))

    def power(low: float, high: float) -> float:
        return 10 ** draw(st.floats(low, high))

    bandwidth = power(8, 11)
    device = DeviceSpec("cpu", 1 << 30, power(9, 14), power(9, 14), power(9, 12), draw(st.floats(0.1, 1)))
    return ClusterSpec("true", nodes, devices, device, Link(bandwidth, power(-6, -4)), Link(bandwidth * power(-2, 0), power(-6, -3)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(clusters())
def test_configs_of_clusters_come_back(cluster: ClusterSpec) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(cluster_text(cluster, "measured somewhere"))
        assert read_cluster(path) == cluster


WRONG_LINES = [
    *("num_nodes: 0", "more: 1", "device: 3", "intra_node: {bandwidth: fast, latency: 1}", "name: [", "\0"),
    *("intra_node: {bandwidth: .nan, latency: 1}", "intra_node: {bandwidth: 1, latency: .inf}", "more: 2001-99-99", "[" * 5000),
    *("num_nodes: 1.5", "num_nodes: true", "devices_per_node: 2.0", "name: 7", "name: [a]"),
]


@pytest.mark.parametrize("line", WRONG_LINES)
def test_configs_that_are_none_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    text = cluster_text(DESCRIBED, "measured somewhere")
    kept = [one for one in text.splitlines() if not one.startswith(line.partition(":")[0])]
    path.write_text("\n".join((*kept, line)))
    with pytest.raises(ConfigError, match=r"cluster\.yaml is not the config of a cluster .*calibrate again"):
        read_cluster(path)


SEEN: Counter[str] = Counter()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(clusters(), st.integers(0, 2**32))
def check_the_fit_finds_a_cluster_again(true: ClusterSpec, seed: int) -> None:
    described = replace(DESCRIBED, num_nodes=true.num_nodes, devices_per_node=true.devices_per_node)
    rows = rows_of(trials_of(described, SIZES), true, random.Random(seed))
    fit = fit_cluster(described, rows, "fitted")
    found = fit.cluster
    assert (found.name, found.num_nodes, found.devices_per_node) == ("fitted", true.num_nodes, true.devices_per_node)
    for precision in Precision:
        assert flop_rate(found.device, precision.itemsize) == pytest.approx(flop_rate(true.device, precision.itemsize), rel=0.02)
    assert found.device.memory_bandwidth == pytest.approx(true.device.memory_bandwidth, rel=0.02)
    assert found.device.memory == described.device.memory
    if true.num_nodes > 1:
        check_link(found.inter_node, true.inter_node, "between")
    else:
        assert found.inter_node == described.inter_node, "what nothing went over stays as it was described"
    if true.devices_per_node > 1:
        check_link(found.intra_node, true.intra_node, "inside")
    else:
        assert found.intra_node == found.inter_node, "a lone device's path is its node's"
    assert all(0.9 < one.least <= one.middle <= one.largest < 1.1 for one in fit.agreement)


def check_link(found: Link, true: Link, name: str) -> None:
    SEEN[name] += 1
    assert found.bandwidth == pytest.approx(true.bandwidth, rel=0.05)
    assert found.latency == pytest.approx(true.latency, rel=0.05, abs=0.05 * SIZES.num_bytes[0] / true.bandwidth)


def test_the_fit_finds_a_cluster_again() -> None:
    check_the_fit_finds_a_cluster_again()
    assert min(SEEN["inside"], SEEN["between"]) > 30, SEEN


def test_no_other_line_explains_scattered_rows_better() -> None:
    draw, at_zero = random.Random(0), 0
    for _ in range(200):
        truth = (10 ** draw.uniform(-10, -8), 10 ** draw.uniform(-6, -3) * draw.choice((0, 1)))
        sizes = [(2.0 ** draw.randint(10, 24), 1.0) for _ in range(12)]
        points = [(a, b, (a * truth[0] + b * truth[1]) * math.exp(draw.gauss(0, 0.3))) for a, b in sizes]
        x, y = fit_line(points)
        at_zero += y == 0
        least = squares(points, x, y)
        for step in (1e-3, 1e-2, 0.1):
            for dx, dy in ((step, 0), (-step, 0), (0, step), (0, -step)):
                assert squares(points, x * (1 + dx), max(0.0, y + dy * (y or x))) >= least * (1 - 1e-9)
    assert 20 < at_zero < 180, at_zero


def squares(points: Sequence[Point], x: float, y: float) -> float:
    return sum(math.log((a * x + b * y) / t) ** 2 for a, b, t in points)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_collectives_by_hand(size: int) -> None:
    """The ring's bytes and the tree's rounds, written down once more: the fit shall not only agree with itself."""
    bandwidth, latency, sizes, draw = 3e8, 7e-5, (1 << 12, 1 << 16, 1 << 20), random.Random(size)
    rounds, share = math.ceil(math.log2(size)), (size - 1) / size
    parts = {
        CollectiveKind.ALL_GATHER: (share, rounds),
        CollectiveKind.REDUCE_SCATTER: (share, rounds),
        CollectiveKind.ALL_REDUCE: (2 * share, 2 * rounds),
        CollectiveKind.ALL_TO_ALL: (share / size, rounds),
    }
    rows: list[CalibrationRow] = []
    for kind, (moved, times) in parts.items():
        for num_bytes in sizes:
            seconds = moved * num_bytes / bandwidth + times * latency
            trial = CollectiveTrial(kind, MeshShape(size, 1), 0, 0, num_bytes)
            rows.append(CalibrationRow(trial, (seconds, seconds * (1 + 1e-6)), size, "host", 1, 1.0))
    messages = [MessageTrial((0,), (1,), num_bytes) for num_bytes in sizes]
    rows += [CalibrationRow(one, (one.num_bytes / bandwidth + latency,), size, "host", 1, 1.0) for one in messages]
    rows += rows_of(own_work(), DESCRIBED, draw)
    link = fit_cluster(replace(DESCRIBED, devices_per_node=size), rows, "fitted").cluster.intra_node
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert link.latency == pytest.approx(latency, rel=1e-3)


def own_work() -> list[Trial]:
    return [trial for trial in trials_of(DESCRIBED, SIZES) if isinstance(trial, ProductTrial | PassTrial)]


def test_latency_is_never_negative_and_small_messages_alone_are_refused() -> None:
    trials = [MessageTrial((0,), (1,), num_bytes) for num_bytes in (1 << 10, 1 << 20)]
    own = rows_of(own_work(), DESCRIBED, random.Random(0))

    def fitted(*seconds: float) -> Link:
        rows = [CalibrationRow(trial, (second,), 2, "host", 1, 1.0) for trial, second in zip(trials, seconds, strict=True)]
        return fit_cluster(DESCRIBED, [*rows, *own], "fitted").cluster.intra_node

    assert fitted(1e-8, 1e-3).latency == 0.0, "the line through both would begin below zero"
    with pytest.raises(StoreError, match="large primitives took no longer"):
        fitted(1e-3, 1e-4)
    with pytest.raises(StoreError, match="no rows of bfloat16"):
        fit_cluster(DESCRIBED, [row for row in own if getattr(row.trial, "precision", None) is not Precision.BITS_16], "fitted")


def test_bytes_of_passes_are_those_of_models() -> None:
    """Elementwise results are written once, reductions read what they reduce: `sharding.equation_work`."""
    elements, rows = 64 * 128, 64
    found = {kind: pass_bytes(PassTrial(kind, rows, 128)) / 4 for kind in Pass}
    assert found[Pass.ADD] == elements
    assert found[Pass.GELU] == 2 * elements, "its result and the gradient"
    assert found[Pass.ADAM] == 3 * elements
    assert found[Pass.SOFTMAX] > 4 * elements, "besides, a maximum and sums read it"


@pytest.mark.parametrize("num_devices", [1, 2, 6, 8, 12])
def test_every_group_size_is_tried_beside_and_across_neighbours(num_devices: int) -> None:
    axes = mesh_axes(num_devices)
    divisors = [size for size in range(2, num_devices + 1) if num_devices % size == 0]
    apart = sorted(shape.rows for shape, axis in axes if axis == 0)
    beside = sorted(shape.cols for shape, axis in axes if axis == 1)
    assert apart == divisors
    assert beside == [size for size in divisors if size < num_devices]


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 1), (2, 4), (3, 6)])
def test_trials_divide_and_every_kind_of_path_is_used(layout: tuple[int, int]) -> None:
    cluster = replace(DESCRIBED, num_nodes=layout[0], devices_per_node=layout[1])
    talks = [one for one in trials_of(cluster, QUICK_SIZES) if isinstance(one, CollectiveTrial | MessageTrial)]
    for kind in (CollectiveTrial, MessageTrial):
        crossing = {crosses_nodes(cluster, one) for one in talks if isinstance(one, kind)}
        assert crossing == paths(layout)
    for one in talks:
        if isinstance(one, CollectiveTrial):
            size = one.shape.sizes[one.axis]
            assert [length % size for length in one.matrix] == [0, 0]
            assert 4 * math.prod(one.matrix) == one.num_bytes
        else:
            ranks = (*one.senders, *one.receivers)
            assert len(set(ranks)) == len(ranks), "nobody is in two pairs"
            assert max(ranks) < cluster.num_devices


def paths(layout: tuple[int, int]) -> set[bool]:
    return ({False} if layout[1] > 1 else set()) | ({True} if layout[0] > 1 else set())
