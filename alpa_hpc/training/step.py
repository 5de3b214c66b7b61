"""(Model, optimiser) -> TrainStep: the ordinary single-device train step that `@parallelize` and the config-driven trainer trace.

state is a dict: "params", "masters" where some of them are in 16 bits (training/masters.py), "optimiser" (optax's), "step" (int32 scalar)
and, only if the model's loss reads its key, "key" (raw uint32 key data, so that every leaf is a plain array). metrics is {"loss",
"grad_norm"}, float scalars of the whole batch.
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
from alpa_hpc.training.masters import narrowed, originals_of, with_masters
from alpa_hpc.training.model import Model
from alpa_hpc.training.options import ParamDtype

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainStep:
    """`init(key)` makes a state, `step(state, batch)` a new state and the metrics; both are pure and traceable."""

    init: Callable[[jax.Array], State]
    step: Callable[[State, Any], tuple[State, dict[str, jax.Array]]]


def build_train_step(model: Model, optimiser: optax.GradientTransformation, param_dtype: ParamDtype = ParamDtype.FLOAT32) -> TrainStep:
    """The train step of `model`; its one `value_and_grad` marks the loss, and so where microbatches begin and end."""
    parts = _Parts(model, optimiser, param_dtype)
    return TrainStep(parts.init_with_key, parts.step_with_key) if _loss_reads_key(parts) else TrainStep(parts.init, parts.step)


@dataclass(frozen=True, slots=True)
class _Parts:
    model: Model
    optimiser: optax.GradientTransformation
    param_dtype: ParamDtype

    def init(self, key: jax.Array) -> State:
        params = jax.tree.map(jnp.asarray, self.model.init(key))  # a model may make a parameter by numpy, or write a number
        held = with_masters(params, self.param_dtype)
        return {**held, "optimiser": self.optimiser.init(params), "step": jnp.zeros((), jnp.int32)}

    def init_with_key(self, key: jax.Array) -> State:
        init_key, loss_key = jax.random.split(key)
        return {**self.init(init_key), "key": jax.random.key_data(loss_key)}

    def step(self, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        def loss(params: Any, batch: Any) -> jax.Array:
            return self.model.loss(params, batch, jax.random.key(0))  # never read

        return self._updated(state, *value_and_grad(loss)(state["params"], batch))

    def step_with_key(self, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
        return self._updated(state, *value_and_grad(self.model.loss)(state["params"], batch, key))

    def _updated(self, state: State, loss: jax.Array, sums: Any) -> tuple[State, dict[str, jax.Array]]:
        originals = originals_of(state)
        gradients = jax.tree.map(lambda gradient, leaf: gradient.astype(leaf.dtype), sums, originals)
        updates, optimiser_state = self.optimiser.update(gradients, state["optimiser"], originals)
        held = with_masters(optax.apply_updates(originals, updates), self.param_dtype)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients)}
        return {**state, **held, "optimiser": optimiser_state, "step": state["step"] + 1}, metrics


def _loss_reads_key(parts: _Parts) -> bool:
    model, key = parts.model, jax.eval_shape(lambda: jax.random.key(0))
    with faults_of("the model's init"):
        params = jax.eval_shape(model.init, key)
    _check_params(params)
    batch = batch_shapes(model, 1)
    params = jax.eval_shape(lambda given: narrowed(given, parts.param_dtype), params)
    with faults_of(_what_loss(parts.param_dtype)):
        jaxpr = jax.make_jaxpr(model.loss)(params, batch, key).jaxpr
    return any(variable is jaxpr.invars[-1] for equation in jaxpr.eqns for variable in equation.invars)


def _what_loss(dtype: ParamDtype) -> str:
    if dtype is ParamDtype.FLOAT32:
        return "the model's loss"
    return f"with training.param_dtype={dtype.value}, in which it is given its matrices, the model's loss"


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
