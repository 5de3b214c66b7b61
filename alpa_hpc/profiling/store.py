"""Measured stages (ProfileRow) <-> a folder of immutable HDF5 shards: the cost store that concurrent tasks share.

Each task writes one shard of its own (`shards`); `compact` merges shards into one and deletes them. A shard of ours that is damaged
counts as missing (its rows are measured again) and is reported; a file that is not ours is refused. One group a row, plain attributes
with units: `h5dump` shows all of it.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from alpa_hpc.errors import StoreError
from alpa_hpc.profiling.cache import keeping
from alpa_hpc.profiling.lock import holding_lock
from alpa_hpc.profiling.shards import check_signature, clear_abandoned, is_changed, read_files, shard_paths, write_file

FORMAT = "alpa_hpc cost store"
VERSION = 2  # 2: rows say on which nodes and how many devices they were measured
READABLE_VERSIONS = (1, 2)
_REPEATED = ("seconds_forward", "seconds_backward", "seconds_update")
MOST_SHARDS = 64  # more of them are worth a compaction: each is a file to open for every reader


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One measured stage. `key` is its content (`profiling.keys`), `stage` is for people, such as "layers 2-4 on (1, 4) of 1x4".

    The three tuples hold one number of seconds a repeat: forward and backward of one microbatch, and one update. `host` and `pid` are
    those of the process that wrote the row; `num_devices` took part, on `nodes` (joined by commas; empty in rows of version 1).
    """

    key: str
    stage: str
    seconds_forward: tuple[float, ...]
    seconds_backward: tuple[float, ...]
    seconds_update: tuple[float, ...]
    compile_seconds: float
    host: str
    pid: int
    time_unix: float
    device_kind: str
    versions: str
    nodes: str = ""
    num_devices: int = 1

    def __post_init__(self) -> None:
        for name in _REPEATED:
            seconds: tuple[float, ...] = getattr(self, name)
            if not seconds or not all(math.isfinite(second) and second >= 0 for second in seconds):
                raise ValueError(f"{name} of {self.stage!r} is {seconds}, expected one finite number >= 0 for each repeat")
        if not self.key or "/" in self.key:
            raise ValueError(f"key {self.key!r} of {self.stage!r} cannot name a row: expected hex digits, see profiling.keys")


@dataclass(frozen=True, slots=True)
class TornShard:
    """A damaged shard: its rows count as missing."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class StoreContents:
    """The newest row of each key, and what could not be read."""

    rows: Mapping[str, ProfileRow]
    torn: tuple[TornShard, ...]


def write_shard(folder: Path, rows: Sequence[ProfileRow]) -> Path:
    """Write `rows` (keys distinct) as one new shard of the store in `folder` and return its path; it appears whole or not at all."""
    assert rows, "an empty shard says nothing"
    assert len({row.key for row in rows}) == len(rows), "one shard holds a key once"
    return write_file(folder, lambda file: _fill(file, rows))


def read_store(folder: Path) -> StoreContents:
    """All rows of the store in `folder` (none if it is absent), the newest for each key; StoreError names a file that is not ours."""
    return _newest(read_files(folder, _read_file))


def compact(folder: Path) -> int:
    """Merge all shards into one and clear away what killed writers left; how many shards were merged, 0 if another process is at it.

    Damaged shards are set aside as NAME.torn. Each process deletes only what its own durable shard holds, so rows survive
    even two compactions at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with holding_lock(folder / "compaction.lock") as is_mine:
        if not is_mine:
            return 0
        clear_abandoned(folder)
        shards = read_files(folder, _read_file)
        contents = _newest(shards)
        whole = [path for path, shard in shards.items() if not isinstance(shard, TornShard)]
        if len(whole) > 1:
            write_shard(folder, tuple(contents.rows.values()))
            for path in whole:
                path.unlink(missing_ok=True)
        for torn in contents.torn:
            torn.path.replace(torn.path.with_suffix(".torn"))
        return len(whole) if len(whole) > 1 else 0


