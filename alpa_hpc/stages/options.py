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


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """What the search looks at, and how long.

    num_best:       partitions that are simulated as programs, the simulation picks
    table_cap:      largest table (entries) that elimination may build; beyond it the solver takes over
    solver_seconds: wall time for one sharding problem; at the limit a verified incumbent is a result, with its gap
    balance:        heuristic that may lose the optimum: a stage's share of the devices is within a factor 1 + balance of its share of the
                    FLOP; infinity is off
    """

    submesh_shapes: SubmeshShapes
    logical_shapes: LogicalShapes
    num_best: int
    remat: RematChoice
    table_cap: int
    solver_seconds: float
    balance: float = math.inf

    def __post_init__(self) -> None:
        for name in ("num_best", "table_cap"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1: the search must be allowed to find something")
        if not self.solver_seconds > 0:
            raise ConfigError(f"solver_seconds is {self.solver_seconds}, expected more than 0: the wall time of one sharding problem")
        if not self.balance >= 0:
            raise ConfigError(f"balance is {self.balance}, expected a number >= 0, such as 1.0, or .inf to look at all stages")
