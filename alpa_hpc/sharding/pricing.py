"""Seconds of operators and reshardings on one logical mesh: the numbers that the sharding problem is made of.

Resharding costs are linear in bytes once latencies are apart, so each pair of specs is priced twice and never again.
"""

from dataclasses import dataclass, field

import numpy as np

from alpa_hpc.cluster.compute import compute_seconds
from alpa_hpc.cluster.mesh import LogicalMesh
from alpa_hpc.sharding.problem import Costs
from alpa_hpc.sharding.resharding import reshard_seconds
from alpa_hpc.sharding.spec import AXES, Spec, split_of

SpecList = tuple[Spec, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MeshPrices:
    """Prices on `mesh`; spec pairs already priced are kept in `_lines` as (latency seconds, seconds a byte) matrices."""

    mesh: LogicalMesh
    _lines: dict[tuple[SpecList, SpecList], tuple[Costs, Costs]] = field(default_factory=dict)

    def reshard_matrix(self, source: SpecList, target: SpecList, num_bytes: float) -> Costs:
        """Seconds [source, target] to reshard a tensor of `num_bytes` between each pair of specs."""
        key = (source, target)
        if key not in self._lines:
            self._lines[key] = self._price(source, target)
        latency, per_byte = self._lines[key]
        return latency + per_byte * num_bytes

    def _price(self, source: SpecList, target: SpecList) -> tuple[Costs, Costs]:
        latency = np.array([[reshard_seconds(self.mesh, s, t, 0.0) for t in target] for s in source])
        unit = float(1 << 30)
        full = np.array([[reshard_seconds(self.mesh, s, t, unit) for t in target] for s in source])
        return latency, (full - latency) / unit

    def compute(self, flop: float, num_bytes: float, itemsize: int, split: int) -> float:
        """Seconds of an operator whose work is divided over `split` devices, the others repeating it."""
        return compute_seconds(self.mesh.device, flop / split, num_bytes / split, itemsize)


def all_specs(shape: tuple[int, ...], mesh: LogicalMesh) -> SpecList:
    """Every spec of a tensor that divides evenly: each axis splits one dim or none; both may split the same (S01)."""
    choices = [(-1,) if mesh.shape.sizes[axis] == 1 else tuple(range(-1, len(shape))) for axis in AXES]
    specs: list[Spec] = []
    for first in choices[0]:
        for second in choices[1]:
            dims = tuple(tuple(axis for axis, at in zip(AXES, (first, second), strict=True) if at == d) for d in range(len(shape)))
            if all(size % split_of(dim, mesh.shape) == 0 for size, dim in zip(shape, dims, strict=True)):
                specs.append(Spec(dims))
    return tuple(specs)


def with_partials(specs: SpecList, mesh: LogicalMesh) -> SpecList:
    """`specs`, and each again with its unused axes left as partial sums."""
    found = list(specs)
    for spec in specs:
        used = {axis for dim in spec.dims for axis in dim}
        free = [axis for axis in AXES if axis not in used and mesh.shape.sizes[axis] > 1]
        found += [Spec(spec.dims, partial) for partial in _subsets(free) if partial]
    return tuple(found)


def _subsets(axes: list[int]) -> list[tuple[int, ...]]:
    subsets: list[tuple[int, ...]] = [()]
    for axis in axes:
        subsets += [(*subset, axis) for subset in subsets]
    return subsets
