"""Pipeline schedules: (stage, num_stages, num_microbatches) -> the order of a stage's forwards and backwards (paper, section 2.2).

Every schedule runs forwards in the order 0..B-1 and backwards in the order 0..B-1 on every stage. Two meshes therefore agree on the order
of the messages between them in each direction, which transports that deliver in order (NCCL point-to-point) rely on.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage's forward on a microbatch."""

    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the stage's backward on a microbatch, whose forward has run."""

    microbatch: int


Step = Forward | Backward


class AbstractSchedule(ABC):
    """The order of a stage's work in one iteration; stage `num_stages - 1` makes the loss."""

    @abstractmethod
    def steps(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Step, ...]:
        """All forwards and backwards of one stage, in order; each microbatch occurs once in each direction."""

    @abstractmethod
    def max_in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Most microbatches whose forward has begun and whose backward has not ended, at any time of `steps`."""


@final
@dataclass(frozen=True, slots=True)
class OneFOneB(AbstractSchedule):
    """1F1B: stage i warms up with min(S - i - 1, B) forwards, alternates forward and backward, then drains."""

    def steps(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Step, ...]:
        """Warm-up forwards, pairs (forward, backward), then the remaining backwards."""
        check_place(stage, num_stages, num_microbatches)
        warm_up = min(num_stages - stage - 1, num_microbatches)
        num_pairs = num_microbatches - warm_up
        head = tuple(Forward(index) for index in range(warm_up))
        pairs = tuple(step for index in range(num_pairs) for step in (Forward(warm_up + index), Backward(index)))
        return head + pairs + tuple(Backward(index) for index in range(num_pairs, num_microbatches))

    def max_in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """min(S - i, B): the warm-up and the one forward before the first backward."""
        check_place(stage, num_stages, num_microbatches)
        return min(num_stages - stage, num_microbatches)


@final
@dataclass(frozen=True, slots=True)
class GPipe(AbstractSchedule):
    """GPipe: all forwards, then all backwards."""

    def steps(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Step, ...]:
        """B forwards, then B backwards."""
        check_place(stage, num_stages, num_microbatches)
        forwards = tuple(Forward(index) for index in range(num_microbatches))
        return forwards + tuple(Backward(index) for index in range(num_microbatches))

    def max_in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """B: no backward begins before the last forward."""
        check_place(stage, num_stages, num_microbatches)
        return num_microbatches


def check_place(stage: int, num_stages: int, num_microbatches: int) -> None:
    """Assert that the stage exists and that there is something to run."""
    assert 0 <= stage < num_stages, f"stage {stage} of {num_stages}: expected 0 <= stage < num_stages"
    assert num_microbatches >= 1, f"{num_microbatches} microbatches: expected at least 1"
