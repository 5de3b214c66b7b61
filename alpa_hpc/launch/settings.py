"""A run's config.yaml -> RunSettings: the few values that a look at a run needs, read without Hydra, OmegaConf and jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from alpa_hpc.errors import StoreError
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.launch.paths import JobKind, RunPaths


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run was asked for: its launcher, the jobs that decide what becomes of it, its training steps, its search."""

    launcher: LauncherKind
    jobs: tuple[JobKind, ...]
    num_steps: int
    search: str = ""


_JOBS: Mapping[str, tuple[JobKind, ...]] = {
    "full": (JobKind.PLAN, JobKind.TRAIN),
    "plan": (JobKind.PLAN,),
    "dry_run": (),
    "calibrate": (JobKind.PROFILE,),
}


def read_settings(paths: RunPaths) -> RunSettings:
    """The settings of a run; StoreError where its config.yaml is absent or has not what a config of this version has."""
    try:
        config: dict[str, Any] = yaml.safe_load(paths.config.read_text(encoding="utf-8"))
        kind, jobs, num_steps = LauncherKind(config["launcher"]["kind"]), _JOBS[config["mode"]], int(config["training"]["num_steps"])
        return RunSettings(kind, jobs, num_steps, str(config.get("search", {}).get("name", "")))
    except FileNotFoundError:
        raise StoreError(f"{paths.config} is not there: the command that started this run was stopped before it began") from None
    except (yaml.YAMLError, OSError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise StoreError(f"{paths.config} is not a config of this version of alpa_hpc ({type(error).__name__}: {error})") from error
