"""`python -m alpa_hpc logs [RUN] [JOB] [--follow] [--rank N]` -> the output of one job.

JOB is a name as in `status`: plan, profile-0003, train (default: the job that runs, else the first that failed, else the last).
Exit status: 0, or 2 where there is no such run, job or log.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from alpa_hpc.commands.find import add_run_arguments, find_run
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.evidence import JobPhase, JobView
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.launch.views import RunView, view_run

POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0  # between two looks at whether the job goes on, each of which may ask Slurm's controller

_RANK_LINE = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?")  # how mpirun marks the lines of a rank
_OVER = (JobPhase.DONE, JobPhase.FAILED, JobPhase.CANCELLED)


def main(arguments: Sequence[str]) -> int:
    """Print a log."""
    parser = argparse.ArgumentParser(prog="python -m alpa_hpc logs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job")
    parser.add_argument("--follow", action="store_true", help="go on printing until the job has ended")
    parser.add_argument("--rank", type=int, metavar="N", help="only the lines of rank N of the training job")
    asked = parser.parse_args(arguments)
    paths = find_run(asked.run, asked.runs)
    job = choose_job(view_run(paths), asked.job)
    lines = follow_lines(paths, job) if asked.follow else whole_lines(require_log(paths, job))
    for line in lines if asked.rank is None else lines_of_rank(lines, asked.rank):
        sys.stdout.write(line)
        sys.stdout.flush()
    return 0


def choose_job(view: RunView, name: str | None) -> JobView:
    """The job called `name`, or the one that a person most likely asks for; LaunchError where there is none."""
    names = {view.paths.job_name(job.kind, job.task): job for job in view.jobs}
    if name is not None:
        if name not in names:
            raise LaunchError(f"{view.paths.root} has no job {name!r}; its jobs are {', '.join(names) or '(none)'}")
        return names[name]
    wishes: tuple[Callable[[JobView], bool], ...] = (
        lambda job: job.phase is JobPhase.RUNNING,
        lambda job: job.phase is JobPhase.FAILED,
        lambda job: log_of(view.paths, job) is not None,
        lambda job: True,
    )
    found = [job for wish in wishes for job in reversed(view.jobs) if wish(job)]
    if not found:
        raise LaunchError(f"{view.paths.root} has no jobs yet, so there is no log")
    return found[0]


def log_of(paths: RunPaths, job: JobView) -> Path | None:
    """The newest file with the job's output, or None: the tasks of an array share a folder, and their files bear Slurm's numbers."""
    if job.slurm_id:
        logs = list(paths.batch_log_folder(job.kind).glob(f"{job.slurm_id}_*.out"))
    else:
        logs = list(paths.log_folder(job.kind, job.task).glob("*.out"))
    return max(logs, key=lambda log: log.stat().st_mtime, default=None)


def require_log(paths: RunPaths, job: JobView) -> Path:
    """The job's log; LaunchError where it has none."""
    log = log_of(paths, job)
    if log is None:
        why = f": {job.reason}" if job.reason else ""
        raise LaunchError(f"job {paths.job_name(job.kind, job.task)} has written no log in {paths.logs}; it is {job.phase.value}{why}")
    return log


def whole_lines(log: Path) -> Iterator[str]:
    """All lines of a log."""
    with log.open(encoding="utf-8", errors="replace") as stream:
        yield from stream


def follow_lines(paths: RunPaths, job: JobView) -> Iterator[str]:
    """The lines of a log as they are written, until the job is over; waits for a log that is not there yet."""
    next_look = time.monotonic()
    log, position, is_over = log_of(paths, job), 0, job.phase in _OVER
    while True:
        if log is not None:
            for line in _new_lines(log, position, is_last=is_over):
                position += len(line)
                yield line.decode("utf-8", errors="replace")
        if is_over:
            return
        time.sleep(POLL_SECONDS)
        if time.monotonic() >= next_look:
            job = next(one for one in view_run(paths).jobs if (one.kind, one.task) == (job.kind, job.task))
            is_over, log = job.phase in _OVER, log or log_of(paths, job)
            next_look = time.monotonic() + LOOK_SECONDS


def lines_of_rank(lines: Iterator[str], rank: int) -> Iterator[str]:
    """The lines that rank `rank` wrote, without mpirun's mark."""
    for line in lines:
        marked = _RANK_LINE.match(line)
        if marked is not None and int(marked[1]) == rank:
            yield line[marked.end() :]


def _new_lines(log: Path, position: int, *, is_last: bool) -> Iterator[bytes]:
    """Whole lines from a position in bytes on; a last one without its end only when nobody will end it."""
    with log.open("rb") as stream:
        stream.seek(position)
        for line in stream:
            if line.endswith(b"\n") or is_last:
                yield line
