"""CalibrationRows <-> immutable HDF5 shards beside the cost store: what a calibration measured, whole, for `h5dump` and for the next fit.

A calibration is one shard, and the newest of equal key counts. A shard of ours that is damaged counts as missing; a file that is not ours
is refused. One group a row, in the order of measurement; attributes are the trial's own fields.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from alpa_hpc.calibration.trials import CollectiveTrial, MessageTrial, Pass, PassTrial, Precision, ProductTrial, Trial
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.errors import StoreError
from alpa_hpc.profiling.shards import check_signature, is_changed, read_files, write_file
from alpa_hpc.profiling.store import median_seconds, relative_spread
from alpa_hpc.sharding.resharding import CollectiveKind

FORMAT = "alpa_hpc calibration"
VERSION = 1
_KINDS: Mapping[str, type[Trial]] = {
    "collective": CollectiveTrial,
    "message": MessageTrial,
    "product": ProductTrial,
    "pass": PassTrial,
}


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """One trial: seconds of one run of its primitive for each repeat, on the slowest of `num_ranks` ranks.

    `host` and `pid` are those of the process that wrote the row.
    """

    trial: Trial
    seconds: tuple[float, ...]
    num_ranks: int
    host: str
    pid: int
    time_unix: float

    def __post_init__(self) -> None:
        if not self.seconds or not all(math.isfinite(second) and second > 0 for second in self.seconds):
            raise ValueError(f"{self.trial.label} took {self.seconds} seconds, expected a finite number > 0 for each repeat")

    @property
    def median(self) -> float:
        """Median seconds."""
        return median_seconds(self.seconds)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All rows of one calibration, of the cluster called `cluster`; `key` is what was to be measured (`profiling.keys`)."""

    key: str
    cluster: str
    nodes: str
    versions: str
    rows: tuple[CalibrationRow, ...]

    @property
    def time_unix(self) -> float:
        """When its last row was measured, in seconds since 1970."""
        return max(row.time_unix for row in self.rows)


def write_calibration(folder: Path, calibration: Calibration) -> Path:
    """Write a calibration as a new shard of `folder` and return its path; it appears whole or not at all."""
    return write_file(folder, lambda file: _fill(file, calibration))


def newest_calibration(folder: Path, key: str) -> Calibration | None:
    """The newest calibration of this key, or None. StoreError names a file that is not ours."""
    found = [one for one in read_files(folder, _read).values() if one is not None and one.key == key]
    return max(found, key=lambda one: one.time_unix, default=None)


def _fill(file: h5py.File, calibration: Calibration) -> None:
    file.attrs.update({"format": FORMAT, "version": VERSION, "sha256": _digest(calibration.rows)})
    file.attrs.update({name: getattr(calibration, name) for name in ("key", "cluster", "nodes", "versions")})
    file.attrs["unit"] = "seconds: one value a repeat; num_bytes: bytes; rows, width: numbers of elements; time_unix: seconds since 1970"
    for number, row in enumerate(calibration.rows):
        group = file.create_group(f"{number:04d}")
        group.attrs.update({"label": row.trial.label, **row_fields(row)})
        group.attrs.update({"median_seconds": row.median, "relative_spread": relative_spread(row.seconds)})
        group.create_dataset("seconds", data=np.asarray(row.seconds, np.float64)).attrs["unit"] = "seconds"


def _read(path: Path) -> Calibration | None:
    """The calibration of a shard, or None where it is damaged."""
    check_signature(path)
    if is_changed(path):
        return None
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            _check_ours(path, file)
            rows = tuple(_row(group) for _, group in sorted(file.items()))
            texts = {name: str(file.attrs[name]) for name in ("key", "cluster", "nodes", "versions")}
            digest = str(file.attrs["sha256"])
    except FileNotFoundError:
        raise
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, AttributeError):
        return None
    return Calibration(**texts, rows=rows) if digest == _digest(rows) else None


def _check_ours(path: Path, file: h5py.File) -> None:
    found = (file.attrs.get("format"), file.attrs.get("version"))
    if found != (FORMAT, VERSION):
        raise StoreError(
            f"{path} is of format and version {found}, expected {(FORMAT, VERSION)}: move it out of the folder of calibrations"
        )


def row_fields(row: CalibrationRow) -> dict[str, Any]:
    """A row but for its seconds as numbers, texts and lists of numbers."""
    kind = next(name for name, kind in _KINDS.items() if isinstance(row.trial, kind))
    trial = {field.name: _plain(getattr(row.trial, field.name)) for field in fields(row.trial)}
    return {"primitive": kind, **trial, "num_ranks": row.num_ranks, "host": row.host, "pid": row.pid, "time_unix": row.time_unix}


def _plain(value: Any) -> Any:
    match value:
        case MeshShape():
            return list(value.sizes)
        case CollectiveKind() | Pass() | Precision():
            return value.value
        case _:
            return value


def _row(group: Any) -> CalibrationRow:
    found = {name: value.tolist() if isinstance(value, np.generic | np.ndarray) else value for name, value in group.attrs.items()}
    own = {name: found[name] for name in ("num_ranks", "host", "pid", "time_unix")}
    return CalibrationRow(_trial(found), tuple(float(second) for second in group["seconds"][()]), **own)


def _trial(found: Mapping[str, Any]) -> Trial:
    match found["primitive"]:
        case "collective":
            shape = MeshShape(*found["shape"])
            return CollectiveTrial(CollectiveKind(found["kind"]), shape, found["axis"], found["dim"], found["num_bytes"])
        case "message":
            return MessageTrial(tuple(found["senders"]), tuple(found["receivers"]), found["num_bytes"])
        case "product":
            return ProductTrial(Precision(found["precision"]), found["rows"], found["width"])
        case "pass":
            return PassTrial(Pass(found["kind"]), found["rows"], found["width"])
        case other:
            raise ValueError(f"unknown primitive {other!r}")


def _digest(rows: Sequence[CalibrationRow]) -> str:
    content = [[row_fields(row), list(row.seconds)] for row in rows]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
