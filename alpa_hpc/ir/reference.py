"""TracedStep, state, batch -> new state, metrics: the one-device meaning of a step, microbatch by microbatch, in plain JAX."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from alpa_hpc.ir.grad import AuxKind, SumCount
from alpa_hpc.ir.state import key_data
from alpa_hpc.ir.trace import Split, TracedStep


def microbatch_inputs(traced: TracedStep, leaves: Mapping[int, Any], batch: object) -> list[tuple[jax.Array, ...]]:
    """The microbatch inputs of each microbatch, from the whole batch: rows split, keys folded with the microbatch's number.

    `leaves` are the arrays of the state by position; those at `before_leaves` are read.
    """
    inputs = eval_jaxpr(
        traced.before.jaxpr, traced.before.consts, *(leaves[leaf] for leaf in traced.before_leaves), *map(key_data, jax.tree.leaves(batch))
    )
    return [
        tuple(_part(traced, position, whole, number) for position, whole in enumerate(inputs)) for number in range(traced.num_microbatches)
    ]


def _part(traced: TracedStep, position: int, whole: jax.Array, number: int) -> jax.Array:
    match traced.splits[position]:
        case Split.ROWS:
            rows = whole.shape[0] // traced.num_microbatches
            return whole[number * rows : (number + 1) * rows]
        case Split.SAME:
            return whole
        case Split.KEY:
            key = jax.random.wrap_key_data(whole, impl=traced.key_impls[position])
            return jax.random.key_data(jax.random.fold_in(key, number))


def reference_step(traced: TracedStep, state: object, batch: object) -> tuple[Any, dict[str, jax.Array]]:
    """One train step on one device: gradients are summed over microbatches in order, then the update runs."""
    leaves = traced.layout.arrays(state)
    params = tuple(leaves[leaf] for leaf in traced.params)
    gradient = jax.jit(jax.value_and_grad(lambda first, others: _loss(traced, first, others), has_aux=True))
    total: list[jax.Array] = []
    sums: list[jax.Array] = []
    for inputs in microbatch_inputs(traced, dict(enumerate(leaves)), batch):
        (_, outputs), gradients = gradient(params, inputs)
        total = [a + b for a, b in zip(total, gradients, strict=True)] if total else list(gradients)
        sums = _gathered(traced, sums, outputs)
    values, gradients = finish(traced, sums, total)
    results = eval_jaxpr(traced.after.jaxpr, traced.after.consts, *leaves, *values, *gradients)
    metrics = dict(zip(traced.metric_names, results[len(leaves) :], strict=True))
    return traced.layout.state(results[: len(leaves)]), metrics


def _loss(traced: TracedStep, params: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    outputs = eval_jaxpr(traced.loss.jaxpr, traced.loss.consts, *params, *inputs)
    return outputs[0], outputs


def _gathered(traced: TracedStep, sums: list[jax.Array], outputs: Sequence[jax.Array]) -> list[jax.Array]:
    kinds = (*(AuxKind.SUM,) * traced.num_values, *traced.aux_kinds)
    if not sums:
        return list(outputs)
    return [new if kind is AuxKind.LAST else old + new for kind, old, new in zip(kinds, sums, outputs, strict=True)]


def finish(traced: TracedStep, sums: Sequence[jax.Array], gradients: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sums over microbatches -> ([value, aux leaves], gradients) of the whole batch: divided by B, or by the total count."""
    num_microbatches = traced.num_microbatches
    divisor = sums[1] if isinstance(traced.reduction, SumCount) else jnp.asarray(num_microbatches)
    value = sums[0] / divisor.astype(sums[0].dtype)
    extra = sums[traced.num_values :]
    aux = [
        x / jnp.asarray(num_microbatches, x.dtype) if kind is AuxKind.MEAN else x for x, kind in zip(extra, traced.aux_kinds, strict=True)
    ]
    return [value, *aux], [gradient / divisor.astype(gradient.dtype) for gradient in gradients]
