"""The knobs of launching: who starts the jobs, and what Slurm is asked for."""

import enum
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What sbatch is asked for; an empty text or a 0 leaves the flag out, so that the site's default holds.

    time_minutes:  limit of each job
    gpus_per_node: GPUs of each node; devices are chosen by local rank inside, never bound by Slurm
    additional:    any further sbatch flag by its long name without dashes, such as {exclude: node7, mem: 0}
    setup:         shell lines before the job, such as "module load cuda"
    """

    partition: str
    account: str
    qos: str
    constraint: str
    time_minutes: int
    gpus_per_node: int
    additional: dict[str, str | int]
    setup: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("time_minutes", "gpus_per_node"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a number >= 0 (0 leaves the flag out)")
        dashed = [name for name in self.additional if name.startswith("-") or "=" in name]
        if dashed:
            raise ConfigError(f"additional has the flags {dashed}, expected long names without dashes, such as {{exclude: node7}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherOptions:
    """Who starts the jobs; `max_ranks` is the most ranks a job can have; `wait` follows the run to its end (else it returns at once)."""

    kind: LauncherKind
    max_ranks: int
    wait: bool
    slurm: SlurmOptions

    def __post_init__(self) -> None:
        if self.max_ranks < 1:
            raise ConfigError(f"max_ranks is {self.max_ranks}, expected at least 1: the most ranks (devices) that a job can have")
