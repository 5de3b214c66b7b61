"""ProfileRequest -> ProfileRow: a stage rebuilt, compiled and timed, on a lone device or on a mesh of its true size (paper, section 5.2).

What fails to compile or runs out of memory raises; `profiling.outcome.explain_failure` says it in a line.
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.planner.lookup import stage_of_plan
from alpa_hpc.planner.requests import ProfileRequest
from alpa_hpc.profiling.keys import software_versions
from alpa_hpc.profiling.measure import Synchronise, Timing, time_compiled, time_function
from alpa_hpc.profiling.options import Extent
from alpa_hpc.profiling.store import ProfileRow
from alpa_hpc.runtime.alone import mesh_arguments, tasks_alone
from alpa_hpc.runtime.lone import example, lone_tasks
from alpa_hpc.runtime.session import check_devices
from alpa_hpc.runtime.tasks import StageTask, compile_task
from alpa_hpc.sharding.collectives import AXIS_NAMES


def measure_here(step: LayeredStep, cluster: ClusterSpec, request: ProfileRequest, repeats: int, node: str) -> ProfileRow:
    """Time one stage in this process alone, on as many of its devices as the request is for."""
    match request.extent:
        case Extent.LONE:
            return measure_request(step, cluster, request, repeats, node)
        case Extent.MESH:
            count = request.stage.shape.num_devices
            check_devices(count)
            mesh = Mesh(np.array(jax.devices()[:count]).reshape(request.stage.shape.sizes), AXIS_NAMES)
            return measure_request_on_mesh(step, cluster, request, repeats, mesh, lambda: None, node)


def measure_request(step: LayeredStep, cluster: ClusterSpec, request: ProfileRequest, repeats: int, node: str) -> ProfileRow:
    """Time one stage's tasks as a lone device runs them, on this process's first device. `node` is this node's name."""
    assert request.extent is Extent.LONE, f"{request.label} is to be timed on its mesh"
    stage = stage_of_plan(request.stage, request.strategies, step, cluster)
    timings = {
        task.name: time_function(task.function, tuple(example(one) for one in task.arguments), repeats) for task in lone_tasks(step, stage)
    }
    return _row(request, timings, cluster, node)


def measure_request_on_mesh(
    step: LayeredStep, cluster: ClusterSpec, request: ProfileRequest, repeats: int, mesh: Mesh, synchronise: Synchronise, node: str
) -> ProfileRow:
    """Time one stage's tasks as training runs them, on the devices of `mesh` (whatever its shape), collectives included.

    Every process that has devices of the mesh calls this with the same request; the row holds what this process saw, and `joined_rows` what
    all saw. `synchronise` returns on each of them once all have called it.
    """
    assert request.extent is Extent.MESH, f"{request.label} is to be timed on a lone device"
    assert mesh.size == request.stage.shape.num_devices, f"{request.label} needs a mesh of its own size, found {mesh.size} devices"
    stage = stage_of_plan(request.stage, request.strategies, step, cluster)
    shaped = Mesh(mesh.devices.reshape(stage.shape.sizes), AXIS_NAMES, axis_types=mesh.axis_types)
    timings = {task.name: time_on_mesh(task, shaped, repeats, synchronise) for task in tasks_alone(step, stage)}
    return _row(request, timings, cluster, node)


def time_on_mesh(task: StageTask, mesh: Mesh, repeats: int, synchronise: Synchronise) -> Timing:
    """Compile and time one task on all devices of a mesh; what a run consumes is made anew before it."""
    return time_compiled(lambda: compile_task(task, mesh), mesh_arguments(task, mesh), repeats, synchronise)


def joined_rows(rows: Sequence[ProfileRow]) -> ProfileRow:
    """One row of those that the processes of a mesh have of the same request: each repeat took as long as on the slowest of them."""
    assert len({row.key for row in rows}) == 1, f"rows of {sorted({row.stage for row in rows})} are no measurement of one stage"
    return replace(
        rows[0],
        seconds_forward=_slowest([row.seconds_forward for row in rows]),
        seconds_backward=_slowest([row.seconds_backward for row in rows]),
        seconds_update=_slowest([row.seconds_update for row in rows]),
        compile_seconds=max(row.compile_seconds for row in rows),
        nodes=",".join(dict.fromkeys(row.nodes for row in rows)),
    )


def _slowest(repeats: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(float(second) for second in np.max(np.array(repeats), axis=0))


def _row(request: ProfileRequest, timings: Mapping[str, Timing], cluster: ClusterSpec, node: str) -> ProfileRow:
    update = timings["update"].seconds
    for partials in (timing.seconds for name, timing in timings.items() if name.startswith("partials")):
        update = tuple(a + b for a, b in zip(update, partials, strict=True))
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
        node,
        request.submesh.num_devices,
    )
