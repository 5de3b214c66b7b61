"""Run folders made by hand, and a Slurm that says what it is told to."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.queue import QueuePhase, QueueState
from alpa_hpc.launch.status import JobState, JobStatus, write_status

PLAN, PROFILE, TRAIN = JobKind.PLAN, JobKind.PROFILE, JobKind.TRAIN
HERE = socket.gethostname()


def made(runs: Path, name: str = "demo", launcher: str = "local", run_id: str = "") -> RunPaths:
    paths = new_run(runs, name)
    if run_id:
        paths = RunPaths(paths.root.rename(paths.root.with_name(run_id)))
    paths.config.write_text(f"mode: full\nlauncher:\n  kind: {launcher}\ntraining:\n  num_steps: 160\n")
    return paths


def report(paths: RunPaths, kind: JobKind, state: JobState, task: int = 0, **fields: object) -> None:
    ended = None if state is JobState.RUNNING else time.time() + 1
    started = JobStatus(kind, task, state, None, HERE, "node7", 1, time.time(), ended, "", is_explained=True, traceback="")
    write_status(paths, replace(started, **fields))  # pyright: ignore[reportArgumentType]


def write_log(paths: RunPaths, kind: JobKind, name: str, text: str, task: int = 0) -> Path:
    folder = paths.log_folder(kind, task)
    return write_text(folder / name, text)


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


class FakeSlurm:
    """Jobs by id; those that are cancelled become so."""

    def __init__(self) -> None:
        self.states: dict[str, QueueState] = {}
        self.calls: list[tuple[str, ...]] = []
        self.when_asked: Callable[[], None] = lambda: None

    def ask(self, ids: Sequence[str]) -> Mapping[str, QueueState]:
        self.calls.append(("ask", *ids))
        self.when_asked()
        return {one: self.states.get(one, QueueState(QueuePhase.GONE)) for one in ids}

    def cancel_pending(self, ids: Sequence[str]) -> None:
        self.calls.append(("pending", *ids))

    def cancel(self, ids: Sequence[str]) -> None:
        self.calls.append(("cancel", *ids))
        self.states |= {one: QueueState(QueuePhase.CANCELLED) for one in ids}
