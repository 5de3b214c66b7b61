"""A loss function -> its value and gradient; while a step is traced, one equation that holds the loss (the microbatch boundary).

Outside `tracing()`, `value_and_grad` is jax's own. Inside, it binds `loss_gradient_p`: [params, operands] -> [value, aux, gradients], with
the loss jaxpr [params, operands] -> [value or (sum, count), aux] as a parameter; what the loss closes over becomes operands. Inside the
loss it is refused: there is one microbatch boundary.
"""

import contextvars
import enum
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from alpa_hpc.arguments import check_argument
from alpa_hpc.errors import ConfigError, TraceError
from alpa_hpc.ir.faults import calling_place, faults_of
from alpa_hpc.ir.graph import closed_jaxpr
from alpa_hpc.ir.state import is_array, is_key, is_number


@dataclass(frozen=True, slots=True)
class Mean:
    """The loss is a mean over the rows of the batch: microbatches of equal size are averaged."""


@dataclass(frozen=True, slots=True)
class SumCount:
    """The loss returns (sum, count): value and gradient are those of sum / count over the whole batch, count held constant."""


Reduction = Mean | SumCount


class AuxKind(enum.Enum):
    """How an auxiliary output of the loss is gathered over microbatches."""

    MEAN = "mean"
    SUM = "sum"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class LossBoundary:
    """What the gradient equation knows: `loss` is [params, operands] -> [value] or [sum, count], then aux leaves."""

    loss: ClosedJaxpr
    num_params: int
    reduction: Reduction
    aux_kinds: tuple[AuxKind, ...]

    @property
    def num_values(self) -> int:
        """1 for a mean, 2 for (sum, count)."""
        return 2 if isinstance(self.reduction, SumCount) else 1


loss_gradient_p = Primitive("loss_gradient")
loss_gradient_p.multiple_results = True


class _Traced(enum.Enum):
    """What is traced at the moment."""

    NOTHING = "nothing"
    STEP = "step"
    LOSS = "loss"


@dataclass(slots=True, eq=False)
class Boundaries:
    """The losses that a trace of a step has come upon, in order; it ends by LossReached at number `last`."""

    last: int
    found: list[LossBoundary] = field(default_factory=list[LossBoundary])


class LossReached(BaseException):  # noqa: N818 - no error, and nothing that a step's own `except Exception` may take for one
    """Ends the trace of a step at a loss of which no more than the loss is wanted."""

    def __init__(self, boundary: LossBoundary, operands: Sequence[ShapedArray]) -> None:
        super().__init__("the trace of a step was wanted up to its loss")
        self.boundary = boundary
        self.operands = tuple(operands)


NOWHERE = -1
_traced: contextvars.ContextVar[_Traced] = contextvars.ContextVar("alpa_hpc_traced", default=_Traced.NOTHING)
_boundaries: contextvars.ContextVar[Boundaries] = contextvars.ContextVar("alpa_hpc_boundaries")


@contextmanager
def tracing(until: int = NOWHERE) -> Generator[Boundaries]:
    """While open, `value_and_grad` marks the loss instead of differentiating it; loss number `until` raises LossReached."""
    boundaries = Boundaries(until)
    token = _boundaries.set(boundaries)
    try:
        with _now_traced(_Traced.STEP):
            yield boundaries
    finally:
        _boundaries.reset(token)


@contextmanager
def _now_traced(what: _Traced) -> Generator[None]:
    token = _traced.set(what)
    try:
        with set_xla_metadata(alpa_hpc=what.value):  # part of jit's cache key: what was traced before, elsewhere, is traced anew
            yield
    finally:
        _traced.reset(token)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - a drop-in for jax.value_and_grad
    reduction: Reduction = Mean(),  # noqa: B008 - a frozen value
    aux: object = None,
) -> Callable[..., tuple[Any, Any]]:
    """Value and gradient of `fun` in its first argument, like `jax.value_and_grad`.

    That argument may hold what has no gradient (integers, PRNG keys, functions, as in an equinox module; Python's numbers beside arrays):
    the gradient is None there.
    With `SumCount()` the function returns (sum, count), and what comes back is sum / count and its gradient. `aux` is a pytree prefix of
    `AuxKind` that says how each auxiliary output is gathered over microbatches. Raises TraceError for what cannot be cut into microbatches,
    ConfigError for an argument of another kind.
    """
    _check_arguments(fun, has_aux, reduction, aux)
    if argnums != 0:
        raise TraceError(
            f"value_and_grad differentiates the first argument, found argnums={argnums}. Put all parameters into the first argument."
        )

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        params, held = _parted(args[0])

        def loss(first: Sequence[Any]) -> object:
            others, keywords = jax.tree.map(
                lambda leaf: leaf, (args[1:], kwargs)
            )  # built anew: flax's variables know the trace they are of
            return fun(held.joined(first), *others, **keywords)

        match _traced.get():
            case _Traced.NOTHING:
                value, gradients = _differentiate(loss, params, has_aux, reduction)
                return value, held.gradient(gradients)
            case _Traced.STEP:
                value, gradients = _bind(loss, params, has_aux, reduction, aux)
                return value, held.gradient(gradients)
            case _Traced.LOSS:
                raise TraceError(
                    "alpa_hpc.value_and_grad is called inside the loss of another, and a step has one microbatch boundary: use "
                    f"jax.value_and_grad, or jax.grad, for a derivative that is a part of the loss{calling_place()}"
                )

    return wrapped


