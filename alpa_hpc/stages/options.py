"""The knobs of the search for stages, submeshes and shardings (paper, sections 4 and 5)."""

import enum
import math
from dataclasses import dataclass

from alpa_hpc.errors import ConfigError
from alpa_hpc.stages.candidate import LogicalShapes, SubmeshShapes


class RematChoice(enum.Enum):
    """Whether a stage keeps its residuals or recomputes its layers in the backward pass."""

    ALWAYS = "always"
    NEVER = "never"
    SEARCH = "search"


class CheckTarget(enum.Enum):
    """For what the chosen stages are compiled, to hold the programs against the plan."""

    NONE = "none"
    CPU = "cpu"
    """CPU devices of the planning process"""
    H100 = "h100"
    """GPUs of that kind; none has to be there"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """What the search looks at, and how long.

    num_best:       partitions that are simulated as programs, the simulation picks
    table_cap:      largest table (entries) that elimination may build; beyond it the solver takes over
    solver_seconds: wall time for one sharding problem; at the limit a verified incumbent is a result, with its gap
    balance:        heuristic that may lose the optimum: a stage's share of the devices is within a factor 1 + balance of its share of the
                    FLOP; infinity is off
    check_target:   devices that the chosen plan's programs are compiled for, when their collectives and memory are checked
    """

    submesh_shapes: SubmeshShapes
    logical_shapes: LogicalShapes
    num_best: int
    remat: RematChoice
    table_cap: int
    solver_seconds: float
    balance: float = math.inf
    check_target: CheckTarget = CheckTarget.NONE

    def __post_init__(self) -> None:
        for name in ("num_best", "table_cap"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1: the search must be allowed to find something")
        if not self.solver_seconds > 0:
            raise ConfigError(f"solver_seconds is {self.solver_seconds}, expected more than 0: the wall time of one sharding problem")
        if not self.balance >= 0:
            raise ConfigError(f"balance is {self.balance}, expected a number >= 0, such as 1.0, or .inf to look at all stages")
