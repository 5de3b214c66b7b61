"""(job kind, run folder, task number) -> a finished job: submits a job script and waits for its own account of its end.

What submitit pickles is those three values and nothing else; the job is the script `jobs/KIND.py`, which a person can run
by hand in the same way. Nothing waits through submitit's `result()`: without accounting it blocks long after a job's end.
"""

import os
import shlex
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm import slurm

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.options import SlurmOptions
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.status import JobState, JobStatus, read_status

POLL_SECONDS = 0.1
STOP_SECONDS = 15.0  # between asking a job to stop and killing it
TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job in flight."""

    kind: JobKind
    task: int
    job: "submitit.Job[None]"
    deadline: float

    @property
    def log(self) -> Path:
        """The file that holds all of the job's output."""
        return self.job.paths.stdout


def run_job(
    kind: JobKind, paths: RunPaths, task: int = 0, *, timeout_seconds: float, watch: Callable[[], None] = lambda: None
) -> JobStatus:
    """Run one job to its end and return its account; LaunchError, with the end of its log, if it fails, dies or takes too long."""
    (status,) = run_tasks(kind, paths, (task,), max_parallel=1, timeout_seconds=timeout_seconds, watch=watch)
    return status


def run_tasks(
    kind: JobKind,
    paths: RunPaths,
    tasks: Sequence[int],
    *,
    max_parallel: int,
    timeout_seconds: float,
    watch: Callable[[], None] = lambda: None,
) -> tuple[JobStatus, ...]:
    """Run several jobs of one kind, at most `max_parallel` at once, and return their accounts in the order of `tasks`.

    `timeout_seconds` bounds each job; `watch` is called at every poll, for a person who follows. The first failure stops the others.
    """
    assert max_parallel >= 1, "no job would ever start"
    waiting, running, finished = list(tasks), list[Submitted](), dict[int, JobStatus]()
    try:
        while waiting or running:
            while waiting and len(running) < max_parallel:
                running.append(_submit(kind, paths, waiting.pop(0), timeout_seconds))
            time.sleep(POLL_SECONDS)
            watch()
            for submitted in tuple(running):
                status = _ended(submitted, paths)
                if status is not None:
                    finished[submitted.task] = status
                    running.remove(submitted)
    finally:
        for submitted in running:
            _stop(submitted)
    return tuple(finished[task] for task in tasks)


def _submit(kind: JobKind, paths: RunPaths, task: int, timeout_seconds: float) -> Submitted:
    job_script(kind.value)  # a missing script should fail here, not in a log
    paths.status(kind, task).unlink(missing_ok=True)  # the account of an earlier attempt must not be taken for this one's
    executor = submitit.LocalExecutor(folder=paths.log_folder(kind, task), python=_python())
    minutes = (timeout_seconds + 2 * STOP_SECONDS) / 60  # a backstop, should this process be killed; our own bound comes first
    executor.update_parameters(timeout_min=minutes, signal_delay_s=0, stderr_to_stdout=True)
    job = executor.submit(become_job_script, kind, str(paths.root), task)
    return Submitted(kind, task, job, deadline=time.monotonic() + timeout_seconds)


def slurm_script(kind: JobKind, paths: RunPaths, options: SlurmOptions, num_nodes: int, ranks_per_node: int) -> str:
    """The batch script with which submitit submits a job: Python itself is the batch shell and no srun stands in between."""
    flags: dict[str, Any] = {
        "partition": options.partition or None,
        "account": options.account or None,
        "qos": options.qos or None,
        "constraint": options.constraint or None,
        "gpus_per_node": options.gpus_per_node or None,
        "time": options.time_minutes or DEFAULT_MINUTES,
    }
    # submitit's executor writes its scripts with this function; asking it directly needs no sbatch on this machine.
    return slurm._make_sbatch_string(  # noqa: SLF001
        command=shlex.join(("exec", sys.executable, "-P", str(job_script(kind.value)), str(paths.root))),
        folder=paths.log_folder(kind),
        job_name=f"{paths.name}-{kind.value}",
        nodes=num_nodes,
        ntasks_per_node=ranks_per_node,
        stderr_to_stdout=True,
        setup=list(options.setup) or None,
        additional_parameters=dict(options.additional) or None,
        use_srun=False,
        **flags,
    )


DEFAULT_MINUTES = 60  # where the options leave the time to us; submitit's own default is 5


def become_job_script(kind: JobKind, root: str, task: int) -> None:
    """Replace this process by the job script, so that signals, output and exit code are the script's own."""
    command = [sys.executable, "-P", str(job_script(kind.value)), root]
    if kind is JobKind.PROFILE:
        command.append(str(task))
    os.execv(command[0], command)


def _python() -> str:
    """The interpreter for the job: it imports what this process imports, alpa_hpc and a user's model alike, whatever the working folder."""
    # -P: else `python -m` would look into the working folder before all of them.
    return shlex.join(("env", f"PYTHONPATH={os.pathsep.join(_import_folders())}", sys.executable, "-P"))


def _import_folders() -> tuple[str, ...]:
    """This process's own additions to the interpreter's module path, absolute: the checkout, the working folder, PYTHONPATH."""
    package_root = str(Path(__file__).absolute().parents[2])
    working = str(Path.cwd())
    installed = package_root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    folders = [] if installed else [package_root]
    folders += [working] if working in sys.path or "" in sys.path else []
    folders += [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return tuple(dict.fromkeys(folders))


def _ended(submitted: Submitted, paths: RunPaths) -> JobStatus | None:
    """The account of a job that has ended well, or None while it is on its way."""
    is_gone = submitted.job.done()  # asked before the marker is read: a marker written in between is then seen
    status = read_status(paths, submitted.kind, submitted.task)
    if not is_gone:
        if time.monotonic() > submitted.deadline:
            raise _failure(submitted, paths, "took longer than it was given and was stopped")
        return None
    if status is None:
        raise _failure(submitted, paths, "ended before it could report anything")
    match status.state:
        case JobState.DONE:
            return status
        case JobState.FAILED:
            raise _failure(submitted, paths, f"failed on {status.host}: {status.message}")
        case JobState.RUNNING:
            raise _failure(submitted, paths, f"(process {status.pid} on {status.host}) ended without a report. Killed, or out of memory?")


def _failure(submitted: Submitted, paths: RunPaths, what: str) -> LaunchError:
    name = paths.job_name(submitted.kind, submitted.task)
    return LaunchError(f"job {name} {what}\n--- the end of {submitted.log}:\n{log_tail(submitted.log, TAIL_LINES)}")


def log_tail(log: Path, num_lines: int) -> str:
    """The last lines of a log file, or a word that there is none."""
    if not log.exists():
        return "(no log was written)"
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


def _stop(submitted: Submitted) -> None:
    """Ask the job to stop (SIGTERM, which submitit's local controller hands on to the script) and, after a while, make it."""
    end = time.monotonic() + STOP_SECONDS
    while not submitted.job.done() and time.monotonic() < end:
        os.kill(int(submitted.job.job_id), signal.SIGTERM)
        time.sleep(0.5)
    if not submitted.job.done():
        submitted.job.cancel()
