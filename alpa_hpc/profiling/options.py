"""The knobs of profiling: where costs come from, on how many devices, and how much is measured."""

import enum
from dataclasses import dataclass

from alpa_hpc.errors import ConfigError


class CostSource(enum.Enum):
    """Where the costs of candidates come from."""

    ANALYTIC = "analytic"
    """the cluster's description alone"""
    MEASURED = "measured"
    """analytic for all, then the best few are compiled and timed, and again until the choice is stable"""


class Extent(enum.Enum):
    """The devices on which a candidate is timed."""

    LONE = "lone"
    """one device does its own share of the work, and communication stays as described: right where ranks share cores (DESIGN 7.12)"""
    MESH = "mesh"
    """all devices of the candidate's mesh, real collectives included: right where every device is one"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingOptions:
    """How costs are had.

    extent:              the devices on which a candidate is timed
    max_rounds:          profile-then-choose rounds before the choice counts as stable
    tasks_per_round:     candidates measured in one round
    max_parallel:        profiling tasks that run at a time; where they share a machine, each needs cores of its own, or the timings would
                         be each other's
    max_pending_minutes: minutes that a measurement may wait in a queue; then its candidates keep their analytic costs
    max_stage_minutes:   minutes that a candidate may take to be compiled and timed; then it has failed (Slurm's own limit ends arrays)
    repeats:             timed runs of one candidate, after some that warm up
    store:               folder of the cost store, or empty: the one that all runs under the same `runs` folder share
    """

    source: CostSource
    extent: Extent
    max_rounds: int
    tasks_per_round: int
    max_parallel: int
    max_pending_minutes: float
    max_stage_minutes: float
    repeats: int
    store: str

    def __post_init__(self) -> None:
        for name in ("max_rounds", "tasks_per_round", "max_parallel", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1 (profiling.source=analytic turns measuring off)")
        for name in ("max_pending_minutes", "max_stage_minutes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
