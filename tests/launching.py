"""What tests of the launch side share: options with nothing set, requests to measure, and commands of Slurm that a test writes."""

import os
from pathlib import Path
from typing import Any

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.launch.options import Chain, LauncherKind, LauncherOptions, SlurmOptions
from alpa_hpc.launch.paths import JobKind
from alpa_hpc.launch.submission import Submission
from alpa_hpc.plan.plan import StagePlan
from alpa_hpc.planner.requests import ProfileRequest
from alpa_hpc.profiling.options import Extent

LONE = Submesh(1, 1)


def slurm_options(**changes: Any) -> SlurmOptions:
    """Options that leave every flag out, but for `changes`."""
    values: dict[str, Any] = dict.fromkeys(("partition", "account", "qos", "constraint", "memory", "gres"), "")
    values |= {name: {} for name in ("additional", "plan", "profile", "train", "environment")}
    values |= {"time_minutes": 0, "cpus_per_task": 0, "setup": ()} | changes
    return SlurmOptions(**values)


def launcher_options(chain: Chain = Chain.INSIDE, *, wait: bool = False, **slurm: Any) -> LauncherOptions:
    """Slurm's launcher with these options."""
    return LauncherOptions(kind=LauncherKind.SLURM, max_ranks=8, wait=wait, chain=chain, slurm=slurm_options(**slurm))


def profile_request(key: str, submesh: Submesh = LONE) -> ProfileRequest:
    """A request for a stage on `submesh`."""
    extent = Extent.LONE if submesh == LONE else Extent.MESH
    shape = MeshShape(submesh.num_nodes, submesh.devices_per_node)
    return ProfileRequest(key, f"stage {key}", extent, StagePlan(0, 1, submesh, shape, (), False, (0,)), ({"a": "b"},))


def submission(kind: JobKind, *tasks: int, job_id: str = "12", submitted: float = 1.0) -> Submission:
    """A job, or an array where it has `tasks`."""
    return Submission(kind, tasks or (0,), bool(tasks), job_id, f"{kind.value}-demo", "#!/bin/bash\n", submitted)


def fake_command(folder: Path, name: str, body: str) -> dict[str, str]:
    """The environment in which the command `name` is a shell script of the test's."""
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
