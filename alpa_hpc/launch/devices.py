"""(the site, the cluster, the environment) -> the kind of device that a rank drives, before jax or MPI has started.

GPUs are counted without CUDA: `jax.distributed.initialize` must come before anything that opens one.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.site import Platform, SiteOptions
from alpa_hpc.runtime.devices import CpuDevice, GpuDevice, LocalDevice, check_platform

LIST_SECONDS = 30.0  # `nvidia-smi -L` takes a second or two where the driver has to wake up


def local_device(site: SiteOptions, cluster: ClusterSpec, environ: Mapping[str, str]) -> LocalDevice:
    """The device of a rank on this node; LaunchError where the site has GPUs and this process sees none."""
    match site.platform:
        case Platform.CPU:
            return CpuDevice()
        case Platform.CUDA:
            return GpuDevice(check_visible(visible_gpus(environ), environ), cluster.devices_per_node)


def check_devices_here(site: SiteOptions, cluster: ClusterSpec, environ: Mapping[str, str]) -> None:
    """For a process without MPI that is on the site's devices already (`use_site`): LaunchError where jax opens others, or none."""
    import jax

    check_platform(local_device(site, cluster, environ), jax.devices()[0].platform)


def check_visible(num_visible: int, environ: Mapping[str, str]) -> int:
    """`num_visible` itself, unless it is 0: LaunchError then, with what hides the GPUs."""
    if num_visible == 0:
        chosen = environ.get("CUDA_VISIBLE_DEVICES")
        reason = "the driver lists none" if chosen is None else f"CUDA_VISIBLE_DEVICES is {chosen!r}"
        raise LaunchError(
            f"site=cuda, but this process sees no GPU ({reason}). Start it on a GPU node, with GPUs asked for (--gpus-per-node or "
            "--gres=gpu:N), or choose site=cpu. `python -m alpa_hpc doctor --site cuda` there checks the node."
        )
    return num_visible


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs CUDA would show this process: those of CUDA_VISIBLE_DEVICES where it is set, else those that the driver lists."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    return _listed_gpus(environ) if chosen is None else chosen_gpus(chosen)


def chosen_gpus(chosen: str) -> int:
    """How many devices a value of CUDA_VISIBLE_DEVICES names; as CUDA does, it stops at the first that names none."""
    count = 0
    for name in (part.strip() for part in chosen.split(",")):
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):  # "", "-1", Slurm's "NoDevFiles"
            break
        count += 1
    return count


def _listed_gpus(environ: Mapping[str, str]) -> int:
    """The driver's list leaves out what a job's cgroup hides; device files, the second best, do not."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if program is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=LIST_SECONDS, check=False, env=dict(environ))
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{program} -L did not answer within {LIST_SECONDS:.0f} s: the driver of this node hangs. Use another node."
        ) from error
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
