"""The tasks that run once an iteration: gradients of shared parameters, partial scalars of reductions, and the update (DESIGN 7.9).

The update is where each parameter's gradient is summed over the mesh (one reduce-scatter), and its new value handed out (one all-gather).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.ir.work import LayeredStep, ReductionKind
from alpa_hpc.runtime.compute_tasks import Arrays, backward_task, forward_task, gradient_layouts, loss_layouts, zeros_task
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.runtime.pipeline import PipelineIO, StageIO, partials_name
from alpa_hpc.runtime.stage import Stage, gradient_spec, layout_of, partial_spec, whole_layout
from alpa_hpc.runtime.tasks import Local, LocalFunction, StageTask, accumulators, arrays, split_arguments
from alpa_hpc.sharding.apply import reshard, run_move, run_program, share_specs
from alpa_hpc.sharding.place import Place
from alpa_hpc.sharding.resharding import joint_moves
from alpa_hpc.sharding.spec import Spec


def leaf_layouts(step: LayeredStep, stage: Stage, io: StageIO) -> dict[int, Layout]:
    """How each resident state leaf is stored."""
    layouts = {leaf: whole_layout(step.state_avals[leaf], stage.shape) for leaf in step.update.shared_leaves}
    for param in io.owned:
        chosen, program = stage.update_of(param)
        for leaf, tensor in zip(program.work.leaves, program.leaves, strict=True):
            spec = stage.param_spec(param) if leaf == param else chosen.spec(tensor)
            layouts[leaf] = layout_of(step.state_avals[leaf], spec, stage.shape)
    for param in io.params:
        layouts.setdefault(param, layout_of(step.state_avals[param], stage.param_spec(param), stage.shape))
    return {leaf: layouts[leaf] for leaf in io.leaves}


def merged_layouts(step: LayeredStep, stage: Stage, pipeline: PipelineIO, param: int) -> tuple[Layout, ...]:
    """The accumulators of an owned parameter, and after them the sums that arrived from replicas."""
    own = gradient_layouts(step, stage, param)
    shared = pipeline.shared_params.get(param)
    return own if shared is None else own + reduced_layout(step, stage, param) * len(shared.replicas)


def summed(stage: Stage, param: int, parts: Sequence[jax.Array], place: Place) -> jax.Array:
    """A gradient summed over the mesh and over its readers, as `partial_spec` says: those that come to lie alike are exchanged as one."""
    target = partial_spec(stage, param)
    specs = [gradient_spec(reader, param) for reader in stage.readers(param)]
    alike: dict[Spec, list[jax.Array]] = {}
    for spec, part in zip(specs, parts, strict=False):
        alike.setdefault(spec, []).append(part)
    for move in joint_moves(alike, target, place.shape):
        alike.setdefault(move.after, []).append(run_move(reduce(add, alike.pop(move.before)), move, place))
    assert alike.keys() == {target}, f"parameter {param} has gradients in {list(alike)}, expected all in {target}"
    return reduce(add, (*alike[target], *parts[len(specs) :]))


def reduce_task(step: LayeredStep, stage: Stage, param: int) -> StageTask:
    """On a replica's mesh: its accumulators -> their sum over the mesh."""

    def function(place: Place) -> LocalFunction:
        return lambda parts: (summed(stage, param, accumulators(parts), place),)

    return StageTask(f"reduce:{param}", function, (gradient_layouts(step, stage, param),), reduced_layout(step, stage, param), (0,))


def merge_task(step: LayeredStep, stage: Stage, pipeline: PipelineIO, param: int) -> StageTask:
    """On the owner's mesh: keep the sums that arrived beside its own accumulators."""

    def function(place: Place) -> LocalFunction:
        del place
        return lambda own, *arrived: ((*accumulators(own), *arrays(arrived)),)

    own = gradient_layouts(step, stage, param)
    merged = merged_layouts(step, stage, pipeline, param)
    return StageTask(f"merge:{param}", function, (own, *merged[len(own) :]), (merged,), (0,))


def reduced_layout(step: LayeredStep, stage: Stage, param: int) -> tuple[Layout, ...]:
    """A gradient once `partials` has summed it."""
    return (layout_of(step.state_avals[param], partial_spec(stage, param), stage.shape),)


def partials_tasks(step: LayeredStep, stage: Stage, io: StageIO, pipeline: PipelineIO) -> tuple[StageTask, ...]:
    """The tasks of all rounds of reductions."""
    return tuple(partials_task(step, stage, io, pipeline, number) for number in range(len(step.update.rounds)))


