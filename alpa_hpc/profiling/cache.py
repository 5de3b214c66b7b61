"""What is kept for later runs alone: where it cannot be written, this run goes on without, and says so on stderr."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def keeping(folder: Path) -> Generator[None]:
    """Runs a block that adds to the cache in `folder`, or tidies it: a full disk, or a folder of another user's, costs later runs time."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        sys.stderr.write(f"warning: nothing more is kept in {folder} ({reason}): later runs will find out again what this one did\n")
