"""LayeredStep, state, microbatch inputs -> new state, metrics, on one device: what the data of a layered step means, as code."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr

from alpa_hpc.ir.reference import microbatch_inputs
from alpa_hpc.ir.trace import TracedStep
from alpa_hpc.ir.work import Accumulation, Layer, LayeredStep, UpdateStep
from alpa_hpc.layers.owners import join_function


def evaluate(closed: ClosedJaxpr, *arguments: jax.Array) -> list[jax.Array]:
    """The outputs of a closed jaxpr."""
    return eval_jaxpr(closed.jaxpr, closed.consts, *arguments)


def run_layered_step(layered: LayeredStep, traced: TracedStep, state: object, batch: object) -> tuple[object, dict[str, jax.Array]]:
    """One train step, layer by layer and microbatch by microbatch; equals `ir.reference.reference_step`."""
    leaves = traced.layout.arrays(state)
    gradients: dict[int, jax.Array] = {}
    extras: list[jax.Array] = []
    for inputs in microbatch_inputs(traced, dict(enumerate(leaves)), batch):
        outputs, contributions = _microbatch(layered, leaves, inputs)
        gradients = _sums(gradients, contributions)
        extras = [_gather(layered, number, extras, value) for number, value in enumerate(outputs)]
    new_leaves, metrics = run_update(layered, leaves, gradients, extras)
    return traced.layout.state(new_leaves), metrics


def _gather(layered: LayeredStep, number: int, extras: Sequence[jax.Array], value: jax.Array) -> jax.Array:
    is_last = layered.loss_outputs[number].accumulation is Accumulation.LAST
    return value if is_last or not extras else extras[number] + value


def _sums(totals: Mapping[int, jax.Array], parts: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
    return {name: totals[name] + part if name in totals else part for name, part in parts.items()}


def _microbatch(
    layered: LayeredStep, leaves: Sequence[jax.Array], inputs: Sequence[jax.Array]
) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """Loss outputs and gradients of one microbatch."""
    values: dict[int, jax.Array] = {}
    kept: list[list[jax.Array]] = []
    for layer in layered.layers:
        made = evaluate(layer.forward, *_reads(layer, leaves, inputs, values))
        values.update(zip(layer.outputs, made, strict=False))
        kept.append(made[len(layer.outputs) :])
    cotangents: dict[int, jax.Array] = {}
    gradients: dict[int, jax.Array] = {}
    for layer, residuals in zip(reversed(layered.layers), reversed(kept), strict=True):
        reads = _reads(layer, leaves, inputs, values)
        made = evaluate(layer.backward, *reads, *residuals, *(cotangents[value] for value in layer.cotangent_outputs))
        parts = dict(zip(layer.cotangent_inputs, made, strict=False))
        cotangents = {**cotangents, **_sums(cotangents, parts)}
        gradients = {**gradients, **_sums(gradients, dict(zip(layer.params, made[len(parts) :], strict=True)))}
    return [values[output.value] for output in layered.loss_outputs], gradients


def _reads(layer: Layer, leaves: Sequence[jax.Array], inputs: Sequence[jax.Array], values: Mapping[int, jax.Array]) -> list[jax.Array]:
    return [
        *(leaves[leaf] for leaf in layer.params),
        *(inputs[position] for position in layer.batch),
        *(values[value] for value in layer.inputs),
    ]


def run_update(
    layered: LayeredStep, leaves: Sequence[jax.Array], gradients: Mapping[int, jax.Array], extras: Sequence[jax.Array]
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """New leaves and metrics from gradient sums (by state leaf) and accumulated loss outputs."""
    update = layered.update
    shared = [leaves[leaf] for leaf in update.shared_leaves]
    results: list[jax.Array] = []
    for number in range(len(update.rounds)):
        results += _round(update, number, leaves, gradients, [*shared, *extras, *results])
    after = evaluate(update.shared_after, *shared, *extras, *results)
    new_leaves = list(leaves)
    for leaf, value in zip(update.shared_leaves, after[update.num_scalars_after :], strict=False):
        new_leaves[leaf] = value
    for param in update.params:
        made = evaluate(
            param.update, gradients[param.param], *(leaves[leaf] for leaf in param.leaves), *(after[scalar] for scalar in param.scalars)
        )
        for leaf, value in zip(param.leaves, made, strict=True):
            new_leaves[leaf] = value
    metrics = after[update.num_scalars_after + len(shared) :]
    return new_leaves, {name: jnp.asarray(value) for name, value in zip(layered.metric_names, metrics, strict=True)}


def _round(
    update: UpdateStep, number: int, leaves: Sequence[jax.Array], gradients: Mapping[int, jax.Array], known: Sequence[jax.Array]
) -> list[jax.Array]:
    """The results of one round of reductions; `known` = shared leaves, extras and the results of earlier rounds."""
    this = update.rounds[number]
    scalars = evaluate(this.shared, *known)
    joined: dict[int, jax.Array] = {}
    for param in update.params:
        part = param.partials[number]
        own = [gradients[param.param], *(leaves[leaf] for leaf in param.leaves)]
        for reduction, value in zip(part.reductions, evaluate(part.program, *own, *(scalars[i] for i in part.scalars)), strict=True):
            joined[reduction] = join_function(this.kinds[reduction])(joined[reduction], value) if reduction in joined else value
    return [joined[reduction] for reduction in range(len(this.kinds))]
