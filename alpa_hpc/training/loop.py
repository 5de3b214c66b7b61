"""Session + data -> a trained model: the loop over steps, with held-out losses and figures for people and files."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from alpa_hpc.errors import TrainingError
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
    """Run `options.num_steps` steps; the same seed draws the same batches on every rank and at every restart.

    Raises TrainingError after the first step, reported like any other, whose loss is no finite number: every rank has the same loss.
    """
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
        if not math.isfinite(figures["loss"]):
            raise TrainingError(_astray(losses, figures, options))
    held_out.append(_held_out_loss(session, data, options))
    return TrainingFigures(losses[0], losses[-1], held_out[0], held_out[-1], median(seconds[1:] or seconds), options.num_steps)


def _held_out_loss(session: Session, data: DataSource, options: TrainingOptions) -> float:
    """Mean loss of `evaluate_batches` held-out batches; NaN where no evaluation is asked for."""
    if not options.evaluate_every:
        return float("nan")
    batches = (data.batch(Split.HELD_OUT, options.batch_size, options.seed, number) for number in range(options.evaluate_batches))
    losses = [session.score(batch) for batch in batches]
    return sum(losses) / len(losses)


def _astray(losses: list[float], figures: Figures, options: TrainingOptions) -> str:
    """What to say where the last of `losses` is not finite."""
    norm = f", gradient norm {figures['grad_norm']:.4g}" if "grad_norm" in figures else ""
    found = f"the loss is {losses[-1]} at step {len(losses)}{norm}"
    if len(losses) == 1:
        return (
            f"{found}: the first step, so no training has led there. Look at what the model's init gives, at the data, and at the loss "
            "itself (jax.config.update('jax_debug_nans', True) on one device shows the operator)."
        )
    clip = f"{options.clip_norm:g}" if options.clip_norm else "0, which is off"
    return (
        f"{found}; the last finite one was {losses[-2]:.4g} at step {len(losses) - 1}. Training stops here. Lower training.learning_rate "
        f"(it is {options.learning_rate:g}), lengthen training.warmup_steps ({options.warmup_steps}), lower training.clip_norm ({clip}), "
        "or look at the data of this step."
    )
