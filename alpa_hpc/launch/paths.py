"""(base folder, experiment name) -> RunPaths: the one place that knows how a run's files are called.

A run is a folder `BASE/NAME/ID/`, private to its owner (mode 0700), unique even when many start in the same second.
Every job gets this folder and nothing else; what jobs tell each other stands in it.
"""

import enum
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from alpa_hpc.errors import ConfigError, LaunchError, StoreError
from alpa_hpc.launch.files import fields_of, read_json, write_json

FORMAT = "alpa_hpc run"
VERSION = 1
COSTS_FOLDER = "costs"
SOLUTIONS_FOLDER = "solutions"
CALIBRATIONS_FOLDER = "calibrations"
_RESERVED = (COSTS_FOLDER, SOLUTIONS_FOLDER, CALIBRATIONS_FOLDER)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class JobKind(enum.Enum):
    """The jobs of a run; the value is the name of the script in `jobs/` and of the status file."""

    PLAN = "plan"
    PROFILE = "profile"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """All file names of the run in `root` (absolute); nothing is opened or created here."""

    root: Path

    def __post_init__(self) -> None:
        assert self.root.is_absolute(), f"a job may run in another folder, so the run folder must be absolute: {self.root}"

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.root.parent.name

    @property
    def marker(self) -> Path:
        """Says that this folder is a run of ours, and of which version."""
        return self.root / "run.json"

    @property
    def config(self) -> Path:
        """The composed configuration, as the run was started with it."""
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        """The parallel plan."""
        return self.root / "plan.json"

    @property
    def planning(self) -> Path:
        """What the planning job measured about itself (seconds of each step, counts), for `result`."""
        return self.root / "planning.json"

    @property
    def microbatches(self) -> Path:
        """The numbers of microbatches that were tried, and the one that was chosen, where the config leaves it to the planning job."""
        return self.root / "microbatches.json"

    @property
    def training(self) -> Path:
        """What the training job measured about itself, for `result`."""
        return self.root / "training.json"

    @property
    def result(self) -> Path:
        """The figures of the whole run."""
        return self.root / "result.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line and training step."""
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """The folder of the jobs' output, one folder a job below it."""
        return self.root / "logs"

    @property
    def costs(self) -> Path:
        """The cost store, shared by all runs under the same base folder: what one run measured, the next one reuses."""
        return self.root.parent.parent / COSTS_FOLDER

    @property
    def solutions(self) -> Path:
        """The solved runs of layers, shared likewise: what one planning job solved, the next one reuses."""
        return self.root.parent.parent / SOLUTIONS_FOLDER

    @property
    def known_plans(self) -> Path:
        """What searches found, shared likewise."""
        return self.solutions / "plans"

    @property
    def known_numbers(self) -> Path:
        """What numbers of microbatches give, shared likewise."""
        return self.solutions / "microbatches"

    @property
    def status_folder(self) -> Path:
        """The folder of the jobs' status files."""
        return self.root / "status"

    @property
    def submission_folder(self) -> Path:
        """The folder of the records of what was handed to Slurm."""
        return self.root / "submissions"

    def failures(self, kind: JobKind, task: int = 0) -> Path:
        """The folder of what ranks of one job wrote about their failures."""
        return self.root / "failures" / self.job_name(kind, task)

    @property
    def profile_folder(self) -> Path:
        """The folder of the requests that the planning job writes for its profiling tasks."""
        return self.root / "profile"

    def job_name(self, kind: JobKind, task: int = 0) -> str:
        """`plan`, `train`, `profile-0003`: the name of a job in file names."""
        return f"{kind.value}-{task:04d}" if kind is JobKind.PROFILE else kind.value

    def status(self, kind: JobKind, task: int = 0) -> Path:
        """The status file of one job."""
        return self.status_folder / f"{self.job_name(kind, task)}.json"

    def log_folder(self, kind: JobKind, task: int = 0) -> Path:
        """The folder of one job's output."""
        return self.logs / self.job_name(kind, task)

    def batch_log_folder(self, kind: JobKind) -> Path:
        """The folder of the output of batch jobs of one kind, beside the scripts that were submitted."""
        return self.logs / kind.value

    def profile_request(self, task: int) -> Path:
        """What profiling task `task` shall measure."""
        return self.profile_folder / f"request-{task:04d}.json"

    def profile_answer(self, task: int) -> Path:
        """What profiling task `task` has to say beside the rows in the cost store."""
        return self.profile_folder / f"answer-{task:04d}.json"


def calibrations_folder(runs: Path) -> Path:
    """What calibrations measured, and the clusters that were fitted to it, shared by all runs under the folder `runs`."""
    return runs / CALIBRATIONS_FOLDER


def calibrated_config(runs: Path, cluster: str) -> Path:
    """The config of a fitted cluster; `cluster=NAME` finds it there."""
    return calibrations_folder(runs) / f"{cluster}.yaml"


@dataclass(frozen=True, slots=True)
class Origin:
    """How a run came about: the words of its command line, and its sweep's id and its number there; the id is empty without a sweep."""

    overrides: tuple[str, ...] = ()
    sweep: str = ""
    number: int = 0


ALONE = Origin()


def new_run(base: Path, name: str, origin: Origin = ALONE) -> RunPaths:
    """Create the folder of a new run of experiment `name` under `base` and return its paths; two callers never get the same.

    `origin` is noted in its marker, so that people can tell the runs of a sweep apart.
    """
    if _NAME.fullmatch(name) is None or name in _RESERVED:
        raise ConfigError(f"{name!r} cannot name a run folder: use letters, digits, '.', '_' and '-', and none of {', '.join(_RESERVED)}")
    parent = base.expanduser().absolute() / name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        paths = RunPaths(_unique_folder(parent))
        for folder in (paths.status_folder, paths.logs, paths.profile_folder, paths.submission_folder):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make a run folder in {parent} ({error.strerror}): choose another place by runs=FOLDER") from error
    write_json(paths.marker, {"format": FORMAT, "version": VERSION, "name": name, **asdict(origin)})
    return paths


def run_origin(paths: RunPaths) -> Origin:
    """How a run came about, as far as its marker tells."""
    marker = read_json(paths.marker)
    with fields_of(paths.marker):
        overrides = tuple(str(word) for word in marker.get("overrides", ()))
        return Origin(overrides, str(marker.get("sweep", "")), int(marker.get("number", 0)))


def open_run(root: Path) -> RunPaths:
    """The paths of an existing run; LaunchError if it is absent or another user's, StoreError if it is not a run of ours."""
    paths = RunPaths(root.expanduser().absolute())
    if not paths.root.is_dir():
        raise LaunchError(f"there is no run folder {paths.root}. If it was made on another node, is it on a shared file system?")
    owner = paths.root.stat().st_uid
    if owner != os.geteuid():
        raise LaunchError(f"run folder {paths.root} belongs to user {owner}, this process to user {os.geteuid()}: start a run of your own")
    marker = read_json(paths.marker)
    if not (isinstance(marker, dict) and marker.get("format") == FORMAT and marker.get("version") == VERSION):
        raise StoreError(f"{paths.marker} is not that of an alpa_hpc run of version {VERSION}, found {marker!r}")
    return paths


def _unique_folder(parent: Path) -> Path:
    for _ in range(8):
        root = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        try:
            root.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return root
    raise LaunchError(f"could not make a new folder in {parent}: eight random names were taken")
