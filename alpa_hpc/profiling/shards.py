"""A folder of immutable HDF5 files that concurrent processes share: each writes files of its own, temporary name, fsync, rename.

Nobody ever writes into a file again; a compaction writes another, and deletes those that it holds.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from alpa_hpc.errors import StoreError
from alpa_hpc.profiling.lock import owner_is_gone

Content = TypeVar("Content")

_SUFFIX = ".h5"
_TEMPORARY = ".writing-"
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LISTINGS = 10  # readers list the folder anew when a compaction takes a file away under them


def write_file(folder: Path, write: Callable[[Path], None]) -> Path:
    """Have `write` make a new file of `folder` and return its path; it appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    unique = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    temporary = folder / f"{_TEMPORARY}{unique}"
    target = folder / f"shard-{unique}{_SUFFIX}"
    try:
        write(temporary)
        _sync(temporary)
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(folder)
    return target


def read_files(folder: Path, read: Callable[[Path], Content]) -> dict[Path, Content]:
    """What `read` finds in each file of the folder (none if it is absent). StoreError if the folder does not come to rest."""
    for _ in range(_LISTINGS):
        try:
            return {path: read(path) for path in shard_paths(folder)}
        except FileNotFoundError:
            continue  # compacted away since the listing; what it held is in another file now
    raise StoreError(f"the store {folder} changed under {_LISTINGS} attempts to read it: is a compaction running in a loop?")


def shard_paths(folder: Path) -> list[Path]:
    """The files of a store, whole ones all, by name."""
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if not path.name.startswith("."))


def check_signature(path: Path) -> None:
    """StoreError for what stands in a store under the name of a shard, but is a folder, or no HDF5 (zeros are a torn file of ours)."""
    if path.is_dir():
        raise StoreError(f"{path} is a folder, but stands in the cost store under the name of a shard: move it away")
    with path.open("rb") as stream:
        head = stream.read(len(_HDF5_SIGNATURE))
    if head != _HDF5_SIGNATURE and head.strip(b"\0"):
        raise StoreError(f"{path} is no HDF5 file (it starts with {head!r}), but stands in the cost store: move it away")


def clear_abandoned(folder: Path) -> None:
    """Delete what killed writers left."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        host, pid, _ = path.name.removeprefix(_TEMPORARY).rsplit("-", 2)
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:
            continue  # its writer has just renamed it
        if owner_is_gone(host, int(pid), age_seconds=time.time() - written):
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
