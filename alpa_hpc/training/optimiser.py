"""TrainingOptions -> optax.GradientTransformation: AdamW, SGD or Adafactor; linear warm-up to a constant rate, clipping of the norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from alpa_hpc.training.options import OptimiserKind, TrainingOptions

ADAM_B1, ADAM_B2 = 0.9, 0.95  # as GPT-3 was trained; 0.999 reacts too late in short runs
SGD_MOMENTUM = 0.9  # Nesterov's, as the original trains Wide-ResNet


def build_optimiser(options: TrainingOptions) -> optax.GradientTransformation:
    """The optimiser, with weight decay on matrices (biases and scales are left alone), behind clipping where `clip_norm` > 0."""
    match options.optimiser:
        case OptimiserKind.ADAMW:
            optimiser = _adamw(options)
        case OptimiserKind.SGD:
            optimiser = _sgd(options)
        case OptimiserKind.ADAFACTOR:
            optimiser = _adafactor(options)
    if options.clip_norm == 0:
        return optimiser
    return optax.chain(_clip_by_global_norm(options.clip_norm), optimiser)


def _adamw(options: TrainingOptions) -> optax.GradientTransformation:
    return optax.adamw(
        _learning_rate(options),
        b1=ADAM_B1,
        b2=ADAM_B2,
        weight_decay=options.weight_decay,
        mask=_only_matrices,
    )


def _sgd(options: TrainingOptions) -> optax.GradientTransformation:
    descent = optax.sgd(_learning_rate(options), momentum=SGD_MOMENTUM, nesterov=True)
    return optax.chain(optax.add_decayed_weights(options.weight_decay, mask=_only_matrices), descent)


def _adafactor(options: TrainingOptions) -> optax.GradientTransformation:
    rate = _learning_rate(options)
    # optax takes this decay whole at each step; here, as AdamW's, it is a part of the rate, so that one number means the same for both.
    decay = (lambda step: options.weight_decay * rate(step)) if callable(rate) else options.weight_decay * rate
    return optax.adafactor(rate, weight_decay_rate=decay, weight_decay_mask=_only_matrices)


def _learning_rate(options: TrainingOptions) -> optax.ScalarOrSchedule:
    if options.warmup_steps == 0:
        return options.learning_rate
    # The first step must not have rate 0, or a run of one step trains nothing.
    return optax.linear_schedule(options.learning_rate / options.warmup_steps, options.learning_rate, options.warmup_steps - 1)


def _only_matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    # Not optax's own: its select with a scalar predicate on every leaf splits badly over a mesh; here each leaf meets one scalar product.
    def clip(updates: Any, _params: Any) -> Any:
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(optax.tree.norm(updates), 1e-12))
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates)

    return optax.stateless(clip)
