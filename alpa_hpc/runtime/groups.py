"""Process groups: (the world of MPI ranks, the devices of each mesh) -> this rank's mesh, as its own jax process group (paper, section 6).

One rank a device: world rank r drives device r of the plan. COMM_WORLD coordinates; each mesh calls `jax.distributed.initialize` for
itself, so XLA builds one set of communicators (NCCL or gloo) a mesh. Rank facts come from MPI and the plan alone: what Slurm's environment
says under mpirun is the node's number, not the rank's.
"""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import assert_never

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from mpi4py import MPI

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.errors import LaunchError
from alpa_hpc.runtime.arrays import AXIS_NAMES
from alpa_hpc.runtime.devices import CpuDevice, GpuDevice, LocalDevice, check_platform, gpu_number


@dataclass(frozen=True, slots=True)
class MeshContext:
    """A rank's place: its mesh (axes "x", "y"), its device there (row * cols + col), and the world ranks of all meshes' devices (`ranks`).

    `world` is a communicator of our own over all ranks; `tag_limit` is the largest message tag that MPI takes.
    """

    mesh_index: int
    mesh: Mesh
    local_device: int
    rank: int
    ranks: tuple[tuple[int, ...], ...]
    world: MPI.Intracomm
    tag_limit: int


def join_mesh(ranks: tuple[tuple[int, ...], ...], shapes: tuple[MeshShape, ...], device: LocalDevice) -> MeshContext:
    """Join this rank's mesh. `ranks[m]` are the world ranks of mesh m's devices in row-major order, `shapes[m]` its logical shape.

    Collective over all ranks, to be called before anything touches a jax device. From here on an uncaught exception on any rank ends the
    job. Raises LaunchError where the world has another size than the plan, where ranks are placed otherwise than their GPUs need, or where
    jax opens another kind of device than `device`.
    """
    world = MPI.COMM_WORLD
    abort_on_error(f"rank {world.rank}")
    check_world(world.size, ranks)
    mesh_index = next(index for index, members in enumerate(ranks) if world.rank in members)
    abort_on_error(f"mesh {mesh_index}, rank {world.rank}")
    local_device = ranks[mesh_index].index(world.rank)
    group = world.Split(mesh_index, local_device)
    device_number = choose_device(device, world.rank, nodes_of_ranks(world))
    if group.size > 1:
        _initialize_jax(group, device_number)
    shape = shapes[mesh_index]
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    check_platform(device, devices[0].platform)
    assert len(devices) == shape.num_devices, (
        f"mesh {mesh_index} has {len(devices)} jax devices for shape {shape}; one a process was asked for"
    )
    mesh = Mesh(np.array(devices).reshape(shape.sizes), AXIS_NAMES, axis_types=(AxisType.Auto, AxisType.Auto))
    tag_limit = world.Get_attr(MPI.TAG_UB)
    assert isinstance(tag_limit, int), "MPI always has a tag limit"
    return MeshContext(mesh_index, mesh, local_device, world.rank, ranks, world.Dup(), tag_limit)


def check_world(size: int, ranks: tuple[tuple[int, ...], ...]) -> None:
    """Raise LaunchError unless the world has just the ranks of the plan; the message says how to start them."""
    members = sorted(rank for mesh in ranks for rank in mesh)
    assert members == list(range(len(members))), f"the meshes must share out the ranks 0 to {len(members) - 1}, each once, found {ranks}"
    if size != len(members):
        alone = " (each process is alone in its world: it was started without mpirun, or by an srun without PMIx)" if size == 1 else ""
        raise LaunchError(
            f"MPI world has {size} ranks, the plan needs {len(members)}, one a device{alone}. "
            "Start it from the batch shell, not inside srun:\n"
            f"    mpirun -n {len(members)} python jobs/train_rank.py RUN_DIR"
        )


def abort_on_error(where: str) -> None:
    """Make an uncaught exception, on any thread, print its traceback headed by `where` and end the whole MPI job.

    Without it the other ranks would wait for ever, and this one would too, in MPI_Finalize.
    """

    def abort(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"[{where}] this rank failed and ends the job:\n{text}")
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = abort
    threading.excepthook = lambda failure: abort(failure.exc_type, failure.exc_value, failure.exc_traceback)


def nodes_of_ranks(world: MPI.Comm) -> tuple[int, ...]:
    """The node of each world rank, named by its first rank. MPI's nodes are those of mpirun, virtual ones on one host included."""
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    nodes = tuple(world.allgather(node.bcast(world.rank)))
    node.Free()
    return nodes


def choose_device(device: LocalDevice, rank: int, nodes: tuple[int, ...]) -> int:
    """Let jax see this rank's one device and return its number. `nodes[r]` is the node of world rank r. LaunchError as `gpu_number`."""
    match device:
        case CpuDevice():
            jax.config.update("jax_num_cpu_devices", 1)
            let_helpers_wait(nodes.count(nodes[rank]))
            return 0
        case GpuDevice():
            number = gpu_number(device, rank, nodes)
            jax.config.update("jax_cuda_visible_devices", str(number))
            return number
        case _:
            assert_never(device)


def let_helpers_wait(num_peers: int) -> None:
    """Have no thread that this one starts from now on take a core from another as soon as it is woken, if `num_peers` ranks have one each.

    gloo's thread for sockets asks again and again for a lock that the thread holds which sends: where it took that one's core, until its
    time slice is over. A step of two data-parallel ranks on two cores takes 0.28 s so, and 0.19 s with this; eight ranks on them, which
    need each other's cores at once, take longer with this (Linux 6.18, jaxlib 0.10.2). Linux only.
    """
    if sys.platform == "linux" and num_peers <= len(os.sched_getaffinity(0)):
        with suppress(PermissionError):  # a container may forbid it; then all is as it was
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _initialize_jax(group: MPI.Comm, device_number: int) -> None:
    """One jax process group of the ranks of `group`; its first rank hosts the coordinator.

    All arguments are given and detection is off: jax would else take the node's number that Slurm shows under mpirun for the rank's.
    """
    nodes: list[str] = group.allgather(MPI.Get_processor_name())
    with reserved_port() as port:
        address = group.bcast(f"{coordinator_host(nodes)}:{port}" if group.rank == 0 else "")
        jax.distributed.initialize(address, group.size, group.rank, local_device_ids=[device_number], cluster_detection_method="deactivate")


@contextmanager
def reserved_port() -> Generator[int]:
    """A free TCP port that stays ours: the socket is bound but does not listen, and the coordinator may bind beside it (SO_REUSEPORT).

    To pick a number, close and bind again later loses a race now and then: the system gives the number to someone else in between.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def coordinator_host(nodes: list[str]) -> str:
    """This node's address as the others of the group reach it: loopback where all are on one node, else that of the default route."""
    return "127.0.0.1" if len(set(nodes)) == 1 else check_reachable(routed_address(), nodes)


def routed_address() -> str:
    """The address this node uses for traffic that leaves it; a datagram socket finds the route without sending."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a documentation address: never on this network, so the default route is taken
        return probe.getsockname()[0]


def check_reachable(address: str, nodes: list[str]) -> str:
    """The address, unless it is a loopback one, which the other nodes cannot reach."""
    if address.startswith("127."):
        raise LaunchError(
            f"node {nodes[0]} has only the loopback address {address} for a mesh over nodes {sorted(set(nodes))}; "
            "the others cannot reach it. Check the node's default route and interface."
        )
    return address
