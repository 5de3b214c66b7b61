"""(site, environment) -> one Finding for each thing that a run needs, with what to do where it is not as it should be.

Each check that touches a device, MPI, Slurm or a file system does so in a process of its own, bounded in time.
"""

import enum
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from alpa_hpc.commands.bounded import Ended, TimedOut, run_bounded
from alpa_hpc.commands.probes import FOUND
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.devices import check_visible, visible_gpus
from alpa_hpc.launch.mpirun import Place, Ranks, mpirun_command, rank_environment
from alpa_hpc.launch.python import import_folders
from alpa_hpc.launch.site import Platform, SiteOptions, host_environment, site_environment
from alpa_hpc.training.metrics import read_metrics

DEVICE_SECONDS, RANKS_SECONDS, SLURM_SECONDS, FOLDER_SECONDS = 90.0, 60.0, 15.0, 30.0
STAGE_SECONDS, TRAINING_SECONDS = 180.0, 240.0  # a GPU's first compilation takes its time; CPU machines need some seconds
NUM_STEPS = 3
ONE_DEVICE = (
    "cluster.num_nodes=1",
    "cluster.devices_per_node=1",
    "profiling=analytic",
    "search.num_best=1",
    "layers.num_layers=1",
    "training.batch_size=16",
    "schedule.num_microbatches=2",
)
SHORT_TRAINING = (
    "model.num_layers=1",
    "training.warmup_steps=0",
    "training.evaluate_every=0",
    f"training.num_steps={NUM_STEPS}",
)
INSTALL_CUDA = f"{sys.executable} -m pip install '.[cuda12]' -c constraints.txt (in the checkout)"
ADVICE = (  # what the output of a process has in it -> what to do
    ("Unknown flag", "site.xla_flags or $XLA_FLAGS has a flag that this jaxlib does not know: take it out."),
    ("driver version is insufficient", "the node's NVIDIA driver is too old for CUDA 12: it must be 525 or newer."),
    ("RESOURCE_EXHAUSTED", "the GPU's memory is taken: look for other processes by nvidia-smi, or lower site.memory_fraction."),
    ("out of memory", "the GPU's memory is taken: look for other processes by nvidia-smi, or lower site.memory_fraction."),
    ("Unable to load cu", "jax found other CUDA libraries than its own wheels': unset LD_LIBRARY_PATH, or load no CUDA module."),
    ("version mismatch", "jax found other CUDA libraries than its own wheels': unset LD_LIBRARY_PATH, or load no CUDA module."),
    ("No visible GPU", "ask Slurm for GPUs (--gpus-per-node), and look at CUDA_VISIBLE_DEVICES."),
    ("not in the list of known backends", INSTALL_CUDA),
    ("libmpi", "mpi4py and mpirun are of different MPIs: use the wheels of both, or build mpi4py against the site's MPI."),
)


class Verdict(enum.Enum):
    """What a check found."""

    OK = "ok"
    FAILED = "failed"
    ABSENT = "absent"
    """not there, and not needed"""
    SKIPPED = "skipped"
    """an earlier check failed without which this one cannot be made"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check: `found` in one line, `details` such as the end of a log, and what to do, empty where all is well."""

    verdict: Verdict
    found: str
    advice: str = ""
    details: str = ""


def check_python() -> Finding:
    """The interpreter, which all nodes must see at the same place."""
    return Finding(Verdict.OK, f"{platform.python_version()}, {sys.executable}, on {platform.node()}")


def check_packages(site: SiteOptions) -> Finding:
    """Versions of jax and of the plugin that the site needs, which must be equal."""
    needed = ["jax", "jaxlib", *(("jax-cuda12-plugin", "jax-cuda12-pjrt") if site.platform is Platform.CUDA else ())]
    versions = {name: _version(name) for name in needed}
    found = ", ".join(f"{name} {number or 'not installed'}" for name, number in versions.items())
    if not all(versions.values()):
        return Finding(Verdict.FAILED, found, INSTALL_CUDA)
    if len(set(versions.values())) > 1:
        return Finding(Verdict.FAILED, found, f"these must be of one version: {INSTALL_CUDA}")
    return Finding(Verdict.OK, found)