def compact_when_many(folder: Path, most_shards: int = MOST_SHARDS) -> int:
    """Compact a store of more than `most_shards` shards; how many were merged, 0 where there is nothing to gain."""
    with keeping(folder):
        return compact(folder) if len(shard_paths(folder)) > most_shards else 0
    return 0


def median_seconds(repeats: Sequence[float]) -> float:
    """The median, which one disturbed repeat does not move."""
    return statistics.median(repeats)


def relative_spread(repeats: Sequence[float]) -> float:
    """(largest - smallest) / median: 0 if all repeats agree."""
    median = statistics.median(repeats)
    return (max(repeats) - min(repeats)) / median if median > 0 else 0.0


def _newest(shards: Mapping[Path, tuple[ProfileRow, ...] | TornShard]) -> StoreContents:
    rows: dict[str, ProfileRow] = {}
    for shard in shards.values():
        for row in shard if not isinstance(shard, TornShard) else ():
            if row.key not in rows or _age_order(row) > _age_order(rows[row.key]):
                rows[row.key] = row
    torn = tuple(shard for shard in shards.values() if isinstance(shard, TornShard))
    return StoreContents(rows={key: rows[key] for key in sorted(rows)}, torn=torn)


def _age_order(row: ProfileRow) -> tuple[object, ...]:
    """A total order in which later is greater, whatever the order of files: the other fields decide between equal times."""
    return (row.time_unix, *astuple(row))


def _fill(file: h5py.File, rows: Sequence[ProfileRow]) -> None:
    file.attrs["format"] = FORMAT
    file.attrs["version"] = VERSION
    file.attrs["sha256"] = _digest(asdict(row) for row in rows)
    file.attrs["unit"] = "all seconds_* and compile_seconds are in seconds, one value a repeat; time_unix in seconds since 1970"
    for row in rows:
        group = file.create_group(row.key)
        for name, value in asdict(row).items():
            if name in _REPEATED:
                dataset = group.create_dataset(name, data=np.asarray(value, dtype=np.float64))
                dataset.attrs["unit"] = "seconds"
            elif name != "key":
                group.attrs[name] = value


def _read_file(path: Path) -> tuple[ProfileRow, ...] | TornShard:
    check_signature(path)
    if is_changed(path):
        return TornShard(path, "its bytes are not those that were written")
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            _check_ours(path, file)
            found = [_read_fields(str(key), group) for key, group in file.items()]
            digest = str(file.attrs["sha256"])
            rows = tuple(ProfileRow(**fields) for fields in found)
    except FileNotFoundError:
        raise
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        return TornShard(path, f"cannot be read to its end: {error}")
    return rows if digest == _digest(found) else TornShard(path, "its content does not match its checksum")


def _check_ours(path: Path, file: h5py.File) -> None:
    found = (file.attrs.get("format"), file.attrs.get("version"))
    if found[0] != FORMAT:
        raise StoreError(
            f"{path} is an HDF5 file of somebody else (format {found[0]!r}, expected {FORMAT!r}): move it out of the cost store"
        )
    if found[1] not in READABLE_VERSIONS:
        raise StoreError(
            f"{path} is of version {found[1]} of the cost store, expected at most {VERSION}: a newer alpa_hpc wrote it. "
            "Use another folder (profiling.store)"
        )


def _read_fields(key: str, group: Any) -> dict[str, Any]:
    """A row's fields as the file has them: one of version 1 lacks the newest."""
    fields: dict[str, Any] = {name: value.item() if isinstance(value, np.generic) else value for name, value in group.attrs.items()}
    return {"key": key} | fields | {name: tuple(float(second) for second in group[name][()]) for name in _REPEATED}


def _digest(rows: Iterable[Mapping[str, Any]]) -> str:
    fields = sorted(rows, key=lambda row: row["key"])
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
