"""Solved runs of layers <-> a folder of immutable HDF5 shards, beside the cost store: what makes planning again quick.

It is a cache: a shard that cannot be read counts as missing, and is deleted by the next compaction. Tables with units: `h5dump` shows all.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from alpa_hpc.profiling.cache import keeping
from alpa_hpc.profiling.lock import holding_lock
from alpa_hpc.profiling.shards import clear_abandoned, is_changed, read_files, shard_paths, write_file
from alpa_hpc.sharding.build import SpecSpace
from alpa_hpc.sharding.solved import Solved, StageValue

FORMAT = "alpa_hpc solved runs of layers"
VERSION = 1
MOST_SHARDS = 16  # each planning run that solves anything new writes one
_UNITS = {"seconds": "seconds an iteration", "fixed_bytes": "bytes a device", "inflight_bytes": "bytes a device, a microbatch in flight"}

Rows = Mapping[str, Solved]
Column = np.ndarray[Any, np.dtype[Any]]


def read_solutions(folder: Path) -> Rows:
    """All rows of the store in `folder`, none if it is absent."""
    return {key: solved for shard in read_files(folder, _read).values() if shard for key, solved in shard.items()}


def write_solutions(folder: Path, rows: Rows) -> None:
    """Add rows as a shard of their own, if there are any, and merge shards once they are many; where the folder cannot be written, not."""
    with keeping(folder):
        if rows:
            write_file(folder, lambda file: _fill(file, rows))
        if len(shard_paths(folder)) > MOST_SHARDS:
            _compact(folder)


def _compact(folder: Path) -> None:
    with holding_lock(folder / "compaction.lock") as is_mine:
        if is_mine:
            clear_abandoned(folder)
            shards = read_files(folder, _read)
            rows = {key: solved for shard in shards.values() if shard for key, solved in shard.items()}
            merged = write_file(folder, lambda file: _fill(file, rows))
            for path in shards.keys() - {merged}:
                with suppress(IsADirectoryError):  # somebody else's, whatever its name
                    path.unlink(missing_ok=True)


def _fill(file: h5py.File, rows: Rows) -> None:
    keys = sorted(rows)
    numbers = np.array([(rows[key].value.seconds, rows[key].value.fixed_bytes, rows[key].value.inflight_bytes) for key in keys])
    narrow = np.array([rows[key].space is SpecSpace.NARROW for key in keys])
    file.attrs["format"] = FORMAT
    file.attrs["version"] = VERSION
    file.create_dataset("key", data=np.array(keys, dtype="S32"))
    for column, (name, unit) in enumerate(_UNITS.items()):
        file.create_dataset(name, data=numbers[:, column]).attrs["unit"] = unit
    file.create_dataset("narrow", data=narrow).attrs["meaning"] = "searched without specs that split awkward dims"
    file.attrs["sha256"] = _digest(keys, numbers, narrow)


def _read(path: Path) -> Rows | None:
    """The rows of a shard, or None where it is not whole, or not ours."""
    try:
        if is_changed(path):
            return None
        with h5py.File(path, "r", locking="best-effort") as file:
            if (file.attrs.get("format"), file.attrs.get("version")) != (FORMAT, VERSION):
                return None
            keys = [key.decode() for key in _column(file, "key").tolist()]
            numbers = np.stack([_column(file, name) for name in _UNITS], axis=1)
            narrow = _column(file, "narrow")
            if file.attrs["sha256"] != _digest(keys, numbers, narrow):
                return None
    except FileNotFoundError:
        raise
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, AttributeError):
        return None
    spaces = (SpecSpace.FULL, SpecSpace.NARROW)
    rows = zip(keys, numbers.tolist(), narrow.tolist(), strict=True)
    return {key: Solved(StageValue(*value), spaces[is_narrow]) for key, value, is_narrow in rows}


def _column(file: h5py.File, name: str) -> Column:
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise TypeError(f"{name} is no table")
    return np.asarray(dataset[()])


def _digest(keys: list[str], *columns: Column) -> str:
    digest = hashlib.sha256("".join(keys).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()
