"""A folder of immutable HDF5 files that concurrent processes share: each writes files of its own, temporary name, fsync, rename.

Nobody ever writes into a file again; a compaction writes another, and deletes those that it holds. A file's name ends in the digest of its
bytes, which is checked before HDF5 sees them: on bytes that a disk has changed, the library may end the process.
"""

import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import h5py

from alpa_hpc.errors import StoreError
from alpa_hpc.profiling.lock import owner_is_gone

Content = TypeVar("Content")

_SUFFIX = ".h5"
_TEMPORARY = ".writing-"
_WRITER = re.compile(rf"{re.escape(_TEMPORARY)}(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SEALED = re.compile(r"\.([0-9a-f]{64})\.h5")
_LISTINGS = 10  # readers list the folder anew when a compaction takes a file away under them


def write_file(folder: Path, fill: Callable[[h5py.File], None]) -> Path:
    """Have `fill` say what is in a new file of `folder`, and return its path; it appears whole or not at all.

    HDF5 makes it in memory: on a disk that is full h5py may report success and leave half a file, or end the process.
    """
    content = _filled(fill)
    folder.mkdir(parents=True, exist_ok=True)
    unique = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    temporary = folder / f"{_TEMPORARY}{unique}"
    target = folder / f"shard-{unique}.{hashlib.sha256(content).hexdigest()}{_SUFFIX}"
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(folder)
    return target


def _filled(fill: Callable[[h5py.File], None]) -> bytes:
    with h5py.File("in memory", "w", driver="core", backing_store=False) as file:
        fill(file)
        file.flush()
        return file.id.get_file_image()


def read_files(folder: Path, read: Callable[[Path], Content]) -> dict[Path, Content]:
    """What `read` finds in each file of the folder (none if it is absent). StoreError if the folder does not come to rest."""
    for _ in range(_LISTINGS):
        try:
            return {path: read(path) for path in shard_paths(folder)}
        except FileNotFoundError:
            continue  # compacted away since the listing; what it held is in another file now
    raise StoreError(f"the store {folder} changed under {_LISTINGS} attempts to read it: is a compaction running in a loop?")


def shard_paths(folder: Path) -> list[Path]:
    """The files of a store, whole ones all, by name; links that lead nowhere are none."""
    found = (path for path in folder.glob(f"*{_SUFFIX}") if not path.name.startswith("."))
    return sorted(path for path in found if path.exists() or not path.is_symlink())


def is_changed(path: Path) -> bool:
    """Whether a file's bytes are not those that its name tells of. Names that tell of none (of older versions, of strangers) pass."""
    sealed = _SEALED.search(path.name)
    return sealed is not None and sealed.group(1) != _digest(path)


def check_signature(path: Path) -> None:
    """StoreError for what stands in a store under the name of a shard, but is a folder, is not to be read, or is no HDF5.

    Zeros are a torn file of ours, and a name of ours tells of a file of ours, whatever has become of its bytes.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder, but stands in the cost store under the name of a shard: move it away")
    try:
        with path.open("rb") as stream:
            head = stream.read(len(_HDF5_SIGNATURE))
    except PermissionError as error:
        raise StoreError(f"{path} is a shard that this user may not read: have its owner allow it, or use another folder") from error
    if head != _HDF5_SIGNATURE and head.strip(b"\0") and _SEALED.search(path.name) is None:
        raise StoreError(f"{path} is no HDF5 file (it starts with {head!r}), but stands in the cost store: move it away")


def clear_abandoned(folder: Path) -> None:
    """Delete what killed writers left."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        named = _WRITER.fullmatch(path.name)
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:
            continue  # its writer has just renamed it
        if named is not None and owner_is_gone(named["host"], int(named["pid"]), age_seconds=time.time() - written):
            path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
