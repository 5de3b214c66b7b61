"""(Model, options) -> the traced train step and its layers: what the planning job, profiling tasks and ranks all derive for themselves."""

from dataclasses import dataclass
from functools import partial

import jax

from alpa_hpc.garbage import seldom_collected
from alpa_hpc.ir.trace import TracedStep, trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.layers.options import Clustering, LayerOptions
from alpa_hpc.timed import Timed, untimed
from alpa_hpc.training.batch import batch_shapes
from alpa_hpc.training.model import Model
from alpa_hpc.training.optimiser import build_optimiser
from alpa_hpc.training.options import TrainingOptions
from alpa_hpc.training.step import TrainStep, build_train_step


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A train step as written, as traced, and cut into layers."""

    train_step: TrainStep
    traced: TracedStep
    step: LayeredStep


@seldom_collected()
def prepare(
    model: Model,
    training: TrainingOptions,
    layers: LayerOptions,
    num_microbatches: int,
    timed: Timed = untimed,
    clustering: Clustering = Clustering.COMMUNICATION,
) -> Prepared:
    """Trace the model's train step at its batch size and cut it into layers."""
    train_step = build_train_step(model, build_optimiser(training), training.param_dtype)

    def trace() -> TracedStep:
        state = jax.eval_shape(train_step.init, jax.eval_shape(lambda: jax.random.key(0)))
        return trace_step(train_step.step, state, batch_shapes(model, training.batch_size), num_microbatches=num_microbatches)

    traced = timed("trace", trace)
    cut = partial(cut_layers, traced, num_layers=layers.num_layers, imbalance=layers.imbalance, clustering=clustering)
    step = timed("layers", cut)
    return Prepared(train_step, traced, step)
