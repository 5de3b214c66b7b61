"""Documents <-> files of a cache, each named by the key of what was asked, and none of them needed.

A file that is torn, changed, or of another version of the program is as good as none.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from alpa_hpc.errors import StoreError
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.profiling.cache import keeping
from alpa_hpc.sharding.solved import source_key

DIGEST = "sha256"
MOST_KEPT = 256  # files of a folder; those written longest ago go first


def key_of(asked: Sequence[object]) -> str:
    """The key (32 hex digits) of an answer that depends on `asked` (values with telling reprs), under the present program."""
    digest = hashlib.sha256(source_key(("",)))
    for part in (jax.__version__, platform.python_version(), *asked):
        digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()[:32]


def path_of(folder: Path, key: str) -> Path:
    """Where the answer of a key lies."""
    return folder / f"{key}.json"


def read_kept(folder: Path, key: str) -> Mapping[str, Any] | None:
    """The document of a key, if it is kept and whole."""
    try:
        document = read_json(path_of(folder, key))
    except StoreError:
        return None
    return document if isinstance(document, dict) and document.get(DIGEST) == _digest(document) else None


def keep(folder: Path, key: str, document: Mapping[str, Any]) -> None:
    """Keep a document, if the folder can be written; the oldest of too many files go."""
    with keeping(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path_of(folder, key), {**document, DIGEST: _digest(document)})
        by_age = sorted(folder.glob("*.json"), key=_written, reverse=True)
        for path in by_age[MOST_KEPT:]:
            path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another run has just dropped it
        return 0.0


def _digest(document: Mapping[str, Any]) -> str:
    content = {name: value for name, value in document.items() if name != DIGEST}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
