"""ProfileRequests -> measured seconds: from the cost store where they are known, else by profiling tasks, which write into it."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import LaunchError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.launch.files import write_json
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.planner.lookup import stage_of_plan
from alpa_hpc.planner.refine import ComputeSeconds
from alpa_hpc.planner.requests import ProfileRequest, requests_to_json
from alpa_hpc.profiling.keys import software_versions
from alpa_hpc.profiling.measure import time_function
from alpa_hpc.profiling.store import ProfileRow, median_seconds, read_store, write_shard
from alpa_hpc.runtime.lone import example, lone_tasks

MAX_PARALLEL = 2  # busy tasks of one machine: with more of them the timings would be each other's

RunTasks = Callable[[Sequence[int]], None]


@dataclass(slots=True, eq=False)
class StoreProfiler:
    """A `planner.refine.Profiler` on a cost store; `run_tasks` runs profiling tasks by number.

    `num_new` and `num_reused` count the requests that had to be measured and those that the store knew.
    """

    paths: RunPaths
    store: Path
    run_tasks: RunTasks
    num_new: int = 0
    num_reused: int = 0
    next_task: int = 0

    def __call__(self, requests: Sequence[ProfileRequest]) -> Mapping[str, ComputeSeconds]:
        """Seconds of each request, by its key."""
        contents = read_store(self.store)
        for torn in contents.torn:
            sys.stderr.write(f"warning: {torn.path} counts as missing, its rows are measured again: {torn.reason}\n")
        known = contents.rows
        missing = [one for one in requests if one.key not in known]
        self.num_new += len(missing)
        self.num_reused += len(requests) - len(missing)
        if missing:
            self._measure(missing)
            known = read_store(self.store).rows
        absent = [one.label for one in requests if one.key not in known]
        if absent:
            raise LaunchError(f"profiling tasks ended without measuring {', '.join(absent)}; their logs are in {self.paths.logs}.")
        return {one.key: compute_seconds(known[one.key]) for one in requests}

    def _measure(self, requests: Sequence[ProfileRequest]) -> None:
        shares = [requests[first::MAX_PARALLEL] for first in range(MAX_PARALLEL) if requests[first::MAX_PARALLEL]]
        tasks = range(self.next_task, self.next_task + len(shares))
        self.next_task += len(shares)
        for task, share in zip(tasks, shares, strict=True):
            write_json(self.paths.profile_request(task), requests_to_json(share))
        self.run_tasks(tasks)


def compute_seconds(row: ProfileRow) -> ComputeSeconds:
    """The medians of a row."""
    return ComputeSeconds(median_seconds(row.seconds_forward), median_seconds(row.seconds_backward), median_seconds(row.seconds_update))


def measure_requests(step: LayeredStep, cluster: ClusterSpec, store: Path, requests: Sequence[ProfileRequest], repeats: int) -> Path:
    """Compile and time every request on this process's device; one shard with all rows."""
    return write_shard(store, [measure_request(step, cluster, request, repeats) for request in requests])


def measure_request(step: LayeredStep, cluster: ClusterSpec, request: ProfileRequest, repeats: int) -> ProfileRow:
    """Compile and time one stage's tasks as a lone device runs them."""
    stage = stage_of_plan(request.stage, request.strategies, step, cluster)
    timings = {
        task.name: time_function(task.function, tuple(example(one) for one in task.arguments), repeats) for task in lone_tasks(step, stage)
    }
    parts = timings["partials"].seconds if "partials" in timings else (0.0,) * repeats
    update = tuple(a + b for a, b in zip(timings["update"].seconds, parts, strict=True))
    return ProfileRow(
        request.key,
        request.label,
        timings["forward"].seconds,
        timings["backward"].seconds,
        update,
        sum(timing.compile_seconds for timing in timings.values()),
        socket.gethostname(),
        os.getpid(),
        time.time(),
        cluster.device.kind,
        json.dumps({"software": software_versions(), "platform": jax.devices()[0].device_kind}),
    )
