"""Ranks that ask for GPUs where jax has none: each says which one it chose, and that it was refused."""

import sys

import jax

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.errors import LaunchError
from alpa_hpc.runtime.devices import GpuDevice
from alpa_hpc.runtime.groups import join_mesh


def main(num_visible: str, per_node: str) -> None:
    """Two meshes of two ranks each."""
    try:
        join_mesh(((0, 1), (2, 3)), (MeshShape(1, 2), MeshShape(2, 1)), GpuDevice(int(num_visible), int(per_node)))
    except LaunchError as error:
        from mpi4py import MPI

        chosen: str = jax.config.read("jax_cuda_visible_devices")
        sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} GPU {chosen}: {error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
