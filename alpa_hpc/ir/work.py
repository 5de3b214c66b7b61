"""What a train step is cut into: layers (forward and backward), the update of each parameter, and what ties parameters together.

Positions: a *leaf* is a position in the flattened state; a *batch input* a position in `TracedStep`'s microbatch inputs;
a *value* an id of an activation that crosses a layer boundary.
All jaxprs here are flat: no jit, closed_call, custom_jvp, custom_vjp or remat equation remains.
"""

import enum
from dataclasses import dataclass

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: a run of forward equations and the backward derived from them, as one vjp (paper, section 5.3).

    forward:            [params, batch, inputs] -> [outputs, residuals]
    backward:           [params, batch, inputs, residuals, cotangents of cotangent_outputs]
                        -> [cotangents of cotangent_inputs, gradient of each param]

    The backward of the layer that makes the loss starts from a cotangent of 1 by itself (the loss is not among `cotangent_outputs`).
    A residual is never a param, a batch input or an input, nor something that depends on params and constants alone (that is
    recomputed). `key` is the canonical content: layers with equal keys are the same programs up to the names of variables, params,
    batch inputs and values.
    """

    index: int
    key: str
    params: tuple[int, ...]
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cotangent_inputs: tuple[int, ...]
    cotangent_outputs: tuple[int, ...]
    forward: ClosedJaxpr
    backward: ClosedJaxpr


class Accumulation(enum.Enum):
    """How a loss output is gathered over microbatches."""

    SUM = "sum"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A result of the loss function: the value that carries it and how microbatches are gathered (a mean is a SUM; the update divides)."""

    value: int
    accumulation: Accumulation


class ReductionKind(enum.Enum):
    """How partial scalars of different parameters are joined."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    AND = "and"
    OR = "or"


@dataclass(frozen=True, slots=True, eq=False)
class ParamPartials:
    """A parameter's part in one round of reductions.

    program: [gradient (sum over microbatches), leaves, scalars] -> one scalar for each reduction in `reductions`
    `scalars` are positions in the outputs of ReductionRound.shared, `reductions` positions in ReductionRound.kinds.
    """

    scalars: tuple[int, ...]
    reductions: tuple[int, ...]
    program: ClosedJaxpr


@dataclass(frozen=True, slots=True, eq=False)
class ParamUpdate:
    """The part of the update that belongs to one parameter.

    leaves:   state leaves with the parameter's fate: itself first, then its optimiser state
    partials: its part in each round of reductions
    update:   [gradient (sum over microbatches), leaves, scalars] -> new leaves
    `scalars` are positions in the outputs of UpdateStep.shared_after.
    """

    param: int
    key: str
    leaves: tuple[int, ...]
    scalars: tuple[int, ...]
    partials: tuple[ParamPartials, ...]
    update: ClosedJaxpr


@dataclass(frozen=True, slots=True, eq=False)
class ReductionRound:
    """Reductions over parameters that are made at once: how each is joined, and the scalar work before it.

    shared: [shared_leaves, extras, results of all earlier rounds] -> scalars
    """

    kinds: tuple[ReductionKind, ...]
    shared: ClosedJaxpr


@dataclass(frozen=True, slots=True, eq=False)
class UpdateStep:
    """Everything after the loss: per-parameter updates, the reductions that join them, and scalar work repeated on every mesh.

    rounds:       of reductions; what a later one sums may depend on what an earlier one found (a norm of clipped gradients)
    shared_after: [shared_leaves, extras, results of all rounds] -> [scalars, new shared_leaves, metrics];
                  its first `num_scalars_after` outputs are scalars
    `extras` are the accumulated loss outputs, in order (they live on the mesh of the last layer and are broadcast to all).
    """

    params: tuple[ParamUpdate, ...]
    rounds: tuple[ReductionRound, ...]
    shared_leaves: tuple[int, ...]
    shared_after: ClosedJaxpr
    num_scalars_after: int


@dataclass(frozen=True, slots=True, eq=False)
class LayeredStep:
    """A train step cut into layers; see `layers/`. `num_microbatches` (B) is part of it: the loss was traced at microbatch shape.

    state_avals / batch_avals: flat avals of the state, and of the microbatch inputs; values: aval of each value id.
    `batch_rows` says of each microbatch input whether it is split by rows of the global batch (True) or the same for all microbatches.
    """

    num_microbatches: int
    state_names: tuple[str, ...]
    state_avals: tuple[ShapedArray, ...]
    batch_avals: tuple[ShapedArray, ...]
    values: dict[int, ShapedArray]
    layers: tuple[Layer, ...]
    loss_outputs: tuple[LossOutput, ...]
    update: UpdateStep
    metric_names: tuple[str, ...]
    key: str
