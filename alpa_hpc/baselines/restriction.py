"""Restriction: what a baseline lets tensors be split over, as data; `restrict.py` applies it to a sharding problem.

Activations follow the mesh axes: what kind of dim (`dim_kinds`) each axis may split. Weights, batch inputs and what an update works on may
besides be told how they are stored.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from alpa_hpc.baselines.dim_kinds import DimKind, Kinds
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.spec import Spec, SpecList

Kind = frozenset[DimKind]


class AxisUse(enum.Enum):
    """What a mesh axis may split."""

    ANY = enum.auto()
    """any dim"""
    BATCH = enum.auto()
    """the batch, of every tensor that has one, and nothing else"""
    NOT_BATCH = enum.auto()
    """any dim but the batch"""
    INNER = enum.auto()
    """inner dims"""
    INNER_OR_TOKENS = enum.auto()
    """inner dims, and token dims: those of every value between layers, since that is what makes it sequence parallel"""
    BATCH_OR_EXPERTS = enum.auto()
    """the batch or the experts, of every tensor that has a batch; the experts' own matrices by experts"""


PERMITTED: Mapping[AxisUse, Kind] = {
    AxisUse.ANY: frozenset(DimKind),
    AxisUse.BATCH: frozenset({DimKind.BATCH}),
    AxisUse.NOT_BATCH: frozenset(DimKind) - {DimKind.BATCH},
    AxisUse.INNER: frozenset({DimKind.INNER}),
    AxisUse.INNER_OR_TOKENS: frozenset({DimKind.INNER, DimKind.TOKEN}),
    AxisUse.BATCH_OR_EXPERTS: frozenset({DimKind.BATCH, DimKind.EXPERT}),
}


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """In a tensor that has a dim of kind `of`, an axis whose use is in `split` must split a dim of those kinds."""

    of: DimKind
    split: Mapping[AxisUse, Kind]


OF_BATCHES = Demand(DimKind.BATCH, {use: PERMITTED[use] for use in (AxisUse.BATCH, AxisUse.BATCH_OR_EXPERTS)})
"""Of activations."""
OF_BORDERS = Demand(DimKind.TOKEN, {AxisUse.INNER_OR_TOKENS: frozenset({DimKind.TOKEN})})
"""Of values between layers."""
OF_EXPERTS = Demand(DimKind.EXPERT, {AxisUse.BATCH_OR_EXPERTS: frozenset({DimKind.EXPERT})})
"""Of the experts' own matrices."""


class Storage(enum.Enum):
    """How tensors are stored, whatever is done with them."""

    FREE = enum.auto()
    """in any way"""
    AS_AXES = enum.auto()
    """as the axes may split them"""
    ALL_AXES = enum.auto()
    """likewise, and over as many of the axes as can be"""
    WHOLE = enum.auto()
    """on every device"""
    SPLIT = enum.auto()
    """over as many mesh axes as their dims can be divided by, any dim"""
    LARGEST = enum.auto()
    """likewise, but no other dim than the largest that can"""


@dataclass(frozen=True, slots=True)
class Restriction:
    """What axis 0 and axis 1 may split, and how state is stored.

    matrices: parameters that products, convolutions and lookups read; where they must be split, the others are whole (SPLIT) or may be
    batch:    inputs of a microbatch
    updates:  gradients and optimiser state while a parameter is updated; where SPLIT, gradients may be split before, too
    """

    name: str
    axes: tuple[AxisUse, AxisUse]
    matrices: Storage = Storage.AS_AXES
    batch: Storage = Storage.AS_AXES
    updates: Storage = Storage.FREE

    @property
    def vectors(self) -> Storage:
        """How the parameters are stored that are no matrices."""
        gentler = {Storage.SPLIT: Storage.WHOLE, Storage.ALL_AXES: Storage.AS_AXES}
        return gentler.get(self.matrices, self.matrices)

    def divides(self, shape: MeshShape, rows: int) -> bool:
        """Whether a microbatch of `rows` rows can be split over the axes that are for the batch."""
        return rows % prod(size for size, use in zip(shape.sizes, self.axes, strict=True) if use is AxisUse.BATCH) == 0

    def permits(self, spec: Spec, kinds: Kinds) -> bool:
        """Whether a tensor whose dims are `kinds` may lie so."""
        return all(kind in PERMITTED[self.axes[axis]] for dim, kind in zip(spec.dims, kinds, strict=True) for axis in dim)

    def splits(self, spec: Spec, kinds: Kinds, wide: Sequence[int], demand: Demand) -> bool:
        """Whether a tensor whose dims are `kinds` meets a demand on the axes in `wide` (those of several devices)."""
        needed = [(axis, demand.split[self.axes[axis]]) for axis in wide if self.axes[axis] in demand.split and demand.of in kinds]
        return all(any(axis in dim and kind in some for dim, kind in zip(spec.dims, kinds, strict=True)) for axis, some in needed)


FREE = Restriction("free", (AxisUse.ANY, AxisUse.ANY))
BATCH_ON_AXIS_0 = Restriction("batch on axis 0", (AxisUse.BATCH, AxisUse.NOT_BATCH))
"""The original's force_batch_dim_to_mesh_dim=0."""
DATA_PARALLEL = Restriction("data parallel", (AxisUse.BATCH, AxisUse.BATCH))
"""Each device has whole operators and its own rows; updates are free, as for Megatron below."""
MEGATRON = Restriction("Megatron", (AxisUse.BATCH, AxisUse.INNER))
"""Data parallel over axis 0; over axis 1 columns of qkv and up, rows of out and down, the vocabulary; no sequence parallelism.

Updates are free, so that Megatron-LM is given the weight-update sharding that the paper's version of it lacked.
"""


def storable(storage: Storage, specs: SpecList, shape: tuple[int, ...], permitted: Sequence[bool]) -> tuple[bool, ...]:
    """Which of `specs` a tensor of `shape` may be stored in; `permitted` says which the axes allow."""
    match storage:
        case Storage.FREE:
            return (True,) * len(specs)
        case Storage.AS_AXES:
            return tuple(permitted)
        case Storage.ALL_AXES:
            return _over_most_axes(specs, permitted)
        case Storage.WHOLE:
            return tuple(not any(spec.dims) for spec in specs)
        case Storage.SPLIT:
            return _over_most_axes(specs, (True,) * len(specs))
        case Storage.LARGEST:
            best = max(specs, key=lambda spec: _preference(spec, shape))
            return tuple(spec == best for spec in specs)


def _over_most_axes(specs: SpecList, permitted: Sequence[bool]) -> tuple[bool, ...]:
    most = max((_num_axes(spec) for spec, allowed in zip(specs, permitted, strict=True) if allowed), default=0)
    return tuple(allowed and _num_axes(spec) == most for spec, allowed in zip(specs, permitted, strict=True))


def _num_axes(spec: Spec) -> int:
    return sum(map(len, spec.dims))


def _preference(spec: Spec, shape: tuple[int, ...]) -> tuple[bool, int, int, int]:
    """No two dims split, over more axes, a larger dim, the first of equals."""
    split = [d for d, axes in enumerate(spec.dims) if axes]
    first = split[0] if split else 0
    return (len(split) < 2, _num_axes(spec), shape[first] if split else 0, -first)
