"""A train step (state, batch) -> (state, metrics) and shapes -> TracedStep: before | loss at microbatch shape | after.

The step is traced twice: with the whole batch, which gives `before` and `after`, and with the rows of one microbatch, which gives the loss.
The second trace ends there.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.tree_util import keystr, tree_flatten_with_path

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.check import check_effects, check_widths, short
from alpa_hpc.ir.faults import faults_of, place_of_equation
from alpa_hpc.ir.grad import NOWHERE, AuxKind, LossBoundary, LossReached, Reduction, SumCount, loss_gradient_p, tracing
from alpa_hpc.ir.graph import Atom, assemble, aval_of, constants_of, reached, variables
from alpa_hpc.ir.inline import CALLS, inline_calls, nested_jaxprs, rewrite
from alpa_hpc.ir.state import StateLayout, is_key, key_data, key_impl, layout_of, shapes_of

Step = Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]  # pytrees of the user's own choice
_LeafStep = Callable[[list[Any], Any], tuple[list[Any], dict[str, Any]]]  # of the arrays of a state


class Split(enum.Enum):
    """How a microbatch gets its part of a microbatch input: its rows, all of it, or a PRNG key folded with its number."""

    ROWS = "rows"
    SAME = "same"
    KEY = "key"


@dataclass(frozen=True, slots=True, eq=False)
class TracedStep:
    """A train step in three parts; B = num_microbatches, `num_rows` rows in the whole batch.

    before: [state leaves at `before_leaves`, batch leaves] -> microbatch inputs of the whole batch
    loss:   [params, microbatch inputs] -> [value] or [sum, count], then aux leaves; traced with num_rows / B rows
    after:  [all state leaves, value, aux leaves, gradients] -> [new state leaves, metrics]; loss results are those of the whole batch
    Keys at the borders of all three are raw data.
    State leaves are the arrays of the state, as `layout` has them. `params` are those the loss is differentiated in; `splits` says how
    each microbatch input is split, `key_impls` of which implementation a PRNG key is (empty for what is no key).
    """

    num_microbatches: int
    num_rows: int
    layout: StateLayout
    batch_tree: Any
    state_names: tuple[str, ...]
    state_avals: tuple[ShapedArray, ...]
    params: tuple[int, ...]
    before: ClosedJaxpr
    before_leaves: tuple[int, ...]
    splits: tuple[Split, ...]
    key_impls: tuple[str, ...]
    loss: ClosedJaxpr
    reduction: Reduction
    aux_kinds: tuple[AuxKind, ...]
    after: ClosedJaxpr
    metric_names: tuple[str, ...]

    @property
    def num_values(self) -> int:
        """1 where the loss is a mean, 2 where it is (sum, count)."""
        return 2 if isinstance(self.reduction, SumCount) else 1

    @property
    def batch_avals(self) -> tuple[ShapedArray, ...]:
        """Avals of the microbatch inputs."""
        return tuple(self.loss.in_avals[len(self.params) :])


@dataclass(frozen=True, slots=True, eq=False)
class _OuterTrace:
    """One trace of the whole step, calls inlined, with the gradient equation found."""

    closed: ClosedJaxpr
    equation: JaxprEqn
    boundary: LossBoundary
    number: int
    num_state: int

    @property
    def operands(self) -> list[Atom]:
        return list(self.equation.invars[self.boundary.num_params :])


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """The loss of one trace, and the avals of what it reads besides parameters."""

    boundary: LossBoundary
    operands: tuple[ShapedArray, ...]


def trace_step(step: Step, state: object, batch: object, *, num_microbatches: int) -> TracedStep:
    """Trace `step` with the shapes of `state` and `batch`; the batch's rows are split into microbatches.

    `batch` is a pytree of ShapeDtypeStruct or arrays; `state` one in which other things may stand, see `ir.state`.

    Raises TraceError, with the reason, for a step that is not before | loss | after.
    """
    num_rows = rows_of(batch, num_microbatches)
    with tracing():
        layout = layout_of(step, state, batch)
    leaves = shapes_of(layout.arrays(state))
    on_leaves = _on_leaves(step, layout)
    whole, (new_leaves, metrics) = _trace_outer(on_leaves, leaves, batch)
    micro = _trace_loss(on_leaves, leaves, _with_rows(batch, num_rows // num_microbatches), whole.number)
    _check_kept(layout.names, leaves, new_leaves)
    params = _params(whole, layout.names)
    before, before_leaves, splits = _before(whole, micro, batch, num_microbatches, layout.names)
    return TracedStep(
        num_microbatches=num_microbatches,
        num_rows=num_rows,
        layout=layout,
        batch_tree=jax.tree.structure(batch),
        state_names=layout.names,
        state_avals=tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves),
        params=params,
        before=before,
        before_leaves=before_leaves,
        splits=splits,
        key_impls=tuple(key_impl(aval_of(atom)) if is_key(aval_of(atom)) else "" for atom in whole.operands),
        loss=_loss(micro.boundary, whole.boundary),
        reduction=whole.boundary.reduction,
        aux_kinds=whole.boundary.aux_kinds,
        after=_after(whole),
        metric_names=_metric_names(metrics),
    )


def _named_leaves(tree: object) -> tuple[tuple[str, ...], list[jax.ShapeDtypeStruct]]:
    pairs, _ = tree_flatten_with_path(tree)
    return tuple(keystr(path, simple=True, separator="/") for path, _ in pairs), [leaf for _, leaf in pairs]


def _has_rows(leaf: jax.ShapeDtypeStruct) -> bool:
    return len(leaf.shape) > 0  # a key by itself has no dims; an array of keys has rows


def rows_of(batch: object, num_microbatches: int) -> int:
    """The rows of a batch of arrays or shapes. Raises TraceError where it has none, or they do not divide into the microbatches."""
    names, leaves = _named_leaves(batch)
    rows = {name: leaf.shape[0] for name, leaf in zip(names, leaves, strict=True) if _has_rows(leaf)}
    if not rows:
        raise TraceError(
            "the batch has no array with rows, so there is nothing to split into microbatches. Pass the batch as second argument."
        )
    if len(set(rows.values())) > 1:
        raw = [name for name, leaf in zip(names, leaves, strict=True) if (leaf.shape, leaf.dtype) == ((2,), jnp.uint32)]
        hint = (
            f" If '{raw[0]}' is a PRNG key, make it by jax.random.key instead of jax.random.PRNGKey: that is no array of rows."
            if raw
            else ""
        )
        raise TraceError(f"all arrays of the batch must have the same number of rows (first dim), found {rows}.{hint}")
    num_rows = next(iter(rows.values()))
    if num_rows == 0:
        raise TraceError(f"the arrays of the batch have no rows (first dim): {rows}. Pass a batch, or shapes, with at least one row.")
    if num_microbatches < 1 or num_rows % num_microbatches:
        raise TraceError(
            f"{num_rows} rows do not divide into {num_microbatches} microbatches. Choose a number of microbatches that divides {num_rows}."
        )
    return num_rows


def _with_rows(batch: object, num_rows: int) -> object:
    def resize(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]) if _has_rows(leaf) else leaf.shape, leaf.dtype)

    return jax.tree.map(resize, batch)


def _trace_outer(step: _LeafStep, state: list[Any], batch: object, until: int = NOWHERE) -> tuple[_OuterTrace, Any]:
    with tracing(until) as boundaries, faults_of("the train step"):
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
    check_effects(closed, where="train step")
    check_widths(closed, where="train step")
    flat = rewrite(closed, CALLS, {})
    found = [equation for equation in flat.jaxpr.eqns if equation.primitive is loss_gradient_p]
    hidden = [equation for equation in flat.jaxpr.eqns if any(_holds_gradient(inner.eqns) for inner in nested_jaxprs(equation))]
    if hidden:
        raise TraceError(
            f"value_and_grad is under '{hidden[0].primitive}': the loss is the microbatch boundary, so it must be at the top level "
            f"of the step (a jit around it is fine){place_of_equation(hidden[0])}"
        )
    if len(found) != 1:
        raise TraceError(
            f"a train step needs one alpa_hpc.value_and_grad whose result it uses, found {len(found)}. Join several losses into one, "
            f"and replace jax.value_and_grad by alpa_hpc.value_and_grad.{''.join(map(place_of_equation, found))}"
        )
    boundary = found[0].params["boundary"]
    number = boundaries.found.index(boundary) if boundary in boundaries.found else NOWHERE  # a jit may have kept it from a trace before
    return _OuterTrace(flat, found[0], boundary, number, len(state)), shapes


def _trace_loss(step: _LeafStep, state: list[Any], batch: object, number: int) -> _Loss:
    """Trace a step up to its loss `number`, or whole where that does not come up (NOWHERE; a jit that has been traced before)."""
    try:
        trace, _ = _trace_outer(step, state, batch, until=number)
    except LossReached as reached:
        return _Loss(reached.boundary, reached.operands)
    return _Loss(trace.boundary, tuple(aval_of(atom) for atom in trace.operands))


def _holds_gradient(equations: Sequence[JaxprEqn]) -> bool:
    return any(eqn.primitive is loss_gradient_p or any(_holds_gradient(inner.eqns) for inner in nested_jaxprs(eqn)) for eqn in equations)


def _on_leaves(step: Step, layout: StateLayout) -> _LeafStep:
    """The step as a function of the state's arrays, to arrays and metrics."""

    def on_leaves(leaves: list[Any], batch: Any) -> tuple[list[Any], dict[str, Any]]:
        results: Any = step(layout.state(leaves), batch)
        if not (isinstance(results, tuple) and len(results) == 2 and isinstance(results[1], Mapping)):
            raise TraceError(f"a train step must return (new_state, metrics) with metrics a dict, found {jax.tree.structure(results)}.")
        new_state, metrics = results
        return layout.arrays(new_state), dict(metrics)

    return on_leaves