def check_gpus(environ: Mapping[str, str]) -> Finding:
    """The GPUs that the driver shows, without CUDA or jax."""
    try:
        count = check_visible(visible_gpus(environ), environ)
    except LaunchError as error:
        return Finding(Verdict.FAILED, "none is visible", str(error))
    query = ("nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader")
    if shutil.which(query[0], path=environ.get("PATH", "")) is None:
        return Finding(Verdict.OK, f"{count} visible; no nvidia-smi to ask for more")
    ended = run_bounded(query, environ, DEVICE_SECONDS)
    if isinstance(ended, TimedOut) or ended.code != 0:
        return Finding(
            Verdict.FAILED, f"{count} visible, but nvidia-smi fails", "The driver of this node is not well: use another.", ended.output
        )
    return Finding(Verdict.OK, f"{count} visible; name, memory, memory in use, driver:", details=ended.output)


def check_devices(site: SiteOptions, environ: Mapping[str, str]) -> Finding:
    """Open the site's devices and compute on each."""
    expected = "gpu" if site.platform is Platform.CUDA else "cpu"
    return _probe(("devices", expected), device_environment(site, environ), DEVICE_SECONDS)


def check_mpi(environ: Mapping[str, str]) -> Finding:
    """Start two ranks on CPU devices, which join one mesh and sum over it."""
    two = Ranks(2, 2, Place.THIS_MACHINE, host_environment())
    try:
        command = mpirun_command(two, probe_command(("ranks",)), environ)
    except LaunchError as error:
        return Finding(Verdict.FAILED, "no mpirun", str(error))
    ended = run_bounded(command, with_imports(rank_environment(two, environ)), RANKS_SECONDS)
    finding = read_probe(ended)
    return Finding(finding.verdict, f"{finding.found} ({command[0]})", finding.advice, finding.details)


def check_slurm(environ: Mapping[str, str]) -> Finding:
    """Slurm's commands and its controller; they are needed for launcher=slurm only."""
    programs = {name: shutil.which(name, path=environ.get("PATH", "")) for name in ("sbatch", "squeue", "scontrol", "sacct")}
    missing = [name for name, place in programs.items() if place is None and name != "sacct"]
    if missing:
        return Finding(Verdict.ABSENT, f"no {', '.join(missing)} on PATH", "launcher=slurm needs them; launcher=local does not.")
    ended = run_bounded((str(programs["scontrol"]), "show", "config"), environ, SLURM_SECONDS)
    if isinstance(ended, TimedOut) or ended.code != 0:
        said = _last_line(ended.output) or f"no answer in {SLURM_SECONDS:.0f} s"
        return Finding(
            Verdict.ABSENT, f"no controller answers: {said}", "launcher=slurm needs one; is this a login node, is SLURM_CONF right?"
        )
    facts = dict(re.findall(r"^(\w+)\s*= (.*)$", ended.output, re.MULTILINE))
    accounting = "sacct answers" if _answers((programs["sacct"] or "", "-n", "-X"), environ) else "no accounting (status does without)"
    found = f"{facts.get('SLURM_VERSION', '?')}, cluster {facts.get('ClusterName', '?')}, MaxArraySize {facts.get('MaxArraySize', '?')}"
    return Finding(Verdict.OK, f"{found}, {accounting}")


def check_folder(runs: Path, environ: Mapping[str, str]) -> Finding:
    """The folder of runs: writable, with renames and HDF5 files that read back as written."""
    finding = _probe(("folder", str(runs)), plain_environment(environ) | host_environment(), FOLDER_SECONDS)
    if finding.verdict is Verdict.FAILED:
        return Finding(
            finding.verdict,
            finding.found,
            f"choose a folder that all nodes see and you may write to, by --runs: {finding.advice}",
            finding.details,
        )
    return finding


