"""Property: wherever ranks are placed, each drives a GPU of its own that its process sees, or all are told why not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_hpc.errors import LaunchError
from alpa_hpc.runtime.devices import CpuDevice, GpuDevice, check_platform, gpu_number
from tests.quick import QUICK_FLAGS


def numbers(nodes: tuple[int, ...], per_node: int, num_visible: int) -> list[int]:
    return [gpu_number(GpuDevice(num_visible, per_node), rank, nodes) for rank in range(len(nodes))]


def test_ranks_placed_node_by_node_count_from_zero_on_each() -> None:
    assert numbers((0, 0, 0, 3, 3, 3), per_node=3, num_visible=3) == [0, 1, 2, 0, 1, 2]
    assert numbers((0, 0), per_node=2, num_visible=8) == [0, 1]


def test_one_machine_may_carry_several_nodes_of_the_plan() -> None:
    assert numbers((0,) * 8, per_node=4, num_visible=8) == list(range(8))


def test_a_node_of_the_plan_spread_over_machines_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"world ranks 0, 1 belong on one node .* spread them over 2 nodes.*--map-by ppr:2:node"):
        numbers((0, 1, 0, 1), per_node=2, num_visible=2)
    with pytest.raises(LaunchError, match="world ranks 2, 3 belong on one node"):
        numbers((0, 0, 0, 3), per_node=2, num_visible=4)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"4 ranks \(world ranks 0, 1, 2, 3\) are on one node, and rank 0 sees 2 GPUs"):
        numbers((0, 0, 0, 0), per_node=2, num_visible=2)
    with pytest.raises(LaunchError, match="bind no GPUs to tasks"):
        numbers((0, 0), per_node=2, num_visible=1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 6))
def test_no_two_ranks_share_a_gpu(places: list[int], per_node: int, num_visible: int) -> None:
    nodes = tuple(places)
    try:
        chosen = numbers(nodes, per_node, num_visible)
    except LaunchError:
        return
    assert len(set(zip(nodes, chosen, strict=True))) == len(nodes)
    assert all(0 <= number < num_visible for number in chosen)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_the_expected_placement_is_never_refused(num_nodes: int, per_node: int, spare: int) -> None:
    nodes = tuple(rank // per_node * per_node for rank in range(num_nodes * per_node))
    assert numbers(nodes, per_node, per_node + spare) == [rank % per_node for rank in range(len(nodes))]


def test_the_wrong_kind_of_device_is_refused() -> None:
    check_platform(CpuDevice(), "cpu")
    check_platform(GpuDevice(1, 1), "gpu")
    with pytest.raises(LaunchError, match="jax device is a cpu, the site's devices are gpus.*doctor --site cuda"):
        check_platform(GpuDevice(1, 1), "cpu")
    with pytest.raises(LaunchError, match="jax device is a gpu, the site's devices are cpus"):
        check_platform(CpuDevice(), "gpu")


# --- ranks under mpirun

RANKS = Path(__file__).parent / "mpi" / "gpu_numbers.py"


def ranks_say(num_visible: int, per_node: int) -> list[str]:
    environment = {**os.environ, "XLA_FLAGS": QUICK_FLAGS, "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1", "PYTHONPATH": str(RANKS.parents[3])}
    # What Slurm's environment says under mpirun is the node's number, and must not count.
    environment |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    command = [Path(sys.executable).parent / "mpirun", "-n", "4", "--map-by", ":OVERSUBSCRIBE", sys.executable, RANKS]
    done = subprocess.run(
        [*command, str(num_visible), str(per_node)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.mpi
def test_each_rank_tells_jax_of_its_own_gpu_and_refuses_a_cpu_in_its_place() -> None:
    said = ranks_say(num_visible=4, per_node=2)
    assert [line[: len("rank 0 GPU 0")] for line in said] == [f"rank {rank} GPU {rank}" for rank in range(4)]
    assert all("jax device is a cpu, the site's devices are gpus" in line for line in said)


@pytest.mark.mpi
def test_ranks_beyond_the_gpus_of_their_machine_are_refused_before_jax_starts() -> None:
    said = ranks_say(num_visible=2, per_node=2)
    assert all("GPU all: 4 ranks (world ranks 0, 1, 2, 3) are on one node" in line for line in said) and len(said) == 4