def partials_task(step: LayeredStep, stage: Stage, io: StageIO, pipeline: PipelineIO, number: int) -> StageTask:
    """[gradients, leaves, totals, reduced scalars of earlier rounds] -> [gradients summed over the mesh, partial scalars of the round].

    Only the first round sums gradients and gives them back; those after it read them.
    """
    leaves = _updated_leaves(step, stage, io)
    gradients = tuple(reduced_layout(step, stage, p) if number else merged_layouts(step, stage, pipeline, p) for p in io.owned)
    totals = loss_layouts(step, stage, tuple(range(len(step.loss_outputs))))
    known = tuple(whole_layout(aval, stage.shape) for earlier in range(number) for aval in reduction_avals(step, earlier))
    scalars = tuple(whole_layout(aval, stage.shape) for aval in reduction_avals(step, number))

    def function(place: Place) -> LocalFunction:
        def run(*arguments: Local) -> tuple[Local, ...]:
            groups = split_arguments(arguments, (len(gradients), len(leaves), len(totals), len(known)))
            parts = dict(zip(io.owned, map(accumulators, groups[0]), strict=True))
            sums = {p: part[0] if number else summed(stage, p, part, place) for p, part in parts.items()}
            state = dict(zip(leaves, arrays(groups[1]), strict=True))
            shared_leaves = [state[leaf] for leaf in step.update.shared_leaves]
            shared = _run(step.update.rounds[number].shared, [*shared_leaves, *arrays(groups[2]), *arrays(groups[3])])
            found = [one for param in io.owned for one in _partials(stage, param, number, sums[param], state, shared, place)]
            joined = join_partials(step, number, found, place)
            return (*(() if number else ((sums[p],) for p in io.owned)), *joined)

        return run

    given = () if number else tuple(reduced_layout(step, stage, p) for p in io.owned)
    inputs = (*gradients, *leaves.values(), *totals, *known)
    return StageTask(partials_name(number), function, inputs, (*given, *scalars), tuple(range(len(given))))


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A parameter's share of a reduction; `axes` = mesh axes over which it is still to be summed."""

    reduction: int
    axes: tuple[int, ...]
    value: jax.Array


def _partials(  # noqa: PLR0913 - what a round reads
    stage: Stage, param: int, number: int, gradient: jax.Array, state: Arrays, shared: Sequence[jax.Array], place: Place
) -> list[Partial]:
    """The shares of one parameter in a round."""
    chosen, update = stage.update_of(param)
    work, program = update.work.partials[number], update.partials[number]
    if not work.reductions:
        return []
    arguments = [gradient, *_leaves_at_update(stage, param, state, place), *(shared[i] for i in work.scalars)]
    specs = share_specs(program, chosen)
    values = run_program(program, chosen, arguments, place, left=specs)
    shares = zip(work.reductions, program.outputs, values, strict=True)
    return [Partial(reduction, specs.get(tensor, chosen.spec(tensor)).partial, value) for reduction, tensor, value in shares]


def join_partials(step: LayeredStep, number: int, partials: Sequence[Partial], place: Place) -> list[jax.Array]:
    """Each reduction of a round over the parameters of this mesh. Sums are added up on each device first, then once over the mesh."""
    kinds = step.update.rounds[number].kinds
    joined = [neutral(kind, aval) for kind, aval in zip(kinds, reduction_avals(step, number), strict=True)]
    waiting: dict[tuple[int, tuple[int, ...]], jax.Array] = {}
    for one in partials:
        if one.axes and kinds[one.reduction] is ReductionKind.SUM:
            key = (one.reduction, one.axes)
            waiting[key] = waiting[key] + one.value if key in waiting else one.value
        else:
            joined[one.reduction] = combine(
                kinds[one.reduction], joined[one.reduction], reshard(one.value, Spec((), one.axes), Spec(()), place)
            )
    for (reduction, axes), value in waiting.items():
        joined[reduction] = joined[reduction] + reshard(value, Spec((), axes), Spec(()), place)
    return joined


def _leaves_at_update(stage: Stage, param: int, state: Arrays, place: Place) -> list[jax.Array]:
    chosen, program = stage.update_of(param)
    values = [state[leaf] for leaf in program.work.leaves]
    values[0] = reshard(values[0], stage.param_spec(param), chosen.spec(program.leaves[0]), place)
    return values


def combine(kind: ReductionKind, a: jax.Array, b: jax.Array) -> jax.Array:
    """Join two scalars."""
    match kind:
        case ReductionKind.SUM:
            return a + b
        case ReductionKind.MAX:
            return jnp.maximum(a, b)
        case ReductionKind.MIN:
            return jnp.minimum(a, b)
        case ReductionKind.AND:
            return jnp.logical_and(a, b)
        case ReductionKind.OR:
            return jnp.logical_or(a, b)


def neutral(kind: ReductionKind, aval: ShapedArray) -> jax.Array:
    """What a mesh without parameters contributes."""
    match kind:
        case ReductionKind.SUM:
            return jnp.zeros((), aval.dtype)
        case ReductionKind.MAX:
            return jnp.full((), _bound(aval, -1), aval.dtype)
        case ReductionKind.MIN:
            return jnp.full((), _bound(aval, 1), aval.dtype)
        case ReductionKind.AND:
            return jnp.ones((), aval.dtype)
        case ReductionKind.OR:
            return jnp.zeros((), aval.dtype)


