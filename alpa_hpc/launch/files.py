"""(path, text or JSON value) -> a file that is complete or absent: temporary name, fsync, rename (promise 8 of the design).

A reader never sees half of a file, and a killed writer leaves only a temporary name that no reader looks at.
"""

import json
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from alpa_hpc.errors import StoreError


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path` so that readers see the old file or the whole new one. StoreError where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write_durably(temporary, text)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror}): is the disk full, or the folder not yours?") from error
    finally:
        with suppress(OSError):  # where it could not be made, either
            temporary.unlink(missing_ok=True)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(path: Path, value: object) -> None:
    """Write a JSON value (dicts, lists, strings, numbers, None), indented, through `write_text`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in `path`; StoreError if the file is absent, cannot be read, or is not JSON in UTF-8."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path} is not there. Was the job that writes it run, and is this its run folder?") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}): is it a file of yours?") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise StoreError(f"{path} is not a JSON file of ours: {error}. Delete it and run the job that writes it again.") from error


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder; StoreError where that cannot be told."""
    try:
        return path.exists()
    except OSError as error:
        raise StoreError(f"{path} cannot be looked for ({error.strerror}): is it in a folder of yours?") from error


@contextmanager
def fields_of(path: Path) -> Generator[None]:
    """Runs a block that reads fields of what was found in `path`; StoreError where one is absent, or is something else."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
        raise StoreError(
            f"{path} lacks or garbles a field ({error!r}): it is damaged, or another version of alpa_hpc wrote it. Start the run again, or "
            "use that version."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable: after it, a crash of the machine keeps the new name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def log_tail(log: Path, num_lines: int) -> str:
    """The last lines of a log file, or a word that there is none."""
    if not log.is_file():
        return "(no log was written)"
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
