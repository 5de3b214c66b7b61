"""Watchdog: an executor that finishes no instruction for too long -> a report of where it is stuck, then an abort of the job.

A rank that waits for a message that never comes, or sits in a collective that a peer never entered, gets no error from MPI, gloo or NCCL.
"""

import faulthandler
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from alpa_hpc.errors import ConfigError
from alpa_hpc.runtime.execute import Executor


@dataclass(frozen=True, slots=True)
class WatchdogLimits:
    """Seconds an instruction may take: `first_seconds` in the first iteration, where tasks are compiled, then `seconds`."""

    first_seconds: float = 1800.0
    seconds: float = 300.0

    def __post_init__(self) -> None:
        if not (self.first_seconds > 0 and self.seconds > 0):
            raise ConfigError(
                f"watchdog limits must be positive, found {self.first_seconds} s and {self.seconds} s; a large number turns it off"
            )


@contextmanager
def watched(executor: Executor, rank: int, limits: WatchdogLimits, stream: TextIO, abort: Callable[[], None]) -> Generator[None]:
    """Watch the executor from a thread of its own while the body runs.

    When an instruction of a running iteration takes longer than its limit, the report and the stacks of all threads go to `stream` (it
    needs a file descriptor) and `abort` is called, once. Time between iterations does not count.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(executor, rank, limits, stream, abort, stop), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(executor: Executor, rank: int, limits: WatchdogLimits, stream: TextIO, abort: Callable[[], None], stop: threading.Event) -> None:
    pause = min(1.0, limits.seconds / 10, limits.first_seconds / 10)
    finished, since = -1, time.monotonic()
    while not stop.wait(pause):
        now, position = time.monotonic(), executor.position()
        if position.finished != finished or not executor.running():
            finished, since = position.finished, now
        limit = limits.first_seconds if finished < len(executor.program.instructions) else limits.seconds
        if now - since > limit:
            _report(executor, rank, now - since, stream)
            abort()
            return


def _report(executor: Executor, rank: int, seconds: float, stream: TextIO) -> None:
    stream.write(
        f"[mesh {executor.program.mesh}, rank {rank}] watchdog: no instruction finished for {seconds:.0f} s; "
        f"stuck at {executor.describe()}\n"
        "The other meshes' reports, if any, show who waits for whom; the stacks of this rank follow.\n"
    )
    stream.flush()
    faulthandler.dump_traceback(stream, all_threads=True)
