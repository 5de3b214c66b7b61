"""The knobs of the pipeline schedule (paper, section 2.2)."""

import enum
from dataclasses import dataclass

from alpa_hpc.arguments import check_fields
from alpa_hpc.errors import ConfigError

SEARCHED = 0  # as a number of microbatches: planning chooses it


class ScheduleKind(enum.Enum):
    """In which order a mesh runs the forward and backward passes of its microbatches."""

    ONE_F_ONE_B = "one_f_one_b"
    GPIPE = "gpipe"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOptions:
    """`num_microbatches` (the paper's B) pieces of each global batch, run in the order of `kind`; `SEARCHED` has the planning choose B."""

    kind: ScheduleKind
    num_microbatches: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_microbatches < SEARCHED:
            raise ConfigError(
                f"num_microbatches is {self.num_microbatches}, expected at least 1 (1 runs the batch as it is), or 0 to have it chosen"
            )