def _check_arguments(fun: object, has_aux: object, reduction: object, aux: object) -> None:
    """Look at them before the step is traced: a reduction that is none of ours would else be taken for a mean."""
    check_argument("value_and_grad: fun", fun, Callable)
    check_argument("value_and_grad: has_aux", has_aux, bool)
    if not isinstance(reduction, Reduction):
        raise ConfigError(
            f"value_and_grad: reduction is {reduction!r}, expected alpa_hpc.Mean() for a loss that returns a mean, or alpa_hpc.SumCount() "
            "for one that returns (sum, count)"
        )
    if aux is not None and not has_aux:
        raise ConfigError(
            f"value_and_grad: aux is {aux!r}, expected none without has_aux=True: say has_aux=True if the loss returns (loss, outputs)"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What of a first argument is no parameter: its tree, and the leaves that are held constant (None in the place of a parameter)."""

    tree: Any
    leaves: tuple[Any, ...]
    is_param: tuple[bool, ...]

    def joined(self, params: Sequence[Any]) -> Any:
        """The whole argument."""
        remaining = iter(params)
        pairs = zip(self.leaves, self.is_param, strict=True)
        return jax.tree.unflatten(self.tree, [next(remaining) if is_param else leaf for leaf, is_param in pairs])

    def gradient(self, gradients: Sequence[Any]) -> Any:
        """The argument's tree with a gradient for each parameter, None elsewhere."""
        return _Held(self.tree, (None,) * len(self.leaves), self.is_param).joined(gradients)


def _parted(argument: Any) -> tuple[list[Any], _Held]:
    """The parameters in an argument, and the rest."""
    leaves, tree = jax.tree.flatten(argument)
    is_param = tuple(is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves)
    if not any(is_param):
        is_param = tuple(map(is_number, leaves))
    pairs = list(zip(leaves, is_param, strict=True))
    held = _Held(tree, tuple(None if param else leaf for leaf, param in pairs), is_param)
    return [leaf for leaf, param in pairs if param], held


def _differentiate(
    loss: Callable[[Sequence[Any]], Any],
    params: Sequence[Any],
    has_aux: bool,  # noqa: FBT001
    reduction: Reduction,
) -> tuple[object, Sequence[Any]]:
    def mean_loss(first: Sequence[Any]) -> object:
        out = loss(first)
        result, extra = out if has_aux else (out, None)
        if isinstance(reduction, SumCount):
            total, count = result
            result = total / jax.lax.stop_gradient(jnp.asarray(count, total.dtype))
        return (result, extra) if has_aux else result

    return jax.value_and_grad(mean_loss, has_aux=has_aux)(params)


def _bind(
    loss: Callable[[Sequence[Any]], object],
    params: Sequence[Any],
    has_aux: bool,  # noqa: FBT001
    reduction: Reduction,
    aux: object,
) -> tuple[object, Sequence[Any]]:
    with _now_traced(_Traced.LOSS), faults_of("the loss"):
        closed, shape = jax.make_jaxpr(loss, return_shape=True)(params)
    result, extra = shape if has_aux else (shape, None)
    _check_result(result, reduction)
    kinds = _aux_kinds(extra, aux)
    boundary, operands = _lift_tracers(closed, len(params), reduction, kinds)
    _note(boundary, operands)
    value, *rest = loss_gradient_p.bind(*params, *operands, boundary=boundary)
    aux_leaves, gradients = rest[: len(kinds)], rest[len(kinds) :]
    if has_aux:
        value = (value, jax.tree.unflatten(jax.tree.structure(extra), aux_leaves))
    return value, gradients


def _note(boundary: LossBoundary, operands: Sequence[Tracer[Any]]) -> None:
    """Count the loss, and end the trace if it was wanted up to here."""
    boundaries = _boundaries.get()
    boundaries.found.append(boundary)
    if len(boundaries.found) - 1 == boundaries.last:
        raise LossReached(boundary, [ShapedArray(operand.shape, operand.dtype) for operand in operands])


def _lift_tracers(
    closed: ClosedJaxpr, num_params: int, reduction: Reduction, kinds: tuple[AuxKind, ...]
) -> tuple[LossBoundary, list[Tracer[Any]]]:
    """Closed-over tracers become operands; arrays stay constants."""
    jaxpr = closed.jaxpr
    pairs = list(zip(jaxpr.constvars, closed.consts, strict=True))
    lifted = [(var, value) for var, value in pairs if isinstance(value, Tracer)]
    held = {var: value for var, value in pairs if not isinstance(value, Tracer)}
    inputs = [*jaxpr.invars, *(var for var, _ in lifted)]
    loss = closed_jaxpr(inputs, jaxpr.outvars, jaxpr.eqns, held)
    return LossBoundary(loss, num_params, reduction, kinds), [value for _, value in lifted]


def _check_result(result: object, reduction: Reduction) -> None:
    leaves = jax.tree.leaves(result)
    expected = 2 if isinstance(reduction, SumCount) else 1
    found = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    is_bare = jax.tree_util.treedef_is_leaf(jax.tree.structure(result))
    if len(leaves) != expected or (expected == 1 and not is_bare) or any(leaf.shape for leaf in leaves):
        wanted = "a pair of scalars (sum, count)" if expected == 2 else "one scalar"
        held = f" in a {type(result).__name__}" if leaves and not is_bare else ""
        raise TraceError(f"the loss must return {wanted}, found {found or 'nothing'}{held}. Reduce it over the rows inside the loss.")
    if not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise TraceError(f"the loss must be of a floating dtype, found {found}. Cast it inside the loss.")


def _aux_kinds(extra: object, aux: object) -> tuple[AuxKind, ...]:
    leaves = jax.tree.leaves(extra)
    if not leaves:
        return ()
    if aux is None:
        raise TraceError(
            f"the loss has {len(leaves)} auxiliary outputs, and it is not said how microbatches join them. "
            "Pass value_and_grad(..., aux=...) with AuxKind.MEAN, SUM or LAST for each of them."
        )
    try:
        kinds = jax.tree.leaves(jax.tree.map(lambda kind, part: jax.tree.map(lambda _: kind, part), aux, extra))
    except ValueError as error:
        raise TraceError(f"`aux` must be a pytree prefix of the auxiliary outputs, found {aux!r}: {error}") from error
    for kind, leaf in zip(kinds, leaves, strict=True):
        if not isinstance(kind, AuxKind):
            raise TraceError(f"`aux` must hold AuxKind values, found {kind!r}. Use AuxKind.MEAN, SUM or LAST.")
        if kind is AuxKind.SUM and is_key(leaf):
            raise TraceError("an auxiliary output is a PRNG key, and keys cannot be added up. Use AuxKind.LAST for it.")
        if kind is AuxKind.MEAN and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TraceError(
                f"an auxiliary mean must be of a floating dtype, found {leaf.dtype}{list(leaf.shape)}. Use AuxKind.SUM, or cast it."
            )
    return tuple(kinds)


def _evaluate(*operands: jax.Array, boundary: LossBoundary) -> list[jax.Array]:
    """What the equation means outside a trace (a jit of the step that was first called inside one keeps the equation)."""
    params, others = operands[: boundary.num_params], operands[boundary.num_params :]
    count = boundary.num_values

    def loss(first: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        outputs = eval_jaxpr(boundary.loss.jaxpr, boundary.loss.consts, *first, *others)
        value = outputs[0] if count == 1 else outputs[0] / jax.lax.stop_gradient(outputs[1].astype(outputs[0].dtype))
        return value, outputs[count:]

    (value, extra), gradients = jax.value_and_grad(loss, has_aux=True)(tuple(params))
    return [value, *extra, *gradients]


def _abstract(*operands: ShapedArray, boundary: LossBoundary) -> list[ShapedArray]:
    outputs = [ShapedArray(aval.shape, aval.dtype) for aval in boundary.loss.out_avals]
    gradients = [ShapedArray(aval.shape, aval.dtype) for aval in operands[: boundary.num_params]]
    return [outputs[0], *outputs[boundary.num_values :], *gradients]


def _refuse(what: str) -> Callable[..., object]:
    def rule(*_: object, **__: object) -> object:
        raise TraceError(
            f"value_and_grad {what}: the loss is the microbatch boundary of the step, so it must be at the top level of the "
            f"step{calling_place()}"
        )

    return rule


loss_gradient_p.def_impl(_evaluate)
loss_gradient_p.def_abstract_eval(_abstract)
mlir.register_lowering(loss_gradient_p, mlir.lower_fun(_evaluate, multiple_results=True))
batching.primitive_batchers[loss_gradient_p] = _refuse("is under vmap")
ad.primitive_jvps[loss_gradient_p] = _refuse("is differentiated again")
