"""The knobs of operator clustering (paper, Eq. 6)."""

import enum
from dataclasses import dataclass

from alpa_hpc.arguments import check_fields
from alpa_hpc.errors import ConfigError
from alpa_hpc.layers.choice import CHOOSE


class Clustering(enum.Enum):
    """By what operators are cut into layers."""

    COMMUNICATION = "communication"
    """Eq. 6: little is passed on, and FLOP are balanced"""
    EQUAL_OPERATORS = "equal_operators"
    """as many operators in each layer, whatever they cost: "equal operator" of the paper's Fig. 9"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """`num_layers` (the paper's L) clusters; none may hold more than 1 + `imbalance` (its delta) times the mean FLOP of a layer.

    0 layers: as many as suit the blocks that the model repeats (`layers.choice`).

    Stages are runs of layers, so the search has some num_layers^2 / 2 of them a mesh. A few layers a block of the model are plenty: finer
    ones cut where several values are alive, and their stages may have to be solved whole (planning.json counts them), each taking long.
    """

    num_layers: int
    imbalance: float

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_layers < CHOOSE:
            raise ConfigError(
                f"num_layers is {self.num_layers}, expected at least 1, the number of pieces that the forward pass is cut into, "
                f"or {CHOOSE} to have it chosen"
            )
        if not self.imbalance >= 0:
            raise ConfigError(
                f"imbalance is {self.imbalance}, expected a number >= 0, such as 0.5 for layers of up to 1.5 times the mean FLOP"
            )
