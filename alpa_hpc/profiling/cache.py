"""What is kept for later runs alone: where it cannot be written, this run goes on without, and says so on stderr."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from alpa_hpc.errors import StoreError


@contextmanager
def keeping(folder: Path) -> Generator[None]:
    """Runs a block that adds to the cache in `folder`, or tidies it: a full disk, or a folder of another user's, costs later runs time."""
    try:
        yield
    except (OSError, StoreError) as error:
        sys.stderr.write(
            f"warning: nothing more is kept in {folder} ({_reason(error)}): later runs will find out again what this one did\n"
        )


def _reason(error: OSError | StoreError) -> str:
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return (cause.strerror if isinstance(cause, OSError) else None) or str(error)
