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

from alpa_hpc.process import is_dead_or_younger

_NO_PID = 1 << 31  # the kernel numbers processes below it
STALE_SECONDS = 900.0  # nothing done under a lock takes nearly this long: what cannot be asked whether it lives is gone by then


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
    """Whether a file of process `pid` on `host` was left behind: its process was one of this host and is dead; of others, its age tells.

    A process that lives is its owner however old the file is, unless it began after the file: then it has got the number of a dead one.
    """
    if host != socket.gethostname() or not 0 < pid < _NO_PID:
        return age_seconds > STALE_SECONDS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # alive, and another user's
    is_another = is_dead_or_younger(pid, time.time() - age_seconds)
    return age_seconds > STALE_SECONDS if is_another is None else is_another


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
            aside.unlink(missing_ok=True)
        except OSError:
            return  # another breaker has it, or it is not for us to take away: then it stays held


def _owner(path: Path) -> tuple[str, int]:
    """The host and process that a lock names; nobody where that cannot be told, and only its age does."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return str(owner["host"]), int(owner["pid"])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return "", 0  # its owner has not written its name yet, or died doing so; or another user's, or no file of ours
