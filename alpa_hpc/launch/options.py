"""The knobs of launching: who starts the jobs, and what Slurm is asked for."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from alpa_hpc.errors import ConfigError


class LauncherKind(enum.Enum):
    """Who starts the jobs of a run."""

    LOCAL = "local"
    """processes of this machine (submitit's local executor); training by mpirun"""
    INPROCESS = "inprocess"
    """this process, on virtual devices"""
    SLURM = "slurm"
    """sbatch"""


class Chain(enum.Enum):
    """Who submits the training job: sites differ in what they allow."""

    INSIDE = "inside"
    """the planning job, when it knows the plan; it submits the profiling arrays, too"""
    DEPENDENCY = "dependency"
    """the command itself, at once, to start after the planning job has ended well; profiling stays inside the planning job"""
    LOGIN = "login"
    """the command itself, when the planning job has ended well: it stays until then; profiling stays inside the planning job"""


Flags = dict[str, str | int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What sbatch is asked for; an empty text or a 0 leaves the flag out, so that the site's default holds.

    time_minutes:  limit of each job
    memory:        of each node, such as "64G"; some sites refuse the flag
    gres:          generic resources of each node, such as "gpu:v100:8"; empty: --gpus-per-node by the cluster's devices where they are GPUs
    additional:    any further sbatch flag of all jobs by its long name without dashes, such as {exclude: node7}; it also replaces a flag
                   that stands here already, and an empty text takes that away
    plan, profile, train: the same for the jobs of one kind, such as plan: {partition: cpu}
    setup:         shell lines before each job, such as "module load cuda"
    environment:   variables for all jobs and ranks, such as {NCCL_DEBUG: WARN}
    """

    partition: str
    account: str
    qos: str
    constraint: str
    time_minutes: int
    memory: str
    gres: str
    cpus_per_task: int
    additional: Flags
    plan: Flags
    profile: Flags
    train: Flags
    setup: tuple[str, ...]
    environment: Flags

    def __post_init__(self) -> None:
        for name in ("time_minutes", "cpus_per_task"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a number >= 0 (0 leaves the flag out)")
        for name in ("additional", "plan", "profile", "train"):
            _check_flags(name, getattr(self, name))
        for name, value in self.environment.items():
            if _VARIABLE.fullmatch(name) is None:
                raise ConfigError(f"environment has {name!r}, expected the name of a variable: letters, digits and '_'")
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise ConfigError(f"environment.{name} is {value!r}, expected a text or a whole number: put it in quotes")


def _check_flags(where: str, flags: Mapping[str, str | int]) -> None:
    dashed = [name for name in flags if name.startswith("-") or "=" in name]
    if dashed:
        raise ConfigError(f"{where} has the flags {dashed}, expected long names without dashes, such as {{exclude: node7}}")
    odd = {name: value for name, value in flags.items() if not isinstance(value, str | int)}
    if odd:
        raise ConfigError(f"{where} has {odd}, expected a text, a whole number or true for each flag: put it in quotes")
    lines = [name for name, value in flags.items() if "\n" in f"{name}{value}"]
    if lines:
        raise ConfigError(f"{where} has a line break in the flags {lines}: a flag is one line of the batch script")
    ours = sorted(OUR_FLAGS & {name.replace("_", "-") for name in flags})
    if ours:
        raise ConfigError(f"{where} sets {ours}, which follow from the plan and the run folder and cannot be chosen")


_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
OUR_FLAGS = {
    *("array", "output", "error", "open-mode", "nodes", "ntasks", "ntasks-per-node", "job-name", "dependency", "wrap", "parsable"),
    *("requeue", "no-requeue"),  # no job of ours can go on where it stopped
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherOptions:
    """Who starts the jobs.

    max_ranks: the most ranks a job can have
    wait:      follow the run to its end (else the command returns when the jobs are in the queue; only Slurm can do that)
    chain:     who submits the training job, under Slurm
    """

    kind: LauncherKind
    max_ranks: int
    wait: bool
    chain: Chain
    slurm: SlurmOptions

    def __post_init__(self) -> None:
        if self.max_ranks < 1:
            raise ConfigError(f"max_ranks is {self.max_ranks}, expected at least 1: the most ranks (devices) that a job can have")
