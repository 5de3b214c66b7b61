"""The loop reports every step, gathers its figures, and stops at the first loss that is no finite number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from alpa_hpc.errors import TrainingError
from alpa_hpc.runtime.session import Figures
from alpa_hpc.training.data import Split
from alpa_hpc.training.loop import train
from alpa_hpc.training.options import OptimiserKind, ParamDtype, TrainingOptions

OPTIONS = TrainingOptions(
    optimiser=OptimiserKind.ADAMW, param_dtype=ParamDtype.FLOAT32,
    batch_size=8, num_steps=4, learning_rate=0.5, warmup_steps=3, weight_decay=0.0, clip_norm=0.0,
    seed=0, evaluate_every=0, evaluate_batches=1,
)  # fmt: skip


@dataclass
class Told:
    """A session whose losses are known beforehand; its gradient norms are ten times as large."""

    losses: Sequence[float]
    num_trained: int = 0

    def train(self, batch: Any) -> Figures:
        self.num_trained += 1
        loss = self.losses[self.num_trained - 1]
        return {"loss": loss, "grad_norm": 10 * loss}

    def score(self, batch: Any) -> float:
        return float("nan")


class Batches:
    def batch(self, split: Split, batch_size: int, seed: int, step: int) -> Any:
        return step


@dataclass
class Record:
    steps: list[tuple[int, Figures]] = field(default_factory=list)

    def write(self, step: int, figures: Figures) -> None:
        self.steps.append((step, dict(figures)))


def test_a_training_has_its_first_and_last_loss() -> None:
    record = Record()
    figures = train(Told([4.0, 3.0, 2.0, 1.0]), Batches(), OPTIONS, record.write)
    assert (figures.first_loss, figures.last_loss, figures.num_steps) == (4.0, 1.0, 4)
    assert [step for step, _ in record.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("astray", [math.nan, math.inf, -math.inf])
def test_it_stops_at_the_first_loss_that_is_not_finite(astray: float) -> None:
    session, record = Told([4.0, 3.5, astray, 1.0]), Record()
    with pytest.raises(TrainingError) as caught:
        train(session, Batches(), OPTIONS, record.write)
    assert session.num_trained == 3
    message = str(caught.value)
    assert f"the loss is {astray} at step 3, gradient norm {10 * astray}; the last finite one was 3.5 at step 2" in message
    assert "training.learning_rate (it is 0.5)" in message and "training.clip_norm (0, which is off)" in message
    assert [step for step, _ in record.steps] == [1, 2, 3]
    assert record.steps[-1][1]["loss"] == pytest.approx(astray, nan_ok=True)


def test_at_the_first_step_the_start_is_to_blame() -> None:
    with pytest.raises(TrainingError, match=r"nan at step 1, gradient norm nan: the first step, .*init.*data"):
        train(Told([math.nan]), Batches(), OPTIONS, Record().write)


def test_a_held_out_loss_that_is_not_finite_stops_nothing() -> None:
    figures = train(Told([1.0, 1.0, 1.0, 1.0]), Batches(), replace(OPTIONS, evaluate_every=1), Record().write)
    assert math.isnan(figures.last_held_out_loss)
