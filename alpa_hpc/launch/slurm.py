"""Batch job -> sbatch -> a Submission on record: the one place that hands something to Slurm.

The record is written before and after sbatch is asked (`launch.submission`); the environment of the asking process stays behind, since
sbatch would hand it on to the job, and a job's own variables (SLURM_NTASKS, ranks of an mpirun) mislead the next one.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.batch import BatchJob, batch_script, job_name
from alpa_hpc.launch.files import write_text
from alpa_hpc.launch.options import SlurmOptions
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.launch.queue import cancel, find_by_name
from alpa_hpc.launch.submission import Submission, write_submission

SBATCH_SECONDS = 60.0  # a controller under load answers late; beyond this it is down
DEFAULT_MAX_ARRAY_SIZE = 1001  # Slurm's own default, where the site's cannot be read

CONTROLLER_SECONDS = 300.0  # that a controller may be away, before what was to be submitted has failed

_AWAY = re.compile("Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted")
_FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "PRTE_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE")
_KEPT = (
    "SLURM_CONF",  # without these two the commands would not find their cluster
    "SLURM_CLUSTERS",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)
_DEFAULTS = {"partition": "SBATCH_PARTITION", "account": "SBATCH_ACCOUNT", "qos": "SBATCH_QOS", "constraint": "SBATCH_CONSTRAINT"}


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a job, a step or an mpirun says about itself; how to reach Slurm stays."""
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}


def with_site_defaults(options: SlurmOptions, environ: Mapping[str, str]) -> SlurmOptions:
    """Options with what a user's SBATCH_ variables say where the config says nothing: they then stand in the script, to be seen.

    The job is given those variables, too, since it submits jobs itself.
    """
    found = {name: environ.get(variable, "") for name, variable in _DEFAULTS.items()}
    used = {name: value for name, value in found.items() if value and not getattr(options, name)}
    variables = {_DEFAULTS[name]: value for name, value in used.items()}
    return replace(options, **used, environment={**variables, **options.environment})


def check_sbatch(environ: Mapping[str, str]) -> None:
    """Raise LaunchError where jobs cannot be submitted from."""
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        raise LaunchError(
            "there is no sbatch on PATH: launcher=slurm submits jobs, so start it on a login node of the cluster. "
            "mode=dry_run prints the scripts without it, launcher=local runs on this machine alone."
        )


def refusal_ahead(job: BatchJob, paths: RunPaths, options: SlurmOptions, environ: Mapping[str, str]) -> str:
    """What sbatch would have against a job that is submitted later, by `--test-only`; empty where nothing, or where it cannot be asked.

    It speaks of Slurm as it is now: a node that is down may be up by then.
    """
    try:
        done = _asked(("sbatch", "--test-only"), environ, batch_script(job, paths, options))
    except subprocess.TimeoutExpired:
        return ""
    return "" if done.returncode == 0 or _AWAY.search(done.stderr) else " ".join(done.stderr.split())


def submit(job: BatchJob, paths: RunPaths, options: SlurmOptions, environ: Mapping[str, str]) -> tuple[Submission, ...]:
    """Hand a job to Slurm: one submission, or several where an array is longer than the site allows.

    Raises LaunchError with sbatch's own words if it refuses.
    """
    check_sbatch(environ)
    limit = max_array_size(environ) if job.is_array else 1
    submitted: list[Submission] = []
    for first in range(0, len(job.tasks), limit):
        try:
            submitted.append(_submit(replace(job, tasks=job.tasks[first : first + limit]), paths, options, environ))
        except LaunchError:
            cancel([one.job_id for one in submitted])  # the caller knows nothing of them, so nobody would wait for them
            raise
    return tuple(submitted)


def _submit(job: BatchJob, paths: RunPaths, options: SlurmOptions, environ: Mapping[str, str]) -> Submission:
    script = batch_script(job, paths, options)
    name = job_name(paths, job)
    asked = Submission(job.kind, tuple(job.tasks), job.is_array, "", name, script, time.time())
    folder = paths.batch_log_folder(job.kind)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a job whose log has no folder dies without a word
    path = folder / f"{asked.file_name}.sh"
    write_text(path, script)
    for task in job.tasks:
        paths.status(job.kind, task).unlink(missing_ok=True)  # the account of an earlier attempt must not be taken for this one's
    write_submission(paths, asked)
    try:
        submitted = replace(asked, job_id=_sbatch_patiently(path, name, environ))
    except LaunchError as refused:
        write_submission(paths, replace(asked, refusal=str(refused)))
        raise
    write_submission(paths, submitted)
    return submitted


def _sbatch_patiently(script: Path, name: str, environ: Mapping[str, str]) -> str:
    """Ask again while the controller is away: it is restarted now and then, and a run shall not be lost by that."""
    give_up, pause = time.monotonic() + CONTROLLER_SECONDS, 2.0
    while True:
        try:
            return _sbatch(script, name, environ)
        except ControllerAwayError:
            if time.monotonic() + pause > give_up:
                raise
        time.sleep(pause)
        found = (find_by_name([name]) or {}).get(name)  # it may have got through all the same
        if found:
            return found
        pause = min(2 * pause, 30.0)


class ControllerAwayError(LaunchError):
    """sbatch could not reach Slurm's controller; nothing was submitted."""


def _sbatch(script: Path, name: str, environ: Mapping[str, str]) -> str:
    try:
        done = _asked(("sbatch", "--parsable", str(script)), environ)
    except subprocess.TimeoutExpired:
        return _submitted_late(name)
    number = done.stdout.strip().partition(";")[0]  # "12" or "12;cluster"
    if _AWAY.search(done.stderr):
        raise ControllerAwayError(f"sbatch could not submit {script}: {done.stderr.strip()}. Is the controller up (`scontrol ping`)?")
    if done.returncode != 0 or not number.isdecimal():
        raise LaunchError(f"sbatch refused {script}: {done.stderr.strip() or done.stdout.strip() or 'without a word'}")
    return number


def _submitted_late(name: str) -> str:
    """The number of a job that may have reached the queue although sbatch did not say so in time."""
    found = (find_by_name([name]) or {}).get(name, "")
    if not found:
        raise LaunchError(
            f"sbatch did not answer in {SBATCH_SECONDS:.0f} s. Is the Slurm controller up (`scontrol ping`)? "
            f"Should the job reach the queue all the same, `squeue --me --name {name}` shows it."
        )
    return found


def max_array_size(environ: Mapping[str, str]) -> int:
    """How many tasks an array may have here; Slurm's default where it cannot be asked."""
    try:
        done = _asked(("scontrol", "show", "config"), environ)
    except (OSError, subprocess.TimeoutExpired):
        return DEFAULT_MAX_ARRAY_SIZE
    return parse_max_array_size(done.stdout)


def _asked(command: Sequence[str], environ: Mapping[str, str], given: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a command of Slurm's, with `given` on its standard input."""
    environment = clean_environment(environ)
    return subprocess.run(
        command, env=environment, input=given, capture_output=True, text=True, errors="replace", timeout=SBATCH_SECONDS, check=False
    )


def parse_max_array_size(config: str) -> int:
    """MaxArraySize in the output of `scontrol show config`. Indices stay below it, so it is the most tasks that an array can have."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE)
    size = int(found[1]) if found else DEFAULT_MAX_ARRAY_SIZE
    if size < 1:
        raise LaunchError("this cluster allows no job arrays (MaxArraySize=0): use launcher.chain=login, which profiles without them")
    return size
