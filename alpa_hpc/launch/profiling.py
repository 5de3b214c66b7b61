"""ProfileRequests -> what became of each: from the cost store where they are known, else by profiling tasks, which write into it.

A task measures its requests in order and says in its answer file which one it is at. So when a task dies, that one has failed, and the
requests after it get a task of their own; when a task never started, its requests stay unmeasured.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path
from typing import Any

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.launch.outcome import Died, Ended, JobOutcome, NotStarted
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.planner.requests import ProfileRequest, requests_to_json
from alpa_hpc.profiling.outcome import Failed, Outcome, Unmeasured, measured
from alpa_hpc.profiling.store import ProfileRow, compact_when_many, read_store, write_shard


@dataclass(frozen=True, slots=True)
class ProfileTask:
    """A task's number, the devices that take part in it, and what it measures, in order."""

    number: int
    submesh: Submesh
    requests: tuple[ProfileRequest, ...]


RunProfiling = Callable[[Sequence[ProfileTask]], Mapping[int, JobOutcome]]


@dataclass(slots=True, eq=False)
class StoreProfiler:
    """A `planner.refine.Profiler` on a cost store; `run_tasks` runs profiling tasks, `num_shares` is how many at most share a mesh's work.

    `num_new` and `num_reused` count the requests that had to be measured and those that the store knew.
    """

    paths: RunPaths
    store: Path
    run_tasks: RunProfiling
    num_shares: int
    num_new: int = 0
    num_reused: int = 0
    numbers: Iterator[int] = field(default_factory=count)
    not_started: dict[Submesh, str] = field(default_factory=dict)  # meshes that were not to be had, and why: nobody waits for them twice

    def __call__(self, requests: Sequence[ProfileRequest]) -> Mapping[str, Outcome]:
        """What is known of each request now, by its key."""
        rows = self._rows()
        outcomes: dict[str, Outcome] = {one.key: measured(rows[one.key], one.extent) for one in requests if one.key in rows}
        missing = [one for one in requests if one.key not in outcomes]
        self.num_new += len(missing)
        self.num_reused += len(requests) - len(missing)
        while missing:
            outcomes |= {one.key: Unmeasured(self.not_started[one.submesh]) for one in missing if one.submesh in self.not_started}
            missing = [one for one in missing if one.key not in outcomes]
            outcomes |= self._measure(missing)
            missing = [one for one in missing if one.key not in outcomes]
            compact_when_many(self.store)
        return outcomes

    def _measure(self, requests: Sequence[ProfileRequest]) -> dict[str, Outcome]:
        """What one wave of tasks finds out: at least one request of each task."""
        if not requests:
            return {}
        tasks = [ProfileTask(next(self.numbers), submesh, share) for submesh, share in shares(requests, self.num_shares)]
        for task in tasks:
            self.paths.profile_answer(task.number).unlink(
                missing_ok=True
            )  # that of an earlier planning job must not be taken for this one's
            write_json(self.paths.profile_request(task.number), requests_to_json(task.requests))
        ends = self.run_tasks(tasks)
        rows = self._rows()
        found: dict[str, Outcome] = {}
        for task in tasks:
            found |= found_by(task, ends[task.number], read_answer(self.paths, task.number), rows)
        self.not_started |= meshes_not_had(tasks, ends)
        return found

    def _rows(self) -> Mapping[str, ProfileRow]:
        contents = read_store(self.store)
        for torn in contents.torn:
            sys.stderr.write(f"warning: {torn.path} counts as missing, its rows are measured again: {torn.reason}\n")
        return contents.rows


def meshes_not_had(tasks: Sequence[ProfileTask], ends: Mapping[int, JobOutcome]) -> dict[Submesh, str]:
    """The sizes of mesh for which no task at all was started, with the reason of one."""
    refused = {task.submesh: end.reason for task in tasks if isinstance(end := ends[task.number], NotStarted)}
    had = {task.submesh for task in tasks if not isinstance(ends[task.number], NotStarted)}
    return {submesh: reason for submesh, reason in refused.items() if submesh not in had}


def shares(requests: Sequence[ProfileRequest], num_shares: int) -> list[tuple[Submesh, tuple[ProfileRequest, ...]]]:
    """Requests for equal meshes together, dealt out to at most `num_shares` tasks."""

    def size(one: ProfileRequest) -> tuple[int, int]:
        return (one.submesh.num_nodes, one.submesh.devices_per_node)

    dealt: list[tuple[Submesh, tuple[ProfileRequest, ...]]] = []
    for _, group in groupby(sorted(requests, key=size), key=size):
        equal = tuple(group)
        dealt += [(equal[0].submesh, equal[first::num_shares]) for first in range(min(num_shares, len(equal)))]
    return dealt


def found_by(task: ProfileTask, end: JobOutcome, answer: "Answer", rows: Mapping[str, ProfileRow]) -> dict[str, Outcome]:
    """What a task that is over tells about its requests; those that it did not come to are left out.

    Raises LaunchError where a task died before its first request: that is not a candidate's fault.
    """
    found: dict[str, Outcome] = {one.key: measured(rows[one.key], one.extent) for one in task.requests if one.key in rows}
    found |= {key: Failed(reason) for key, reason in answer.failed.items() if key not in found}
    left = [one for one in task.requests if one.key not in found]
    match end:
        case NotStarted(reason):
            return found | {one.key: Unmeasured(reason) for one in left}
        case Died(reason):
            if left and not answer.current:
                raise LaunchError(f"profiling task {task.number} died before it measured anything: {reason}")
            return found | {one.key: Failed(f"its profiling task {reason}") for one in left if one.key == answer.current}
        case Ended():
            if left:
                raise LaunchError(f"profiling task {task.number} ended well, but {left[0].label} is not in the cost store")
            return found


@dataclass(frozen=True, slots=True)
class Answer:
    """What a task says beside the rows in the store: the key of the request that it is at, and why others failed."""

    current: str
    failed: Mapping[str, str]


def read_answer(paths: RunPaths, task: int) -> Answer:
    """A task's answer; an empty one where it did not come to write it."""
    path = paths.profile_answer(task)
    if not path.exists():
        return Answer("", {})
    fields: dict[str, Any] = read_json(path)
    return Answer(str(fields.get("current", "")), dict(fields.get("failed", {})))


def measure_all(
    paths: RunPaths, task: int, store: Path, requests: Sequence[ProfileRequest], measure: Callable[[ProfileRequest], ProfileRow | Failed]
) -> None:
    """Measure every request of a task in order; each row is in the store before the next request is begun."""
    failed: dict[str, str] = {}
    for request in requests:
        write_json(paths.profile_answer(task), {"current": request.key, "failed": failed})
        match measure(request):
            case Failed(reason):
                failed[request.key] = reason
            case ProfileRow() as row:
                write_shard(store, [row])
    write_json(paths.profile_answer(task), {"current": "", "failed": failed})
