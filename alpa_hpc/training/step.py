"""(Model, optimiser) -> TrainStep: the ordinary single-device train step that `@parallelize` and the config-driven trainer trace.

state is a dict: "params", "optimiser" (optax's), "step" (int32 scalar) and, only if the model's loss reads its key, "key"
(raw uint32 key data, so that every leaf is a plain array). metrics is {"loss", "grad_norm"}, float scalars of the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.faults import faults_of
from alpa_hpc.ir.grad import value_and_grad
from alpa_hpc.training.batch import batch_shapes
from alpa_hpc.training.model import Model

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainStep:
    """`init(key)` makes a state, `step(state, batch)` a new state and the metrics; both are pure and traceable."""

    init: Callable[[jax.Array], State]
    step: Callable[[State, Any], tuple[State, dict[str, jax.Array]]]


def build_train_step(model: Model, optimiser: optax.GradientTransformation) -> TrainStep:
    """The train step of `model`; its one `value_and_grad` marks the loss, and so where microbatches begin and end."""
    if _loss_reads_key(model):
        return TrainStep(init=lambda key: _init_with_key(model, optimiser, key), step=lambda *args: _step_with_key(model, optimiser, *args))
    return TrainStep(init=lambda key: _init(model, optimiser, key), step=lambda *args: _step(model, optimiser, *args))


def _init(model: Model, optimiser: optax.GradientTransformation, key: jax.Array) -> State:
    params = jax.tree.map(jnp.asarray, model.init(key))  # a model may make a parameter by numpy, or write a number
    return {"params": params, "optimiser": optimiser.init(params), "step": jnp.zeros((), jnp.int32)}


def _init_with_key(model: Model, optimiser: optax.GradientTransformation, key: jax.Array) -> State:
    init_key, loss_key = jax.random.split(key)
    return {**_init(model, optimiser, init_key), "key": jax.random.key_data(loss_key)}


def _step(model: Model, optimiser: optax.GradientTransformation, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
    def loss(params: Any, batch: Any) -> jax.Array:
        return model.loss(params, batch, jax.random.key(0))  # never read

    value, gradients = value_and_grad(loss)(state["params"], batch)
    return _updated(optimiser, state, value, gradients)


def _step_with_key(model: Model, optimiser: optax.GradientTransformation, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
    key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
    value, gradients = value_and_grad(model.loss)(state["params"], batch, key)
    return _updated(optimiser, state, value, gradients)


def _updated(optimiser: optax.GradientTransformation, state: State, loss: jax.Array, gradients: Any) -> tuple[State, dict[str, jax.Array]]:
    updates, optimiser_state = optimiser.update(gradients, state["optimiser"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients)}
    return {**state, "params": params, "optimiser": optimiser_state, "step": state["step"] + 1}, metrics


def _loss_reads_key(model: Model) -> bool:
    key = jax.eval_shape(lambda: jax.random.key(0))
    with faults_of("the model's init"):
        params = jax.eval_shape(model.init, key)
    _check_params(params)
    batch = batch_shapes(model, 1)
    with faults_of("the model's loss"):
        jaxpr = jax.make_jaxpr(model.loss)(params, batch, key).jaxpr
    return any(variable is jaxpr.invars[-1] for equation in jaxpr.eqns for variable in equation.invars)


def _check_params(params: Any) -> None:
    if not jax.tree.leaves(params):
        raise TraceError(f"the model's init gives {params!r}, expected a pytree of arrays: there is nothing to train.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if any(size < 0 for size in leaf.shape):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TraceError(f"the model's init gives parameter '{name}' of shape {list(leaf.shape)}, expected sizes >= 0.")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TraceError(
                f"the model's init gives parameter '{name}' of dtype {leaf.dtype}, expected a floating one, since every parameter is "
                "trained. Make a constant a field of the model, or build it inside the loss."
            )