def _check_kept(names: Sequence[str], old_leaves: Sequence[Any], new_leaves: Sequence[Any]) -> None:
    for name, old, new in zip(names, old_leaves, new_leaves, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise TraceError(
                f"state leaf '{name}' changes from {old.dtype}{list(old.shape)} to {new.dtype}{list(new.shape)}; a step must keep both."
            )


def _metric_names(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    names, leaves = _named_leaves(metrics)
    if len(leaves) != len(metrics):
        raise TraceError(f"metrics must be a flat dict of arrays, found {jax.tree.structure(metrics)}.")
    return names


def _params(trace: _OuterTrace, names: Sequence[str]) -> tuple[int, ...]:
    positions = {var: leaf for leaf, var in enumerate(trace.closed.jaxpr.invars[: trace.num_state])}
    params: list[int] = []
    for number, atom in enumerate(trace.equation.invars[: trace.boundary.num_params]):
        if isinstance(atom, Literal) or atom not in positions:
            maker = next((eqn for eqn in trace.closed.jaxpr.eqns if atom in eqn.outvars), None)
            source = f"it is made by {short(maker)}" if maker else "it is not part of the state"
            raise TraceError(
                f"parameter {number} of the loss must be a leaf of the state, unmodified; {source}. "
                "If it is a cast, cast inside the loss instead."
            )
        leaf = positions[atom]
        if leaf in params:
            raise TraceError(
                f"state leaf '{names[leaf]}' occurs twice in the first argument of the loss. Pass it once and use it twice inside."
            )
        params.append(leaf)
    return tuple(params)


def _before(
    whole: _OuterTrace, micro: _Loss, batch: object, num_microbatches: int, names: Sequence[str]
) -> tuple[ClosedJaxpr, tuple[int, ...], tuple[Split, ...]]:
    jaxpr = whole.closed.jaxpr
    state_vars, batch_vars = jaxpr.invars[: whole.num_state], jaxpr.invars[whole.num_state :]
    row_vars = [var for var, leaf in zip(batch_vars, jax.tree.leaves(batch), strict=True) if _has_rows(leaf)]
    tainted = reached(jaxpr.eqns, row_vars)
    _check_same_operands(whole, micro)
    splits = tuple(
        _split(atom, small, tainted=atom in tainted, num_microbatches=num_microbatches)
        for atom, small in zip(whole.operands, micro.operands, strict=True)
    )
    closed = assemble(jaxpr.invars, whole.operands, jaxpr.eqns, constants_of(whole.closed))
    read = {var for equation in closed.jaxpr.eqns for var in variables(equation.invars)} | set(variables(whole.operands))
    params = set(variables(whole.equation.invars[: whole.boundary.num_params]))
    for leaf, var in enumerate(state_vars):
        if var in params and var in read:
            raise TraceError(
                f"what is computed before the loss reads parameter '{names[leaf]}', which is differentiated. "
                "Move that computation into the loss (a cast too), and pass parameters only through its first argument."
            )
    leaves = tuple(leaf for leaf, var in enumerate(state_vars) if var in read)
    trimmed = assemble([*(state_vars[leaf] for leaf in leaves), *batch_vars], whole.operands, jaxpr.eqns, constants_of(whole.closed))
    return _keys_as_data(trimmed), leaves, splits


def _check_same_operands(whole: _OuterTrace, micro: _Loss) -> None:
    if len(whole.operands) != len(micro.operands):
        raise TraceError(
            f"the loss reads {len(whole.operands)} values with the whole batch and {len(micro.operands)} with a microbatch. "
            "The step must do the same work for every number of rows."
        )


def _split(atom: Atom, micro: ShapedArray, *, tainted: bool, num_microbatches: int) -> Split:
    shape = aval_of(atom).shape
    if tainted:
        if len(shape) == 0 or shape[0] != num_microbatches * (micro.shape[0] if micro.shape else 0) or shape[1:] != micro.shape[1:]:
            raise TraceError(
                f"a value of shape {list(shape)}, computed from the batch before the loss, cannot be split by rows into {num_microbatches} "
                f"microbatches (a microbatch alone gives {list(micro.shape)}). Compute it inside the loss."
            )
        return Split.ROWS
    if shape != micro.shape:
        raise TraceError(
            f"a value read by the loss has shape {list(shape)} with the whole batch and {list(micro.shape)} with a microbatch."
        )
    return Split.KEY if jnp.issubdtype(aval_of(atom).dtype, jax.dtypes.prng_key) else Split.SAME


def _keys_as_data(closed: ClosedJaxpr) -> ClosedJaxpr:
    """PRNG keys at the inputs and outputs become raw data."""
    if not any(map(is_key, (*closed.in_avals, *closed.out_avals))):
        return closed

    def on_data(*args: jax.Array) -> list[jax.Array]:
        inputs = [_wrap(x, aval) if is_key(aval) else x for x, aval in zip(args, closed.in_avals, strict=True)]
        return [key_data(x) for x in eval_jaxpr(closed.jaxpr, closed.consts, *inputs)]

    return jax.make_jaxpr(on_data)(*(key_data(_struct(aval)) for aval in closed.in_avals))


def _struct(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _wrap(data: jax.Array, aval: ShapedArray) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=key_impl(aval))


def _loss(micro: LossBoundary, whole: LossBoundary) -> ClosedJaxpr:
    if [(aval.shape, aval.dtype) for aval in micro.loss.out_avals] != [(aval.shape, aval.dtype) for aval in whole.loss.out_avals]:
        raise TraceError(
            f"the outputs of the loss have other shapes with a microbatch ({micro.loss.out_avals}) than with the whole batch "
            f"({whole.loss.out_avals}). "
            "Auxiliary outputs must not have a dim of the batch: reduce them inside the loss."
        )
    check_effects(micro.loss, where="loss")
    check_widths(micro.loss, where="loss")
    jaxpr = micro.loss.jaxpr
    if reached(jaxpr.eqns, jaxpr.invars[: micro.num_params]).isdisjoint(variables(jaxpr.outvars[:1])):
        raise TraceError("the loss depends on none of the parameters it is differentiated in, so there is nothing to train.")
    return _keys_as_data(inline_calls(micro.loss))


def _after(trace: _OuterTrace) -> ClosedJaxpr:
    jaxpr = trace.closed.jaxpr
    state_vars, batch_vars = jaxpr.invars[: trace.num_state], jaxpr.invars[trace.num_state :]
    others = [equation for equation in jaxpr.eqns if equation is not trace.equation]
    results = [Var(var.aval) for var in trace.equation.outvars]
    renamed = dict(zip(trace.equation.outvars, results, strict=True))

    def rename(atoms: Sequence[Atom]) -> list[Atom]:
        return [atom if isinstance(atom, Literal) else renamed.get(atom, atom) for atom in atoms]

    equations = [equation.replace(invars=rename(equation.invars)) for equation in others]
    closed = assemble([*state_vars, *results, *batch_vars], rename(jaxpr.outvars), equations, constants_of(trace.closed))
    for equation in closed.jaxpr.eqns:
        if any(var in set(batch_vars) for var in variables(equation.invars)):
            raise TraceError(f"what follows the loss reads the batch: {short(equation)}. Return it from the loss as an auxiliary output.")
    if any(var in set(batch_vars) for var in variables(closed.jaxpr.outvars)):
        raise TraceError("the step returns a part of its batch. Return it from the loss as an auxiliary output.")
    return _keys_as_data(assemble([*state_vars, *results], closed.jaxpr.outvars, closed.jaxpr.eqns, constants_of(closed)))
