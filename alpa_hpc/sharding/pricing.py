"""Seconds of operators and reshardings on one logical mesh: the numbers that the sharding problem is made of.

The seconds of a resharding are linear in bytes once latencies are apart, so each pair of specs is priced once on a mesh and never again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from alpa_hpc.cluster.compute import compute_seconds
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.cluster.mesh import LogicalMesh
from alpa_hpc.sharding.assignment import EquationPlan, PlanTable
from alpa_hpc.sharding.equation_work import Work
from alpa_hpc.sharding.problem import Costs
from alpa_hpc.sharding.resharding import AllReduce, reshard_seconds, step_seconds
from alpa_hpc.sharding.spec import AXES, Spec, SpecList, split_of, subsets

UNIT_BYTES = float(1 << 30)
Line = tuple[float, float]  # latency in seconds, seconds a byte
Lines = tuple[Costs, Costs]  # the same for many pairs


@dataclass(frozen=True, slots=True, eq=False)
class _Met:
    """Two lists of specs that came together, kept alive so that nothing else gets their ids (hashing them takes longer than pricing)."""

    source: SpecList
    target: SpecList
    lines: Lines


@dataclass(frozen=True, slots=True, eq=False)
class MeshPrices:
    """Prices on `mesh`; what was priced once is kept as (latency seconds, seconds a byte of the whole tensor)."""

    mesh: LogicalMesh
    _pairs: dict[tuple[Spec, Spec], Line] = field(default_factory=dict)
    _matrices: dict[tuple[SpecList, SpecList], Lines] = field(default_factory=dict)
    _met: dict[tuple[int, int], "_Met"] = field(default_factory=dict)
    _completions: dict[tuple[PlanTable, int, SpecList], Lines] = field(default_factory=dict)

    def reshard_matrix(self, source: SpecList, target: SpecList, num_bytes: float) -> Costs:
        """Seconds [source, target] to reshard a tensor of `num_bytes` between each pair of specs."""
        met = self._met.get((id(source), id(target)))
        if met is None:
            met = self._met[id(source), id(target)] = _Met(source, target, self._lines(source, target))
        latency, per_byte = met.lines
        return latency + per_byte * num_bytes

    def _lines(self, source: SpecList, target: SpecList) -> Lines:
        key = (source, target)
        if key not in self._matrices:
            lines = np.array([[self._pair(s, t) for t in target] for s in source])
            self._matrices[key] = (lines[..., 0], lines[..., 1])
        return self._matrices[key]

    def _pair(self, source: Spec, target: Spec) -> Line:
        key = (source, target)
        if key not in self._pairs:
            latency = reshard_seconds(self.mesh, source, target, 0.0)
            self._pairs[key] = (latency, (reshard_seconds(self.mesh, source, target, UNIT_BYTES) - latency) / UNIT_BYTES)
        return self._pairs[key]

    def completion(self, table: PlanTable, position: int, done: SpecList, num_bytes: float) -> Costs:
        """Seconds in which result `position` of `num_bytes` is joined over the axes of its reductions that `done[k]` has no sums over.

        What is no sum (a maximum) is joined whatever `done` is.
        """
        key = (table, position, done)
        if key not in self._completions:
            lines = np.array([self._joined(plan, position, spec) for plan, spec in zip(table.plans, done, strict=True)])
            self._completions[key] = (lines[:, 0], lines[:, 1])
        latency, per_byte = self._completions[key]
        return latency + per_byte * num_bytes

    def _joined(self, plan: EquationPlan, position: int, done: Spec) -> Line:
        axes = [axis for axis in plan.raw[position].partial if axis not in done.partial] + [axis for axis, _ in plan.combined]
        latency = sum(step_seconds(AllReduce(axis), self.mesh, 0.0) for axis in axes)
        unit = UNIT_BYTES / done.num_shards(self.mesh.shape)
        return latency, (sum(step_seconds(AllReduce(axis), self.mesh, unit) for axis in axes) - latency) / UNIT_BYTES

    def work(self, parts: Sequence[Work], plans: Sequence[EquationPlan]) -> Costs:
        """Seconds of an equation's work by each plan: a part is divided over the devices that split it, and repeated by the others."""
        seconds = np.zeros(len(plans))
        for part in parts:
            splits = [self._split(part, plan) for plan in plans]
            by_split = {split: self._compute(part, split) for split in set(splits)}
            seconds += [by_split[split] for split in splits]
        return seconds

    def _split(self, part: Work, plan: EquationPlan) -> int:
        if part.factors is None:
            return plan.split
        return split_of(tuple(axis for axis in AXES if plan.assignment[axis] in part.factors), self.mesh.shape)

    def _compute(self, part: Work, split: int) -> float:
        return compute_seconds(self.mesh.device, part.flop / split, part.num_bytes / split, part.itemsize)


def all_specs(shape: tuple[int, ...], mesh: LogicalMesh) -> SpecList:
    """Every spec of a tensor that divides evenly: each axis splits one dim or none; both may split the same (S01)."""
    return _all_specs(shape, mesh.shape)


@lru_cache(maxsize=4096)
def _all_specs(shape: tuple[int, ...], mesh: MeshShape) -> SpecList:
    choices = [(-1,) if mesh.sizes[axis] == 1 else tuple(range(-1, len(shape))) for axis in AXES]
    specs: list[Spec] = []
    for first in choices[0]:
        for second in choices[1]:
            dims = tuple(tuple(axis for axis, at in zip(AXES, (first, second), strict=True) if at == d) for d in range(len(shape)))
            if all(size % split_of(dim, mesh) == 0 for size, dim in zip(shape, dims, strict=True)):
                specs.append(Spec(dims))
    return tuple(specs)


@lru_cache(maxsize=16384)
def same(specs: SpecList) -> SpecList:
    """One object for all equal lists, by which `MeshPrices` knows them."""
    return specs


def with_partials(specs: SpecList, mesh: LogicalMesh) -> SpecList:
    """`specs`, and each again with its unused axes left as partial sums."""
    return _with_partials(specs, mesh.shape)


@lru_cache(maxsize=4096)
def _with_partials(specs: SpecList, mesh: MeshShape) -> SpecList:
    found = list(specs)
    for spec in specs:
        used = {axis for dim in spec.dims for axis in dim}
        free = [axis for axis in AXES if axis not in used and mesh.sizes[axis] > 1]
        found += [Spec(spec.dims, partial) for partial in subsets(free) if partial]
    return tuple(found)
