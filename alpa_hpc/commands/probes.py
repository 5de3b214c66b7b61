"""What the doctor has done in processes of their own: `python -m alpa_hpc.commands.probes NAME [ARGUMENT ...]` -> lines, and an exit code.

A broken CUDA installation ends or hangs the process that touches it, and so does a file system that does not answer. The last line that
starts with FOUND says what was found; a failure is the traceback.
"""

import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

FOUND = "found: "


def main(name: str, *arguments: str) -> None:
    """Run the probe called `name`; every exception is its finding, so none is caught."""
    probes = {"devices": devices, "ranks": ranks, "folder": folder, "stage": stage}
    found = probes[name](*arguments)
    sys.stdout.write(f"{FOUND}{found}\n")


def devices(expected_platform: str) -> str:
    """Open every device of the default backend and multiply matrices on each."""
    import jax
    import jax.numpy as jnp

    opened = jax.devices()
    if opened[0].platform != expected_platform:
        raise RuntimeError(f"jax opened {opened[0].platform} devices, expected {expected_platform}: it fell back")
    for device in opened:
        ones = jax.device_put(jnp.ones((256, 256)), device)
        total = float((ones @ ones).sum())
        if total != 256.0**3:
            raise RuntimeError(f"{device} multiplies wrongly: the sum of a product of ones is {total}, expected {256.0**3}")
    version = " ".join(opened[0].client.platform_version.split())
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in opened]
    memory = f", {min(limits) / 1e9:.1f} GB for XLA on each" if min(limits) else ""
    return f"{len(opened)} x {opened[0].device_kind} ({version}){memory}"


def ranks() -> str:
    """As one of two ranks on CPU devices: join a mesh by MPI, and sum over it."""
    import jax
    import numpy as np

    from alpa_hpc.cluster.hardware import MeshShape
    from alpa_hpc.runtime.arrays import place, replicate
    from alpa_hpc.runtime.devices import CpuDevice
    from alpa_hpc.runtime.groups import join_mesh
    from alpa_hpc.runtime.instructions import Layout
    from alpa_hpc.sharding.spec import Spec

    context = join_mesh(((0, 1),), (MeshShape(1, 2),), CpuDevice())
    layout = Layout((2,), "float32", Spec(((1,),)), MeshShape(1, 2))
    own = place(layout, context.mesh, [np.full(1, context.rank + 1.0, np.float32)])
    scale = replicate(np.array(10, np.float32), context.mesh)
    total = float(jax.jit(lambda values, factor: (values * factor).sum())(own, scale))
    if total != 30.0:
        raise RuntimeError(f"the sum over two ranks is {total}, expected 30")
    return f"{context.world.size} ranks, a sum over their mesh is right"


def folder(path: str) -> str:
    """Write, sync, rename and read back in a folder, a shard of the cost store included; all of it is removed again."""
    base = Path(path)
    base.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=".doctor-", dir=base))
    try:
        began = time.monotonic()
        _write_and_rename(own)
        _shard_round_trip(own / "costs")
        seconds = time.monotonic() - began
    finally:
        shutil.rmtree(own)
    return f"{base} ({_file_system(base)}, {shutil.disk_usage(base).free / 1e9:.0f} GB free), written and read back in {seconds:.2f} s"


def stage(*overrides: str) -> str:
    """Plan the quickstart's model for one device, compile its one stage for the site's device and time it there."""
    import jax

    from alpa_hpc.config import compose_experiment
    from alpa_hpc.experiment import plan_run
    from alpa_hpc.launch.paths import new_run
    from alpa_hpc.parts import prepared
    from alpa_hpc.planner.lookup import stages_of_plan
    from alpa_hpc.profiling.measure import time_function
    from alpa_hpc.runtime.lone import example, lone_tasks
    from alpa_hpc.train_job import read_plan

    config = compose_experiment("quickstart", ("mode=plan", *overrides))
    with tempfile.TemporaryDirectory(prefix="alpa_hpc-doctor-") as base:
        paths = new_run(Path(base), config.name)
        paths.config.write_text(config.resolved, encoding="utf-8")
        plan_run(paths)
        plan = read_plan(paths)
    step = prepared(config).step
    (only,) = stages_of_plan(plan, step, config.cluster)
    timed = {task.name: time_function(task.function, tuple(map(example, task.arguments)), 3) for task in lone_tasks(step, only)}
    compiling = sum(one.compile_seconds for one in timed.values())
    forward, backward = (1e3 * min(timed[name].seconds) for name in ("forward", "backward"))
    return f"forward {forward:.1f} ms, backward {backward:.1f} ms, compiled in {compiling:.1f} s on {jax.devices()[0].device_kind}"


def _write_and_rename(own: Path) -> None:
    temporary, target = own / ".writing", own / "written"
    with temporary.open("wb") as stream:
        stream.write(b"x" * 65536)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(target)
    if [entry.name for entry in own.iterdir()] != ["written"] or target.stat().st_size != 65536:
        raise RuntimeError(f"a file renamed in {own} is not there as it was written")


def _shard_round_trip(store: Path) -> None:
    from alpa_hpc.profiling.store import ProfileRow, read_store, write_shard

    row = ProfileRow("0" * 64, "doctor", (1.0,), (2.0,), (math.pi,), 4.0, "host", os.getpid(), time.time(), "doctor", "none")
    write_shard(store, [row])
    if read_store(store).rows != {row.key: row}:
        raise RuntimeError(f"an HDF5 shard in {store} does not read back as it was written")


def _file_system(path: Path) -> str:
    """The kind of file system that holds `path`, as the kernel calls it (nfs4, lustre, ext4, ...)."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    holding = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
