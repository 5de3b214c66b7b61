"""A request is timed on one device or on a whole mesh: the tasks that training runs, with what they consume made anew each time."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.planner.requests import ProfileRequest, describe_request
from alpa_hpc.planner.search import chosen_stage
from alpa_hpc.planner.timing import joined_rows, measure_here, measure_request, measure_request_on_mesh
from alpa_hpc.profiling.options import Extent
from alpa_hpc.runtime.alone import mesh_arguments, tasks_alone
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.tasks import border_spec, compile_task, reused_inputs
from alpa_hpc.sharding.collectives import AXIS_NAMES
from alpa_hpc.stages.cost_table import StageOption
from alpa_hpc.stages.objective import StageChoice
from alpa_hpc.verify.hlo import collectives
from tests.planning import CLUSTER, planned
from tests.quick import QUICK_FLAGS

REPEATS = 3


def chosen(start: int, stop: int, submesh: Submesh, shape: MeshShape) -> tuple[StageChoice, Stage]:
    option = StageOption(shape, False, 0, 0.0, 0.0, 0.0, 0.0, 0.0, measured=False)
    choice = StageChoice(start, stop, submesh, option)
    return choice, chosen_stage(planned().pricer, choice)


@cache
def request(extent: Extent, start: int = 0, stop: int = 3) -> ProfileRequest:
    choice, stage = chosen(start, stop, Submesh(1, 4), MeshShape(2, 2))
    return describe_request(choice, stage, device_kind="cpu", versions="jax 1", xla_flags="", extent=extent, cluster_name="c")


def devices(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]).reshape(count, 1), AXIS_NAMES)


def test_a_lone_device_times_its_share():
    row = measure_request(planned().pricer.step, CLUSTER, request(Extent.LONE, 1, 2), REPEATS, "node3")
    assert len(row.seconds_forward) == len(row.seconds_backward) == len(row.seconds_update) == REPEATS
    assert (row.nodes, row.num_devices, row.pid, row.key) == ("node3", 1, os.getpid(), request(Extent.LONE, 1, 2).key)
    assert min(*row.seconds_forward, *row.seconds_backward, *row.seconds_update) > 0


def test_a_mesh_times_whole_tasks_after_everyone_is_ready():
    calls: list[None] = []
    row = measure_request_on_mesh(
        planned().pricer.step, CLUSTER, request(Extent.MESH), REPEATS, devices(4), lambda: calls.append(None), "node3"
    )
    assert (row.nodes, row.num_devices, row.key) == ("node3", 4, request(Extent.MESH).key)
    assert len(row.seconds_forward) == len(row.seconds_backward) == len(row.seconds_update) == REPEATS
    assert min(*row.seconds_forward, *row.seconds_backward, *row.seconds_update) > 0
    assert row.compile_seconds > 0 and len(calls) == 4 * (REPEATS + 2), "forward, backward, partials, update; each repeat and warm-up"


@pytest.mark.parametrize("name", ["forward", "backward", "update", "partials"])
def test_tasks_get_arguments_as_they_lie_in_training_and_anew_what_they_consume(name: str):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXIS_NAMES)
    _, stage = chosen(0, 3, Submesh(1, 4), MeshShape(2, 2))
    task = {one.name: one for one in tasks_alone(planned().pricer.step, stage)}[name]
    fresh = mesh_arguments(task, mesh)
    first, second = fresh(), fresh()
    consumed = reused_inputs(task)
    for position, (layout, before, after) in enumerate(zip(task.inputs, first, second, strict=True)):
        layouts = (layout,) if isinstance(layout, Layout) else layout
        for one, array, again in zip(layouts, jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, border_spec(one.spec)), array.ndim)
            assert (array is again) == (position not in consumed)
    compiled = compile_task(task, mesh)
    jax.block_until_ready(compiled(*first))
    used_up = {position for position, value in enumerate(first) if any(leaf.is_deleted() for leaf in jax.tree.leaves(value))}
    assert used_up == set(consumed)
    jax.block_until_ready(compiled(*second))


def test_what_is_timed_talks():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXIS_NAMES)
    _, stage = chosen(0, 3, Submesh(1, 4), MeshShape(2, 2))
    found = [collectives(str(compile_task(task, mesh).as_text())) for task in tasks_alone(planned().pricer.step, stage)]
    assert any(found)


def test_one_process_measures_either_way():
    step = planned().pricer.step
    assert measure_here(step, CLUSTER, request(Extent.LONE, 1, 2), 1, "n").num_devices == 1
    assert measure_here(step, CLUSTER, request(Extent.MESH, 1, 2), 1, "n").num_devices == 4


def test_a_mesh_of_another_size_and_a_request_for_another_extent_are_refused():
    step = planned().pricer.step
    with pytest.raises(AssertionError, match="needs a mesh of its own size, found 2"):
        measure_request_on_mesh(step, CLUSTER, request(Extent.MESH), 1, devices(2), lambda: None, "n")
    with pytest.raises(AssertionError, match="is to be timed on a lone device"):
        measure_request_on_mesh(step, CLUSTER, request(Extent.LONE), 1, devices(4), lambda: None, "n")
    with pytest.raises(AssertionError, match="is to be timed on its mesh"):
        measure_request(step, CLUSTER, request(Extent.MESH), 1, "n")


def test_rows_of_all_processes_join_to_the_slowest():
    row = measure_request(planned().pricer.step, CLUSTER, request(Extent.LONE, 1, 2), 2, "a")
    one = replace(row, seconds_forward=(1.0, 4.0), seconds_backward=(1.0, 1.0), seconds_update=(0.0, 0.5), compile_seconds=2.0)
    other = replace(row, seconds_forward=(2.0, 3.0), seconds_backward=(1.0, 2.0), seconds_update=(0.5, 0.0), compile_seconds=3.0, nodes="b")
    joined = joined_rows([one, other, other])
    assert (joined.seconds_forward, joined.seconds_backward, joined.seconds_update) == ((2.0, 4.0), (1.0, 2.0), (0.5, 0.5))
    assert (joined.compile_seconds, joined.nodes) == (3.0, "a,b")
    with pytest.raises(AssertionError, match="no measurement of one stage"):
        joined_rows([one, replace(other, key="ff")])


# ---- over MPI ranks

HERE = Path(__file__).parents[1] / "runtime" / "mpi"
MPIRUN = Path(sys.executable).parent / "mpirun"


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_time_a_stage_together(count: int):
    environment = {**os.environ, "XLA_FLAGS": QUICK_FLAGS, "PJRT_NPROC": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[2])}
    environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    ranks = (MPIRUN, "-n", str(count), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", sys.executable, HERE / "measure.py")
    done = subprocess.run((*ranks, str(count)), env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len({row["key"] for row in rows}) == 2
    for row in rows:
        assert (row["num_devices"], row["nodes"]) == (count, "node0,node1")
        assert min(row["seconds_forward"] + row["seconds_backward"] + row["seconds_update"]) > 0
