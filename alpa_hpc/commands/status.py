"""`python -m alpa_hpc status [RUN] [--json]` -> what became of a run and of each of its jobs.

Exit status: 0 the run is on its way or done, 1 it failed or was cancelled, 2 it cannot be told (Slurm cannot be asked, no such run).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from alpa_hpc.commands.find import add_run_arguments, find_run
from alpa_hpc.commands.progress import Progress, read_progress
from alpa_hpc.commands.text import ago, duration, write_table
from alpa_hpc.errors import StoreError
from alpa_hpc.launch.evidence import JobPhase, JobView
from alpa_hpc.launch.files import fields_of, read_json
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.views import RunPhase, RunView, view_run
from alpa_hpc.report.words import chosen_words

MAX_LIKE = 4  # as many profiling tasks in the same phase get a line each; more of them share one
HEADERS = ("job", "state", "slurm", "nodes", "took", "since", "reason")
_STATUSES = {RunPhase.FAILED: 1, RunPhase.CANCELLED: 1, RunPhase.UNKNOWN: 2}


def main(arguments: Sequence[str]) -> int:
    """Print a run's state."""
    parser = argparse.ArgumentParser(prog="python -m alpa_hpc status", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    asked = parser.parse_args(arguments)
    view = view_run(find_run(asked.run, asked.runs))
    progress = read_progress(view.paths.metrics, view.settings.num_steps)
    if asked.json:
        sys.stdout.write(json.dumps(as_json(view, progress), indent=2) + "\n")
    else:
        write_status(view, progress, sys.stdout)
    return _STATUSES.get(view.phase, 0)


def as_json(view: RunView, progress: Progress) -> dict[str, Any]:
    """All that is known, as plain data; times in seconds since 1970."""
    return {
        "run": str(view.paths.root),
        "experiment": view.paths.name,
        "launcher": view.settings.launcher.value,
        "state": view.phase.value,
        "reason": view.reason,
        "warnings": list(view.torn),
        "step": progress.step,
        "num_steps": progress.num_steps,
        "figures": progress.figures,
        "jobs": [_job_as_json(view.paths, job) for job in view.jobs],
    }


def write_status(view: RunView, progress: Progress, stream: TextIO) -> None:
    """Write it for a person: the run, a line a job, and why it failed."""
    reason = f" ({view.reason})" if view.reason else ""
    stream.write(f"run         {view.paths.root}\n")
    stream.write(f"experiment  {view.paths.name}, launcher {view.settings.launcher.value}\n")
    stream.write(f"state       {view.phase.value}{reason}\n")
    if view.paths.planning.exists():
        stream.write(f"plan        {_plan_words(view.paths.planning)}\n")
    if progress.step:
        stream.write(f"training    {progress.describe()}\n")
    for line in view.torn:
        stream.write(f"warning     {line}\n")
    if view.jobs:
        stream.write("\n")
        write_table(HEADERS, list(_rows(view)), stream)
    failed = first_failure(view)
    if failed is not None:
        stream.write(f"\n{view.paths.job_name(failed.kind, failed.task)} failed first, in its own words:\n{failed.account}\n")


def _plan_words(planning: Path) -> str:
    """The plan in a line, or why it cannot be told: what else is known stands all the same."""
    try:
        found = read_json(planning)
        with fields_of(planning):
            return chosen_words(found)
    except StoreError as error:
        return f"cannot be told: {error}"


def first_failure(view: RunView) -> JobView | None:
    """The failed job that ended first, if it has more to say than its line does. A profiling task alone fails no run."""
    counted = [job for job in view.jobs if job.phase is JobPhase.FAILED]
    whole = [job for job in counted if job.kind is not JobKind.PROFILE] or counted
    spoken = [job for job in whole if job.account and job.account != job.reason]
    return min(spoken, key=lambda job: job.ended or 0.0, default=None)


def _job_as_json(paths: RunPaths, job: JobView) -> dict[str, Any]:
    return {
        "job": paths.job_name(job.kind, job.task),
        "state": job.phase.value,
        "reason": job.reason,
        "slurm_id": job.slurm_id,
        "nodes": job.nodes,
        "exit_code": job.exit_code,
        "submitted": job.submitted,
        "started": job.started,
        "ended": job.ended,
        "account": job.account,
    }


def _rows(view: RunView) -> Iterator[tuple[str, ...]]:
    """A row a job, in order; profiling tasks of which there are many in one phase share a row."""
    shared: set[JobPhase] = set()
    for job in view.jobs:
        alike = [other for other in view.jobs if other.kind is job.kind and other.phase is job.phase]
        if len(alike) <= MAX_LIKE or job.phase is JobPhase.FAILED:
            yield _row(view.paths, job)
        elif job.phase not in shared:
            shared.add(job.phase)
            yield _shared_row(alike)


def _row(paths: RunPaths, job: JobView) -> tuple[str, ...]:
    took = duration(job.ended - job.started) if job.started is not None and job.ended is not None else ""
    return (paths.job_name(job.kind, job.task), job.phase.value, job.slurm_id, job.nodes, took, ago(job.since), job.reason)


def _shared_row(alike: Sequence[JobView]) -> tuple[str, ...]:
    kind, phase = alike[0].kind, alike[0].phase
    nodes = ",".join(sorted({job.nodes for job in alike if job.nodes}))
    reasons = {job.reason for job in alike}
    arrays = ",".join(sorted({job.slurm_id.partition("_")[0] for job in alike if job.slurm_id}))
    last = max((job.since for job in alike if job.since is not None), default=None)
    return (f"{kind.value} ({len(alike)})", phase.value, arrays, nodes, "", ago(last), reasons.pop() if len(reasons) == 1 else "")
