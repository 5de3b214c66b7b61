"""A path -> a lock that one process of many holds, on any file system: an exclusively created file that names its owner.

For work that is better done once but harmless when done twice: a lock whose owner is gone is broken, and in the moment of
breaking two processes may, rarely, both believe they hold it.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

STALE_SECONDS = 900.0  # an owner on another host cannot be asked; nothing done under a lock takes nearly this long


@contextmanager
def holding_lock(path: Path) -> Generator[bool]:
    """Yields whether this process holds the lock; does not wait for it. A lock that a dead process left is taken over."""
    _break_if_abandoned(path)
    is_mine = _create(path)
    try:
        yield is_mine
    finally:
        if is_mine:
            path.unlink(missing_ok=True)


def owner_is_gone(host: str, pid: int, *, age_seconds: float) -> bool:
    """Whether a file of process `pid` on `host` was left behind: the process is dead, or on another host and the file is old."""
    if host != socket.gethostname():
        return age_seconds > STALE_SECONDS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # alive, and another user's
    return False


def _create(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, stream)
    return True


def _break_if_abandoned(path: Path) -> None:
    try:
        age = time.time() - path.stat().st_mtime
        host, pid = _owner(path)
    except FileNotFoundError:
        return
    if owner_is_gone(host, pid, age_seconds=age):
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # a rename, so that only one of several breakers removes it
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        aside.unlink(missing_ok=True)


def _owner(path: Path) -> tuple[str, int]:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return str(owner["host"]), int(owner["pid"])
    except json.JSONDecodeError:
        return "", 0  # its owner has not written its name yet, or died doing so: only age tells
