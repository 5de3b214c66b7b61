"""Which kind of device a rank gets, and how many GPUs its process sees, without CUDA being asked."""

from pathlib import Path

import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.devices import check_devices_here, chosen_gpus, local_device, visible_gpus
from alpa_hpc.launch.site import Platform, SiteOptions
from alpa_hpc.runtime.devices import CpuDevice, GpuDevice

CLUSTER = ClusterSpec("two nodes", 2, 4, DeviceSpec("gpu", 1 << 30, 1e12, 1e12, 1e11, 0.5), Link(1e10, 1e-6), Link(1e9, 1e-5))


def site(platform: Platform) -> SiteOptions:
    return SiteOptions(platform=platform, memory_fraction=0.9, preallocate=True, xla_flags=(), environment={})


def nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("chosen", "count"),
    [("0,1", 2), ("3", 1), ("0, 2 ,5", 3), ("", 0), ("NoDevFiles", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-8f2c,MIG-1a2b", 2)],
)
def test_cuda_visible_devices_counts_as_cuda_counts(chosen: str, count: int) -> None:
    assert chosen_gpus(chosen) == count
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_the_driver_lists_the_gpus_where_nothing_is_chosen(tmp_path: Path) -> None:
    listed = nvidia_smi(tmp_path, "echo 'GPU 0: Tesla V100 (UUID: GPU-1)'; echo 'GPU 1: Tesla V100 (UUID: GPU-2)'")
    assert visible_gpus(listed) == 2
    assert visible_gpus(listed | {"CUDA_VISIBLE_DEVICES": "1"}) == 1
    broken = nvidia_smi(tmp_path, "echo 'GPU access blocked by the operating system'; exit 9")
    assert visible_gpus(broken) == 0


def test_cuda_site_gives_gpus_and_cpu_site_never_looks(tmp_path: Path) -> None:
    listed = nvidia_smi(tmp_path, "echo 'GPU 0: Tesla V100 (UUID: GPU-1)'")
    assert local_device(site(Platform.CUDA), CLUSTER, listed) == GpuDevice(num_visible=1, per_node=4)
    assert local_device(site(Platform.CPU), CLUSTER, nvidia_smi(tmp_path, "sleep 1000")) == CpuDevice()


def test_cuda_site_without_gpu_says_what_hides_them(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"sees no GPU \(CUDA_VISIBLE_DEVICES is ''\).*--gpus-per-node.*site=cpu"):
        local_device(site(Platform.CUDA), CLUSTER, {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(LaunchError, match=r"sees no GPU \(the driver lists none\)"):
        local_device(site(Platform.CUDA), CLUSTER, nvidia_smi(tmp_path, "exit 9"))


def test_a_process_on_other_devices_than_the_sites_is_refused() -> None:
    check_devices_here(site(Platform.CPU), CLUSTER, {})
    with pytest.raises(LaunchError, match="sees no GPU"):
        check_devices_here(site(Platform.CUDA), CLUSTER, {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(LaunchError, match="jax device is a cpu, the site's devices are gpus"):
        check_devices_here(site(Platform.CUDA), CLUSTER, {"CUDA_VISIBLE_DEVICES": "0,1"})