def check_stage(site: SiteOptions, overrides: Sequence[str], environ: Mapping[str, str]) -> Finding:
    """Plan for one device, compile its stage for the site's device and time it there."""
    return _probe(("stage", *ONE_DEVICE, *overrides), device_environment(site, environ), STAGE_SECONDS)


def check_training(overrides: Sequence[str], environ: Mapping[str, str]) -> Finding:
    """Plan and train on one device as a user does, by the command line and mpirun; its folder stays only where it fails."""
    base = Path(tempfile.mkdtemp(prefix="alpa_hpc-doctor-"))
    command = (
        sys.executable,
        "-P",
        "-m",
        "alpa_hpc",
        "+experiment=quickstart",
        "launcher=local",
        f"runs={base}",
        *ONE_DEVICE,
        *SHORT_TRAINING,
        *overrides,
    )
    ended = run_bounded(command, plain_environment(environ), TRAINING_SECONDS)
    finding = _training_finding(ended, base)
    if finding.verdict is Verdict.OK:
        shutil.rmtree(base)
    return finding


def _training_finding(ended: Ended | TimedOut, base: Path) -> Finding:
    if isinstance(ended, TimedOut) or ended.code != 0:
        finding = read_probe(ended)
        return Finding(Verdict.FAILED, finding.found, f"{finding.advice} Its logs are in {base}.", finding.details)
    losses = [figures["loss"] for path in base.glob("*/*/metrics.jsonl") for figures in read_metrics(path)]
    found = f"{len(losses)} of {NUM_STEPS} steps, loss {', '.join(f'{loss:.3f}' for loss in losses)}"
    if len(losses) == NUM_STEPS and losses[-1] < losses[0]:
        return Finding(Verdict.OK, found)
    return Finding(Verdict.FAILED, found, f"The training ended well, but not with a falling loss over all steps. Look into {base}.")


def probe_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line of a probe."""
    return (sys.executable, "-P", "-m", "alpa_hpc.commands.probes", *arguments)


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment outside of any Slurm step or mpirun, which the checks' own mpirun would take for its surroundings."""
    foreign = ("SLURM_", "PMIX_", "PRTE_", "OMPI_COMM_WORLD_")
    return with_imports({name: value for name, value in environ.items() if not name.startswith(foreign)})


def device_environment(site: SiteOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process on the site's devices."""
    return plain_environment(environ) | site_environment(site, environ)


def with_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python finds what this process finds."""
    return {**environment, "PYTHONPATH": os.pathsep.join(import_folders())}


def read_probe(ended: Ended | TimedOut) -> Finding:
    """The finding of a process: what it says it found, or how it failed and what its output points to."""
    lines = [line for line in ended.output.splitlines() if line.strip()]
    tail = "\n".join(lines[-12:])
    advice = next((advice for needle, advice in ADVICE if needle in ended.output), "The end of its output is below.")
    match ended:
        case TimedOut(seconds=seconds):
            return Finding(Verdict.FAILED, f"no end after {seconds:.0f} s", advice, tail)
        case Ended(code=0):
            found = [line.partition(FOUND)[2] for line in lines if FOUND in line]
            return Finding(Verdict.OK, found[-1]) if found else Finding(Verdict.FAILED, "ended without a word", advice, tail)
        case Ended(code=code):
            return Finding(Verdict.FAILED, f"ended with exit code {code}: {_last_line(ended.output)}", advice, tail)


def _probe(arguments: Sequence[str], environment: Mapping[str, str], seconds: float) -> Finding:
    return read_probe(run_bounded(probe_command(arguments), environment, seconds))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _answers(command: tuple[str, ...], environ: Mapping[str, str]) -> bool:
    if not command[0]:
        return False
    ended = run_bounded(command, environ, SLURM_SECONDS)
    return isinstance(ended, Ended) and ended.code == 0


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else ""
