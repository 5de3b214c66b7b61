"""Property: a calibration comes back from its shard as it was written; what is damaged counts as missing, what is foreign is refused."""

import math
import random
from dataclasses import replace
from pathlib import Path

import h5py
import pytest

from alpa_hpc.calibration.request import (
    CalibrationRequest,
    calibration_key,
    is_calibration,
    request_from_json,
    request_to_json,
)
from alpa_hpc.calibration.rows import Calibration, CalibrationRow, newest_calibration, write_calibration
from alpa_hpc.calibration.trials import QUICK_SIZES, trials_of
from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
from alpa_hpc.errors import ConfigError, StoreError

CLUSTER = ClusterSpec("demo", 2, 2, DeviceSpec("cpu", 1 << 30, 1e9, 1e9, 1e9, 1.0), Link(1e9, 1e-5), Link(1e8, 1e-4))
REQUEST = CalibrationRequest(QUICK_SIZES, 3)
DRAW = random.Random(0)


def calibration(key: str = "k", time: float = 1.0) -> Calibration:
    rows = (
        CalibrationRow(trial, tuple(DRAW.uniform(1e-6, 1) for _ in range(3)), 4, "host", 7, time + number)
        for number, trial in enumerate(trials_of(CLUSTER, QUICK_SIZES))
    )
    return Calibration(key, "demo", "node1,node2", "jax 1, jaxlib 2", tuple(rows))


def test_the_newest_of_a_key_comes_back_whole(tmp_path: Path) -> None:
    old, new, other = calibration(), calibration(time=1000.0), calibration("other", time=2000.0)
    for one in (new, other, old):
        write_calibration(tmp_path, one)
    assert newest_calibration(tmp_path, "k") == new
    assert newest_calibration(tmp_path, "other") == other
    assert newest_calibration(tmp_path, "unknown") is None
    assert newest_calibration(tmp_path / "absent", "k") is None


def test_damaged_shards_count_as_missing_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    path = write_calibration(tmp_path, calibration())
    whole = path.read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - len(whole) // 10):
        path.write_bytes(whole[:length] + bytes(len(whole) - length))
        assert newest_calibration(tmp_path, "k") is None, f"zeros from byte {length} of {len(whole)} on"
    path.write_bytes(whole)
    path.write_bytes(whole[:50] + b"?" + whole[51:])
    assert newest_calibration(tmp_path, "k") is None, "its bytes are not those that its name tells of"
    path = path.write_bytes(whole) and path.rename(path.with_name("shard-node7-17-abc.h5"))  # named as by older versions
    with h5py.File(path, "r+") as file:
        group = file["0003"]
        assert isinstance(group, h5py.Group)
        group.attrs["num_ranks"] = 5
    assert newest_calibration(tmp_path, "k") is None, "its content does not match its checksum"
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 99
    with pytest.raises(StoreError, match="99"):
        newest_calibration(tmp_path, "k")


def test_attributes_say_what_was_measured_by_whom(tmp_path: Path) -> None:
    with h5py.File(write_calibration(tmp_path, calibration())) as file:
        assert {"format", "version", "key", "cluster", "nodes", "versions", "unit", "sha256"} <= set(file.attrs)
        groups = [group for group in file.values() if isinstance(group, h5py.Group)]
        assert len(groups) == len(trials_of(CLUSTER, QUICK_SIZES))
        for group in groups:
            assert {"label", "primitive", "num_ranks", "host", "pid", "time_unix", "median_seconds", "relative_spread"} <= set(group.attrs)
            assert group["seconds"].attrs["unit"] == "seconds"


@pytest.mark.parametrize("seconds", [(), (0.0,), (-1.0,), (math.nan,), (math.inf, 1.0)])
def test_rows_without_real_seconds_are_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        replace(calibration().rows[0], seconds=seconds)


def test_requests_go_through_their_file() -> None:
    document = request_to_json(REQUEST, "key7")
    assert is_calibration(document)
    assert not is_calibration([{"key": "a"}])
    assert request_from_json(document, "here") == (REQUEST, "key7")
    with pytest.raises(StoreError, match="here lacks or garbles"):
        request_from_json({"calibration": {"repeats": 3}}, "here")
    with pytest.raises(ConfigError, match="at least 2"):
        CalibrationRequest(QUICK_SIZES, 1)


def test_the_key_knows_what_is_measured_and_nothing_that_is_claimed() -> None:
    def key(cluster: ClusterSpec = CLUSTER, request: CalibrationRequest = REQUEST, versions: str = "v", flags: str = "") -> str:
        return calibration_key(cluster, request, versions, flags)

    faster = replace(CLUSTER, intra_node=Link(1e12, 0.0), device=replace(CLUSTER.device, memory_bandwidth=1e15))
    assert key(faster) == key()
    others = [
        key(replace(CLUSTER, name="else")),
        key(replace(CLUSTER, num_nodes=1)),
        key(replace(CLUSTER, devices_per_node=4)),
        key(replace(CLUSTER, device=replace(CLUSTER.device, kind="gpu"))),
        key(request=replace(REQUEST, repeats=4)),
        key(versions="w"),
        key(flags="--xla_a=b"),
    ]
    assert len({key(), *others}) == len(others) + 1
