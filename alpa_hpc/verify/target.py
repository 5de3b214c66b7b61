"""CheckTarget -> a mesh to compile for, which need not be here: devices of this process, or GPUs that XLA only has described.

With the wheels of jax's CUDA plugin XLA compiles for a described GPU on a machine that has neither a GPU nor a driver.
"""

import importlib.util
import os
from contextlib import suppress
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.errors import ConfigError, LaunchError
from alpa_hpc.sharding.collectives import AXIS_NAMES
from alpa_hpc.stages.options import CheckTarget


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuDescription:
    """What XLA asks of a GPU before it compiles for it. Memory in bytes, rates in bytes/s and GHz; the cuDNN that will be there."""

    name: str
    capability: tuple[int, int]
    memory: int
    memory_bandwidth: int
    clock_ghz: float
    num_cores: int
    units_per_core: int
    threads_per_core: int
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    cudnn: tuple[int, int, int] = (9, 10, 2)

    def text(self) -> str:
        """XLA's `GpuTargetConfigProto`, as text."""
        (major, minor), (dnn_major, dnn_minor, dnn_patch) = self.capability, self.cudnn
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {self.num_cores} fpus_per_core: {self.units_per_core} threads_per_core_limit: {self.threads_per_core}
  clock_rate_ghz: {self.clock_ghz} memory_bandwidth: {self.memory_bandwidth} device_memory_size: {self.memory}
  l2_cache_size: {self.l2_cache}
  shared_memory_per_core: {self.shared_memory_per_core} shared_memory_per_block_optin: {self.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {dnn_major} minor: {dnn_minor} patch: {dnn_patch} }}
device_description_str: "{self.name}"
"""


GPUS = {
    # NVIDIA H100 SXM5 data sheet and "CUDA C++ Programming Guide", compute capabilities
    CheckTarget.H100: GpuDescription(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        memory=84_942_979_072,
        memory_bandwidth=3_352_320_000_000,
        clock_ghz=1.98,
        num_cores=132,
        units_per_core=128,
        threads_per_core=2048,
        l2_cache=52_428_800,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
    ),
}
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def check_compiler(target: CheckTarget) -> None:
    """Refuse a target that this installation cannot compile for. Raises ConfigError, which says what to install."""
    if target in GPUS and not has_gpu_compiler():
        raise ConfigError(
            f"search.check_target={target.value} compiles the plan for GPUs, which need not be here, but the wheels of jax's CUDA plugin "
            "must be: pip install '.[gpu-check]' -c constraints.txt"
        )


def has_gpu_compiler() -> bool:
    """Whether the wheels are installed that compile for GPUs."""
    return any(map(_is_installed, PLUGINS))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # no plugin at all: not even the package around them
        return False


def described_mesh(target: CheckTarget, submesh: Submesh, shape: MeshShape) -> Mesh:
    """A mesh of `shape` to compile for: of devices like `target` in nodes of `submesh`, or of this process's CPU devices.

    Raises:
        ConfigError: the wheels that compile for GPUs are missing.
        LaunchError: this process has fewer CPU devices, or jax has dropped the plugin.
    """
    check_compiler(target)
    devices = _described_gpus(GPUS[target], submesh) if target in GPUS else _cpu_devices(submesh.num_devices)
    return Mesh(np.array(devices).reshape(shape.sizes), AXIS_NAMES)


def prepare_target(target: CheckTarget, num_devices: int) -> None:
    """Before anything else uses jax: see that the compiler is here, and have the CPU pose as so many devices. Raises ConfigError.

    Where nobody said on what jax is to run, it runs on the CPU: else it drops its CUDA plugin where there is no driver.
    """
    check_compiler(target)
    if target is CheckTarget.CPU:
        with suppress(RuntimeError):  # jax was used already: `described_mesh` says if there are too few
            jax.config.update("jax_num_cpu_devices", num_devices)
    if target in GPUS and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def _described_gpus(gpu: GpuDescription, submesh: Submesh) -> list[object]:
    nodes = f"1x{submesh.num_nodes}x{submesh.devices_per_node}"
    try:
        described = topologies.get_topology_desc(nodes, "cuda", topology=nodes, target_config=gpu.text())
    except NotImplementedError as error:
        raise LaunchError(
            f"jax has dropped its CUDA plugin, which compiles for {gpu.name}: it looked for a driver when jax started, and found none. "
            "Set JAX_PLATFORMS=cpu"
        ) from error
    return list(described.devices)


def _cpu_devices(count: int) -> list[object]:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise LaunchError(
            f"search.check_target=cpu compiles for {count} CPU devices, this process has {len(devices)}: jax was started before the check "
            f"could ask for more. Set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return list(devices[:count])
