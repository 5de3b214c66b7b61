"""The knobs of the search for stages, submeshes and shardings (paper, sections 4 and 5), and what restricts it (section 8)."""

import enum
import math
from dataclasses import dataclass, replace

from alpa_hpc.arguments import check_fields
from alpa_hpc.errors import ConfigError
from alpa_hpc.layers.options import Clustering, LayerOptions
from alpa_hpc.stages.candidate import LogicalShapes, StageCandidate, SubmeshShapes
from alpa_hpc.stages.given import parse_stage


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


class Partitions(enum.Enum):
    """Into which stages the layers may be partitioned."""

    ANY = "any"
    ONE_STAGE = "one_stage"
    """all layers on the whole cluster"""
    EQUAL_LAYERS = "equal_layers"
    """stages with as many layers each; their submeshes may differ"""
    GRID = "grid"
    """stages that are alike: as many layers, as many devices, one logical shape, all of it a point of Megatron's grid"""
    MANUAL = "manual"
    """those that `SearchOptions.manual` says"""


class Strategies(enum.Enum):
    """How operators may be split on the mesh of a stage."""

    ANY = "any"
    DATA_PARALLEL = "data_parallel"
    """the batch alone, over all devices"""
    MEGATRON = "megatron"
    """the batch over axis 0; heads, MLP and vocabulary over axis 1"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """What the search looks at, and how long.

    name:           what it is called in tables
    clustering, partitions, strategies: what restricts it; without a word, nothing does
    manual:         the stages of a partition that is given, each in words (`stages.given`); submesh_shapes, logical_shapes and remat are
                    then not asked
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
    name: str = "of your own"
    clustering: Clustering = Clustering.COMMUNICATION
    partitions: Partitions = Partitions.ANY
    strategies: Strategies = Strategies.ANY
    manual: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_best", "table_cap"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1: the search must be allowed to find something")
        if not self.solver_seconds > 0:
            raise ConfigError(f"solver_seconds is {self.solver_seconds}, expected more than 0: the wall time of one sharding problem")
        if not self.balance >= 0:
            raise ConfigError(
                f"balance is {self.balance}, expected a number >= 0, such as 1.0, or inf (.inf in a file) to look at all stages"
            )
        if self.partitions is Partitions.MANUAL and not self.given:
            raise ConfigError("no stage is given: say each in words, search.manual=[layers 0-1 on 1x4 as 2x2, layer 2 on 1x4 as 4x1]")
        if self.given and self.partitions is not Partitions.MANUAL:
            raise ConfigError(
                f"manual has {len(self.given)} stages, and partitions={self.partitions.value} does not ask for any: say search=manual"
            )

    @property
    def given(self) -> tuple[StageCandidate, ...]:
        """The stages that `manual` says, checked each by itself alone."""
        return tuple(map(parse_stage, self.manual))


def with_layers_for(layers: LayerOptions, search: SearchOptions, num_devices: int) -> LayerOptions:
    """The options with a layer a device at the least, where each device shall be a stage of its own."""
    if search.submesh_shapes is not SubmeshShapes.ONE_DEVICE:
        return layers
    return replace(layers, num_layers=max(layers.num_layers, num_devices))
