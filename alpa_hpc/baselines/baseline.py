"""(Baseline, LayeredStep, MeshShape) -> Restriction | Inapplicable: what others do by rule, in our own sharding problem (Fig. 8).

Cost model and solver are ours: a baseline only forbids strategies, so it gets the best plan of its kind, and ours cannot cost more.

| baseline          | axis 0, axis 1     | matrices    | gradients, optimiser state | what comes out                         |
|-------------------|--------------------|-------------|----------------------------|----------------------------------------|
| data parallel     | batch              | whole       | whole                      | gradients all-reduced once             |
| ZeRO-2            | batch              | whole       | split                      | reduce-scattered, weights all-gathered |
| ZeRO-3            | batch              | split       | split                      | weights gathered for each use          |
| tensor parallel   | batch, inner       | inner       | as computed                | Narayanan et al., 2021                 |
| sequence parallel | batch, inner+token | inner       | as computed                | Korthikanti et al., 2022               |
| expert parallel   | batch+expert       | by experts  | split                      | all-to-alls about experts: GShard      |
| largest dim       | anything           | largest dim | largest dim                | the paper's heuristic                  |

ZeRO-3 keeps parameters that are no matrices whole, as DeepSpeed does with small ones. After "largest dim" the rest is solved, which in the
paper GSPMD propagates.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alpa_hpc.baselines.dim_kinds import DimKind, layer_kinds, microbatch_rows
from alpa_hpc.baselines.restriction import OF_BATCHES, AxisUse, Restriction, Storage
from alpa_hpc.baselines.roles import layer_roles
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.graph import variables
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.sharding.strategies.rule import shape_of


class Baseline(enum.Enum):
    """A known way to split a model over devices."""

    DATA = "data parallel"
    ZERO_2 = "ZeRO-2"
    ZERO_3 = "ZeRO-3"
    TENSOR = "tensor parallel"
    SEQUENCE = "sequence parallel"
    EXPERT = "expert parallel"
    LARGEST_DIM = "largest dim"


@dataclass(frozen=True, slots=True)
class Inapplicable:
    """A baseline that has no plan for a model on a mesh."""

    reason: str


_BATCH = (AxisUse.BATCH, AxisUse.BATCH)
_TOKENS = (AxisUse.BATCH, AxisUse.INNER_OR_TOKENS)
_EXPERTS = (AxisUse.BATCH_OR_EXPERTS, AxisUse.BATCH_OR_EXPERTS)
_ANY = (AxisUse.ANY, AxisUse.ANY)
_RULES: Mapping[Baseline, Restriction] = {
    Baseline.DATA: Restriction(Baseline.DATA.value, _BATCH, matrices=Storage.WHOLE, updates=Storage.WHOLE),
    Baseline.ZERO_2: Restriction(Baseline.ZERO_2.value, _BATCH, matrices=Storage.WHOLE, updates=Storage.SPLIT),
    Baseline.ZERO_3: Restriction(Baseline.ZERO_3.value, _BATCH, matrices=Storage.SPLIT, updates=Storage.SPLIT),
    Baseline.TENSOR: Restriction(Baseline.TENSOR.value, (AxisUse.BATCH, AxisUse.INNER), matrices=Storage.ALL_AXES, updates=Storage.AS_AXES),
    Baseline.SEQUENCE: Restriction(Baseline.SEQUENCE.value, _TOKENS, matrices=Storage.ALL_AXES, updates=Storage.AS_AXES),
    Baseline.EXPERT: Restriction(Baseline.EXPERT.value, _EXPERTS, updates=Storage.SPLIT),
    Baseline.LARGEST_DIM: Restriction(Baseline.LARGEST_DIM.value, _ANY, Storage.LARGEST, batch=Storage.LARGEST, updates=Storage.LARGEST),
}


def baseline_restriction(baseline: Baseline, step: LayeredStep, shape: MeshShape) -> Restriction | Inapplicable:
    """What `baseline` allows on a mesh of `shape`, or why it cannot be: a batch, experts or a sequence that the mesh does not divide."""
    restriction = _RULES[baseline]
    reasons = (_rows_fault(restriction, step, shape), _dims_fault(baseline, step, shape))
    reason = next((reason for reason in reasons if reason), "")
    return Inapplicable(f"{baseline.value}: {reason}") if reason else restriction


def _rows_fault(restriction: Restriction, step: LayeredStep, shape: MeshShape) -> str:
    rows, parts = microbatch_rows(step), 1
    for size, use in zip(shape.sizes, restriction.axes, strict=True):
        parts *= size if use in OF_BATCHES.split else 1
    return f"a microbatch has {rows} rows, expected a multiple of {parts}: so many devices share it" if rows % parts else ""


def _dims_fault(baseline: Baseline, step: LayeredStep, shape: MeshShape) -> str:
    match baseline:
        case Baseline.TENSOR | Baseline.SEQUENCE if shape.cols == 1:
            return "axis 1 of the mesh, over which weights are split, has one device: use a shape of more columns"
        case Baseline.TENSOR if not _divisible(inner_sizes(step), shape.cols):
            return f"no matrix has an inner dim that {shape.cols} devices divide"
        case Baseline.SEQUENCE if not _divisible(token_sizes(step), shape.cols):
            return f"no value between layers has a token dim, such as the sequence, that {shape.cols} devices divide"
        case Baseline.EXPERT if not expert_sizes(step):
            return "no product of the model has a matrix for each of several experts"
        case Baseline.EXPERT if any(size % shape.num_devices for size in expert_sizes(step)):
            return f"there are {min(expert_sizes(step))} experts, expected a multiple of {shape.num_devices}: the devices share them"
        case _:
            return ""


def _divisible(sizes: Iterable[int], parts: int) -> bool:
    return any(size % parts == 0 for size in sizes)


def expert_sizes(step: LayeredStep) -> frozenset[int]:
    """Numbers of experts in the model's mixtures."""
    return frozenset(shape_of(var)[d] for layer in step.layers for var, d in layer_roles(layer).experts)


def inner_sizes(step: LayeredStep) -> frozenset[int]:
    """Sizes of the inner dims of matrices: what tensor parallelism splits."""
    found: set[int] = set()
    for layer in step.layers:
        kinds_of = layer_kinds(step, layer)
        for position in layer_roles(layer).matrices:
            var = layer.forward.jaxpr.invars[position]
            found.update(size for size, kind in zip(shape_of(var), kinds_of(var), strict=True) if kind is DimKind.INNER)
    return frozenset(found)


def token_sizes(step: LayeredStep) -> frozenset[int]:
    """Sizes of the token dims of values between layers: what sequence parallelism splits."""
    found: set[int] = set()
    for layer in step.layers:
        kinds_of = layer_kinds(step, layer)
        for var in variables(layer.forward.jaxpr.outvars[: len(layer.outputs)]):
            found.update(size for size, kind in zip(shape_of(var), kinds_of(var), strict=True) if kind is DimKind.TOKEN)
    return frozenset(found)
