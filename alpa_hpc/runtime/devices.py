"""(a world rank, the node of every rank, the GPUs it sees) -> the one device that it drives.

World rank r is device r of the plan, which lies on node r // devices_per_node. All ranks of a node see all its GPUs (NCCL wants that);
each opens the one whose number is the rank's among those of its node. Nodes are MPI's, never Slurm's environment variables, which name
the node under mpirun and not the rank. Neither jax nor MPI is imported here: both must be told of the device before they start.
"""

from dataclasses import dataclass
from typing import assert_never

from alpa_hpc.errors import LaunchError


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The rank drives one host CPU device."""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """The rank drives one of the `num_visible` GPUs that its process sees; the plan has `per_node` devices on each node."""

    num_visible: int
    per_node: int


LocalDevice = CpuDevice | GpuDevice


def gpu_number(gpu: GpuDevice, rank: int, nodes: tuple[int, ...]) -> int:
    """Which of the GPUs it sees world rank `rank` drives; `nodes[r]` is the number of rank r's node, any number that its peers share.

    A machine may carry several nodes of the plan, as long as each has its GPUs. Raises LaunchError where a node of the plan is spread
    over machines, or where a machine has more ranks than GPUs.
    """
    for first in range(0, len(nodes), gpu.per_node):
        _check_together(range(len(nodes))[first : first + gpu.per_node], nodes, gpu.per_node)
    peers = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    if len(peers) > gpu.num_visible:
        raise LaunchError(
            f"{len(peers)} ranks (world ranks {_listed(peers)}) are on one node, and rank {rank} sees {gpu.num_visible} GPUs there; "
            f"each rank needs one of its own. Ask for {gpu.per_node} tasks and {gpu.per_node} GPUs a node (--ntasks-per-node, "
            "--gpus-per-node), and bind no GPUs to tasks: all ranks of a node must see all of its GPUs."
        )
    return peers.index(rank)


def check_platform(device: LocalDevice, platform: str) -> None:
    """Raise LaunchError where jax's device is of another kind than was asked for: a GPU job must not go on at a CPU's speed."""
    match device:
        case CpuDevice():
            expected, remedy = "cpu", "Set JAX_PLATFORMS=cpu for the ranks, or choose site=cuda to train on GPUs."
        case GpuDevice():
            expected, remedy = "gpu", "jax fell back to it. `python -m alpa_hpc doctor --site cuda` on this node says why."
        case _:
            assert_never(device)
    if platform != expected:
        raise LaunchError(f"this rank's jax device is a {platform}, the site's devices are {expected}s. {remedy}")


def _check_together(block: range, nodes: tuple[int, ...], per_node: int) -> None:
    if len({nodes[rank] for rank in block}) > 1:
        raise LaunchError(
            f"world ranks {_listed(block)} belong on one node of the plan ({per_node} devices a node), but mpirun spread them over "
            f"{len({nodes[rank] for rank in block})} nodes. Place ranks node by node: `mpirun --map-by ppr:{per_node}:node`, in an "
            f"allocation of {per_node} tasks a node (--ntasks-per-node={per_node})."
        )


def _listed(ranks: range | list[int]) -> str:
    return ", ".join(map(str, ranks))
