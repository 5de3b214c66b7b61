"""What a job says about itself -> `status/JOB.json`, written at its start and at its end: the file system is the truth.

A marker with an end is trusted before any scheduler. A marker without an end, of a process that is gone, is a job that
was killed; who waits for it finds that out (`launch.executor`).
"""

import enum
import os
import signal
import socket
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import NoReturn

from alpa_hpc.errors import AlpaError, LaunchError, StoreError
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.launch.paths import JobKind, RunPaths


class JobState(enum.Enum):
    """Where a job is in its life."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job's own account: times in seconds since 1970; `exit_code` and `ended` are None while it runs, texts empty without a failure.

    `node` is the scheduler's name for the node, or for all nodes of its job. `is_explained`: the message says all that a person needs.
    """

    kind: JobKind
    task: int
    state: JobState
    exit_code: int | None
    host: str
    node: str
    pid: int
    started: float
    ended: float | None
    message: str
    is_explained: bool
    traceback: str


def write_status(paths: RunPaths, status: JobStatus) -> None:
    """Put a job's account where every other job finds it."""
    fields = asdict(status) | {"kind": status.kind.value, "state": status.state.value}
    write_json(paths.status(status.kind, status.task), fields)


def read_status(paths: RunPaths, kind: JobKind, task: int = 0) -> JobStatus | None:
    """A job's account, or None while it has not written one; StoreError if the file is torn or foreign."""
    path = paths.status(kind, task)
    if not path.exists():
        return None
    fields = read_json(path)
    try:
        return JobStatus(**(fields | {"kind": JobKind(fields["kind"]), "state": JobState(fields["state"])}))
    except (TypeError, KeyError, ValueError) as error:
        raise StoreError(f"{path} is not a job status of this version ({error}): delete it and run the job again") from error


@contextmanager
def reporting(paths: RunPaths, kind: JobKind, task: int = 0) -> Generator[None]:
    """Report the block as RUNNING, then as DONE or FAILED (first line and traceback); the failure goes on its way.

    Inside the block SIGTERM raises LaunchError, so that the job's own `finally` blocks stop what it started.
    """
    status = _started(kind, task)
    write_status(paths, status)
    previous = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    except BaseException as error:
        write_status(paths, _failed(status, error))
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    write_status(paths, replace(status, state=JobState.DONE, exit_code=0, ended=time.time()))


def this_node() -> str:
    """The name of this node as Slurm has it, else the host's: virtual nodes of one machine share a host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _started(kind: JobKind, task: int) -> JobStatus:
    host, pid = socket.gethostname(), os.getpid()
    node = os.environ.get("SLURM_JOB_NODELIST") or this_node()
    return JobStatus(kind, task, JobState.RUNNING, None, host, node, pid, time.time(), None, "", is_explained=True, traceback="")


def _failed(status: JobStatus, error: BaseException) -> JobStatus:
    is_explained = isinstance(error, AlpaError)
    first_line = (str(error).strip().splitlines() or [""])[0]
    message = str(error).strip() if is_explained else f"{type(error).__name__}: {first_line}"
    text = "".join(traceback.format_exception(error))
    return replace(
        status, state=JobState.FAILED, exit_code=1, ended=time.time(), message=message, is_explained=is_explained, traceback=text
    )


def _raise_terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise LaunchError("this job was asked to stop (SIGTERM)")
