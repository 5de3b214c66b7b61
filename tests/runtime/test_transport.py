"""Transports move real arrays: between meshes of this process, and between MPI ranks started by mpirun (marker `mpi`)."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from alpa_hpc.cluster.hardware import Link, MeshShape
from alpa_hpc.errors import ProgramError
from alpa_hpc.ir.work import ReductionKind
from alpa_hpc.runtime.arrays import aligned_empty, named_sharding, replicate
from alpa_hpc.runtime.instructions import Buffer, Layout, Recv, Send
from alpa_hpc.runtime.links import DirectLinks, EmulatedLinks
from alpa_hpc.runtime.transfer import receive_layout
from alpa_hpc.runtime.transport import InProcessTransport, in_process_transports, join_scalars
from alpa_hpc.sharding.spec import Spec
from tests.quick import QUICK_FLAGS

SHAPES = (MeshShape(2, 2), MeshShape(1, 4))
SPECS = [Spec(((0,), (1,))), Spec(((1, 0), ())), Spec(((), (1,))), Spec(((), ()))]


@pytest.fixture(name="meshes", scope="module")
def make_meshes() -> tuple[Mesh, ...]:
    devices = np.array(jax.devices())
    axis_types = (AxisType.Auto, AxisType.Auto)
    return (
        Mesh(devices[:4].reshape(2, 2), ("x", "y"), axis_types=axis_types),
        Mesh(devices[4:].reshape(1, 4), ("x", "y"), axis_types=axis_types),
    )


def move(transports: tuple[InProcessTransport, ...], array: jax.Array, source: Layout, target: Layout, tag: int = 0) -> jax.Array:
    transports[0].send(Send(Buffer("value.0"), source, target, 1, tag), array)
    arrival = transports[1].receive(Recv(Buffer("value.0"), source, target, 0, tag))
    assert arrival.ready()
    return arrival.take()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("source_spec", SPECS, ids=str)
@pytest.mark.parametrize("target_spec", SPECS, ids=str)
def test_arrays_arrive_whole_and_laid_out(meshes: tuple[Mesh, ...], source_spec: Spec, target_spec: Spec, dtype: str) -> None:
    host = (np.arange(128).reshape(16, 8) % 3).astype(np.dtype(dtype))
    source = Layout((16, 8), dtype, source_spec, SHAPES[0])
    for target in (Layout((16, 8), dtype, target_spec, SHAPES[1]), receive_layout(Layout((16, 8), dtype, target_spec, SHAPES[1]))):
        array = jax.device_put(host, named_sharding(source_spec, meshes[0]))
        moved = move(in_process_transports(meshes), array, source, target)
        assert moved.sharding == named_sharding(target.spec, meshes[1])
        np.testing.assert_array_equal(np.asarray(moved), host)


def test_what_was_sent_survives_donation_of_its_source(meshes: tuple[Mesh, ...]) -> None:
    layout = Layout((16, 8), "float32", Spec(((0,), (1,))), SHAPES[0])
    target = Layout((16, 8), "float32", Spec(((), (1,))), SHAPES[1])
    array = jax.device_put(np.ones((16, 8), np.float32), named_sharding(layout.spec, meshes[0]))
    first, second = in_process_transports(meshes)
    first.send(Send(Buffer("value.0"), layout, target, 1, 0), array)
    own = np.asarray(array.addressable_data(0))
    assert not any(np.shares_memory(own, tile) for tile in first._exchange.sent[0, 1, 0][0]), "a view would keep the donated memory in use"
    del own
    jax.jit(lambda x: x * 0, donate_argnums=0)(array).block_until_ready()
    arrival = second.receive(Recv(Buffer("value.0"), layout, target, 0, 0))
    np.testing.assert_array_equal(np.asarray(arrival.take()), np.ones((16, 8), np.float32))


def test_messages_of_one_tag_stay_in_order_and_tags_do_not_mix(meshes: tuple[Mesh, ...]) -> None:
    source, target = (Layout((), "float32", Spec(()), shape) for shape in SHAPES)
    first, second = in_process_transports(meshes)
    for tag, value in [(0, 1.0), (1, 2.0), (0, 3.0)]:
        first.send(Send(Buffer("value.0"), source, target, 1, tag), replicate(np.asarray(value, np.float32), meshes[0]))
    values = [float(second.receive(Recv(Buffer("value.0"), source, target, 0, tag)).take()) for tag in (1, 0, 0)]
    assert values == [2.0, 1.0, 3.0]
    assert not second.receive(Recv(Buffer("value.0"), source, target, 0, 0)).ready()


def test_wrong_dtype_or_shape_of_a_sent_array_is_refused(meshes: tuple[Mesh, ...]) -> None:
    source, target = (Layout((8,), "float32", Spec(((),)), shape) for shape in SHAPES)
    with pytest.raises(ProgramError, match=r"the array is int32\[8\], the instruction says float32\[8\]"):
        move(in_process_transports(meshes), replicate(np.zeros(8, np.int32), meshes[0]), source, target)


def test_reduction_waits_for_all_meshes_and_is_forgotten_after(meshes: tuple[Mesh, ...]) -> None:
    first, second = in_process_transports(meshes)
    for round_number in range(2):
        mine = first.all_reduce((replicate(np.asarray(1 + round_number, np.float32), meshes[0]),), (ReductionKind.SUM,))
        assert not mine.ready()
        yours = second.all_reduce((replicate(np.asarray(10, np.float32), meshes[1]),), (ReductionKind.SUM,))
        assert mine.ready() and yours.ready()
        (left,), (right,) = mine.take(), yours.take()
        assert float(left) == float(right) == 11 + round_number
        assert set(left.devices()) == set(meshes[0].devices.flat) and set(right.devices()) == set(meshes[1].devices.flat)
    assert not first._exchange.rounds


def test_scalars_are_joined_in_mesh_order() -> None:
    values = [
        (np.float32(1e8), np.int32(3), np.bool_(True)),
        (np.float32(1), np.int32(7), np.bool_(False)),
        (np.float32(-1e8), np.int32(5), np.bool_(True)),
    ]
    columns = [tuple(np.asarray(value) for value in row) for row in values]
    total, largest, every = join_scalars(columns, (ReductionKind.SUM, ReductionKind.MAX, ReductionKind.AND))
    assert total == 0 and total.dtype == np.float32, "in float32, 1e8 + 1 is 1e8"
    assert largest == 7 and largest.dtype == np.int32
    assert not every and every.dtype == np.bool_


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_buffers_start_at_multiples_of_64_bytes(dtype: str) -> None:
    for size in (1, 7, 1000):
        buffer = aligned_empty((size, 3), np.dtype(dtype))
        assert buffer.shape == (size, 3) and buffer.dtype == np.dtype(dtype) and buffer.ctypes.data % 64 == 0


def test_emulated_links_queue_messages_of_a_pair() -> None:
    links = EmulatedLinks(lambda sender, receiver: Link(bandwidth=100.0, latency=0.5))
    assert links.due(0, 1, 200, sent=10.0) == 12.5
    assert links.due(0, 1, 100, sent=10.0) == 13.5, "starts when the first is through"
    assert links.due(2, 1, 100, sent=10.0) == 11.5, "another pair"
    assert links.due(0, 1, 100, sent=20.0) == 21.5
    assert DirectLinks().due(0, 1, 100, sent=10.0) == 10.0


# --- ranks under mpirun

HERE = Path(__file__).parent / "mpi"
MPIRUN = Path(sys.executable).parent / "mpirun"


def launch(num_ranks: int, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a rank script on `num_ranks` ranks of this machine, each a process with one quiet CPU device."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen=false {QUICK_FLAGS}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parents[2]),
    }
    command = [MPIRUN, "-n", str(num_ranks), "--map-by", ":OVERSUBSCRIBE", sys.executable, HERE / script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.mpi
@pytest.mark.parametrize(("num_ranks", "shapes"), [(2, "1x1,1x1"), (4, "2x1,1x2"), (4, "1x2,1x1,1x1")])
def test_ranks_exchange_arrays_and_scalars(num_ranks: int, shapes: str) -> None:
    done = launch(num_ranks, "exchange.py", shapes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("OK mesh") == num_ranks


@pytest.mark.mpi
def test_ranks_train_a_small_program() -> None:
    done = launch(3, "train.py", "2x1,1x1", "nothing")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("OK mesh") == 3


@pytest.mark.mpi
def test_a_rank_that_raises_ends_the_job_with_its_traceback_first() -> None:
    start = time.monotonic()
    done = launch(3, "train.py", "2x1,1x1", "raise")
    assert done.returncode != 0 and time.monotonic() - start < 15
    assert done.stderr.index("[mesh 1, rank 2] this rank failed") == done.stderr.index("[mesh")
    assert done.stderr.count("Traceback") == 1
    assert (
        "FloatingPointError: made to fail in iteration 1, microbatch 1\nat mesh 1, instruction 5 of 12, microbatch 1: run loss"
        in done.stderr
    )
    assert "OK mesh" not in done.stdout


@pytest.mark.mpi
def test_a_lost_message_is_reported_by_the_watchdog() -> None:
    start = time.monotonic()
    done = launch(3, "train.py", "2x1,1x1", "drop")
    assert done.returncode != 0 and time.monotonic() - start < 30
    assert "watchdog: no instruction finished for" in done.stderr
    assert "recv value.1@1 <- mesh 0 tag 1" in done.stderr or "reduce [extra.0] -> [total.0]" in done.stderr
    assert 'transport.py", line' in done.stderr or 'execute.py", line' in done.stderr, "the stacks belong to the report"


@pytest.mark.mpi
def test_a_world_of_the_wrong_size_is_refused_with_the_way_to_start_it() -> None:
    done = launch(3, "exchange.py", "1x1,1x1")
    assert done.returncode != 0
    assert "LaunchError: MPI world has 3 ranks, the plan needs 2" in done.stderr and "mpirun -n 2 python" in done.stderr
