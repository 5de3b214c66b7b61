"""The knobs of profiling: where costs come from, and how much is measured."""

import enum
from dataclasses import dataclass

from alpa_hpc.errors import ConfigError


class CostSource(enum.Enum):
    """Where the costs of candidates come from."""

    ANALYTIC = "analytic"
    """the cluster's description alone"""
    MEASURED = "measured"
    """analytic for all, then the best few are compiled and timed, and again until the choice is stable"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingOptions:
    """How costs are had.

    max_rounds:      profile-then-choose rounds before the choice counts as stable
    tasks_per_round: candidates measured in one round
    repeats:         timed runs of one candidate, after one that warms up
    store:           folder of the cost store, or empty: the one that all runs under the same `runs` folder share
    """

    source: CostSource
    max_rounds: int
    tasks_per_round: int
    repeats: int
    store: str

    def __post_init__(self) -> None:
        for name in ("max_rounds", "tasks_per_round", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1 (profiling.source=analytic turns measuring off)")
