"""Ranks whose training goes astray leave together: after the step is on record, and in bounded time."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from alpa_hpc.errors import LaunchError, TrainingError
from alpa_hpc.training import run
from alpa_hpc.training.loop import TrainingFigures
from alpa_hpc.training.run import train_together


@dataclass
class World:
    """A communicator whose barrier is met after so many questions."""

    questions: float
    asked: int = 0

    def Ibarrier(self) -> "World":  # noqa: N802 - MPI's name
        return self

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        self.asked += 1
        return self.asked > self.questions


def context(world: World) -> Any:
    return SimpleNamespace(world=world)


def astray() -> TrainingFigures:
    raise TrainingError("the loss is nan")


def test_who_goes_astray_waits_for_the_others() -> None:
    world = World(questions=3)
    with pytest.raises(TrainingError, match="the loss is nan"):
        train_together(context(world), astray)
    assert world.asked == 4


def test_it_leaves_though_another_has_not_gone_astray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MEETING_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(TrainingError, match="the loss is nan"):
        train_together(context(World(questions=float("inf"))), astray)
    assert 0.2 <= time.monotonic() - began < 5


def test_other_errors_leave_at_once_and_a_good_end_meets_nobody() -> None:
    def failed() -> TrainingFigures:
        raise LaunchError("a rank is gone")

    world = World(questions=0)
    with pytest.raises(LaunchError, match="a rank is gone"):
        train_together(context(world), failed)
    figures = TrainingFigures(2.0, 1.0, 2.0, 1.0, 0.1, 3)
    assert train_together(context(world), lambda: figures) is figures
    assert world.asked == 0