def _bound(aval: ShapedArray, sign: int) -> float | bool:
    """The largest value of a dtype, or (`sign` = -1) its smallest."""
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return sign * jnp.inf
    if aval.dtype == jnp.bool_:
        return sign > 0
    limits = jnp.iinfo(aval.dtype)
    return limits.max if sign > 0 else limits.min


def reduction_avals(step: LayeredStep, number: int) -> tuple[ShapedArray, ...]:
    """Avals of the partial scalars of a round."""
    avals: dict[int, ShapedArray] = {}
    for part in (work.partials[number] for work in step.update.params):
        for reduction, atom in zip(part.reductions, part.program.jaxpr.outvars, strict=True):
            avals[reduction] = aval_of(atom)
    return tuple(avals[reduction] for reduction in range(len(step.update.rounds[number].kinds)))


def _all_reduction_avals(step: LayeredStep) -> list[ShapedArray]:
    return [aval for number in range(len(step.update.rounds)) for aval in reduction_avals(step, number)]


def _run(jaxpr: ClosedJaxpr, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    return list(jaxpr_as_fun(jaxpr)(*arguments))


def _updated_leaves(step: LayeredStep, stage: Stage, io: StageIO) -> Mapping[int, Layout]:
    """Resident leaves that change here: all but replicas, whose owners send them."""
    replicas = set(io.params) - set(io.owned)
    return {leaf: layout for leaf, layout in leaf_layouts(step, stage, io).items() if leaf not in replicas}


def update_task(step: LayeredStep, stage: Stage, io: StageIO, pipeline: PipelineIO) -> StageTask:
    """[gradients, leaves, totals, reduced scalars] -> [new leaves, metrics]."""
    leaves = _updated_leaves(step, stage, io)
    reduced_already = bool(step.update.rounds)
    gradients = tuple(reduced_layout(step, stage, p) if reduced_already else merged_layouts(step, stage, pipeline, p) for p in io.owned)
    totals = loss_layouts(step, stage, tuple(range(len(step.loss_outputs))))
    scalars = tuple(whole_layout(aval, stage.shape) for aval in _all_reduction_avals(step))
    shared_leaves, num_rates = step.update.shared_leaves, step.update.num_scalars_after
    metrics = tuple(whole_layout(aval_of(x), stage.shape) for x in step.update.shared_after.jaxpr.outvars[num_rates + len(shared_leaves) :])

    def function(place: Place) -> LocalFunction:
        def run(*arguments: Local) -> tuple[Local, ...]:
            groups = split_arguments(arguments, (len(gradients), len(leaves), len(totals), len(scalars)))
            state = dict(zip(leaves, arrays(groups[1]), strict=True))
            results = _run(step.update.shared_after, [*(state[leaf] for leaf in shared_leaves), *arrays(groups[2]), *arrays(groups[3])])
            rates = results[:num_rates]
            new = dict(zip(shared_leaves, results[num_rates:], strict=False))
            for param, parts in zip(io.owned, groups[0], strict=True):
                gradient = accumulators(parts)
                whole = gradient[0] if reduced_already else summed(stage, param, gradient, place)
                new.update(_update_param(stage, param, whole, state, rates, place))
            return (*(new[leaf] for leaf in leaves), *results[num_rates + len(shared_leaves) :])

        return run

    outputs = (*leaves.values(), *metrics)
    inputs = (*gradients, *leaves.values(), *totals, *scalars)
    first, stop = len(gradients), len(gradients) + len(leaves)
    return StageTask("update", function, inputs, outputs, (*range(first, stop), *range(first)))  # a leaf goes where it was


def _update_param(stage: Stage, param: int, gradient: jax.Array, state: Arrays, rates: Sequence[jax.Array], place: Place) -> Arrays:
    """The new leaves of one parameter, as they are stored."""
    chosen, program = stage.update_of(param)
    arguments = [gradient, *_leaves_at_update(stage, param, state, place), *(rates[i] for i in program.work.scalars)]
    results = run_program(program.update, chosen, arguments, place)
    targets = [stage.param_spec(param), *(chosen.spec(tensor) for tensor in program.leaves[1:])]
    new = (
        reshard(value, chosen.spec(tensor), target, place)
        for tensor, value, target in zip(program.update.outputs, results, targets, strict=True)
    )
    return dict(zip(program.work.leaves, new, strict=True))


def stage_tasks(step: LayeredStep, stage: Stage, pipeline: PipelineIO, index: int, others: Sequence[StageTask]) -> dict[str, StageTask]:
    """Every task of mesh `index`; `others` = its gather and sum tasks, which depend on its program."""
    io = pipeline.stages[index]
    tasks = [zeros_task(step, stage, io), forward_task(step, stage, io), backward_task(step, stage, io)]
    tasks.append(update_task(step, stage, io, pipeline))
    tasks += partials_tasks(step, stage, io, pipeline)
    for param, shared in pipeline.shared_params.items():
        if index in shared.replicas:
            tasks.append(reduce_task(step, stage, param))
        elif index == shared.owner:
            tasks.append(merge_task(step, stage, pipeline, param))
    return {task.name: task for task in (*tasks, *others)}
