"""Session + data -> a trained model: the loop over steps, with held-out losses and figures for people and files."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from alpa_hpc.runtime.session import Figures, Session
from alpa_hpc.training.data import DataSource, Split
from alpa_hpc.training.options import TrainingOptions

Report = Callable[[int, Figures], None]  # (step counted from 1, its figures)


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """What a run of the loop came to.

    `step_seconds` is the median over all steps but the first; held-out losses are before and after (NaN: none).
    """

    first_loss: float
    last_loss: float
    first_held_out_loss: float
    last_held_out_loss: float
    step_seconds: float
    num_steps: int


def train(session: Session, data: DataSource, options: TrainingOptions, report: Report) -> TrainingFigures:
    """Run `options.num_steps` steps; the same seed draws the same batches on every rank and at every restart."""
    losses: list[float] = []
    seconds: list[float] = []
    held_out = [_held_out_loss(session, data, options)]
    for step in range(options.num_steps):
        batch = data.batch(Split.TRAINING, options.batch_size, options.seed, step)
        began = time.perf_counter()
        figures = session.train(batch)
        seconds.append(time.perf_counter() - began)
        losses.append(figures["loss"])
        if options.evaluate_every and (step + 1) % options.evaluate_every == 0 and step + 1 < options.num_steps:
            held_out.append(_held_out_loss(session, data, options))
            figures = {**figures, "held_out_loss": held_out[-1]}
        report(step + 1, {**figures, "seconds": seconds[-1]})
    held_out.append(_held_out_loss(session, data, options))
    return TrainingFigures(losses[0], losses[-1], held_out[0], held_out[-1], median(seconds[1:] or seconds), options.num_steps)


def _held_out_loss(session: Session, data: DataSource, options: TrainingOptions) -> float:
    """Mean loss of `evaluate_batches` held-out batches; NaN where no evaluation is asked for."""
    if not options.evaluate_every:
        return float("nan")
    batches = (data.batch(Split.HELD_OUT, options.batch_size, options.seed, number) for number in range(options.evaluate_batches))
    losses = [session.score(batch) for batch in batches]
    return sum(losses) / len(losses)
