"""How the tensors of a layer lie, and how much of each a device has: as its strategies say, or as if all were split evenly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.assignment import NONE, EquationPlan, combined_axes
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.graph import FREE, EquationRecord
from alpa_hpc.sharding.spec import AXES, Spec, replicated, split_of
from alpa_hpc.sharding.strategies.rule import Combine


class AbstractSplit(Protocol):
    """How the tensors of a layer lie."""

    @property
    def problem(self) -> LayerProblem:
        """The layer."""
        ...

    @property
    def shape(self) -> MeshShape:
        """The mesh."""
        ...

    def own(self, tensor: int) -> Spec:
        """The spec of a tensor."""
        ...

    def read(self, record: EquationRecord) -> Sequence[Spec]:
        """The specs in which an equation reads its operands."""
        ...

    def made(self, record: EquationRecord) -> Sequence[Spec]:
        """The specs in which an equation makes its results, before sums are completed."""
        ...

    def joined(self, record: EquationRecord) -> dict[Combine, tuple[int, ...]]:
        """The axes over which an equation's results are joined at once, by how."""
        ...

    def num_bytes(self, tensor: int, spec: Spec) -> float:
        """Bytes a device of a tensor in a spec."""
        ...

    def dtype(self, tensor: int) -> str:
        """The dtype of a tensor."""
        ...

    def itemsize(self, tensor: int) -> int:
        """Bytes an element of a tensor."""
        ...

    def num_parts(self, record: EquationRecord) -> int:
        """Into how many parts an equation's work is cut."""
        ...

    def num_pieces(self, record: EquationRecord, factors: tuple[int, ...]) -> int:
        """Into how many pieces an equation cuts what has dims of these of its factors."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ChosenSplit:
    """As the strategies of a layer say, on a mesh of `shape`."""

    chosen: ChosenLayer
    shape: MeshShape

    @property
    def problem(self) -> LayerProblem:
        """See AbstractSplit."""
        return self.chosen.problem

    def own(self, tensor: int) -> Spec:
        """See AbstractSplit."""
        return self.chosen.spec(tensor)

    def read(self, record: EquationRecord) -> Sequence[Spec]:
        """See AbstractSplit."""
        return self._plan(record).operands

    def made(self, record: EquationRecord) -> Sequence[Spec]:
        """See AbstractSplit."""
        return self._plan(record).raw

    def joined(self, record: EquationRecord) -> dict[Combine, tuple[int, ...]]:
        """See AbstractSplit."""
        return combined_axes(self._plan(record), self.shape)

    def num_bytes(self, tensor: int, spec: Spec) -> float:
        """See AbstractSplit."""
        return self.chosen.problem.tensors[tensor].num_bytes / spec.num_shards(self.shape)

    def dtype(self, tensor: int) -> str:
        """See AbstractSplit."""
        return self.chosen.problem.tensors[tensor].dtype

    def itemsize(self, tensor: int) -> int:
        """See AbstractSplit."""
        return self.chosen.problem.tensors[tensor].itemsize

    def num_parts(self, record: EquationRecord) -> int:
        """See AbstractSplit."""
        return self._plan(record).split

    def num_pieces(self, record: EquationRecord, factors: tuple[int, ...]) -> int:
        """See AbstractSplit."""
        assignment = self._plan(record).assignment
        return split_of(tuple(axis for axis in AXES if assignment[axis] != NONE and assignment[axis] in factors), self.shape)

    def _plan(self, record: EquationRecord) -> EquationPlan:
        return record.plans[0 if record.node == FREE else self.chosen.choices[record.node]]


@dataclass(frozen=True, slots=True, eq=False)
class EvenSplit:
    """As if every tensor were split over all devices and nothing had to be moved."""

    problem: LayerProblem
    shape: MeshShape

    def own(self, tensor: int) -> Spec:
        """See AbstractSplit."""
        return replicated(len(self.problem.tensors[tensor].shape))

    def read(self, record: EquationRecord) -> Sequence[Spec]:
        """See AbstractSplit."""
        return [replicated(0) if tensor < 0 else self.own(tensor) for tensor in record.operands]

    def made(self, record: EquationRecord) -> Sequence[Spec]:
        """See AbstractSplit."""
        return [self.own(tensor) for tensor in record.results]

    def joined(self, record: EquationRecord) -> dict[Combine, tuple[int, ...]]:
        """See AbstractSplit."""
        del record
        return {}

    def num_bytes(self, tensor: int, spec: Spec) -> float:
        """See AbstractSplit."""
        del spec
        return self.problem.tensors[tensor].num_bytes / self.shape.num_devices

    def dtype(self, tensor: int) -> str:
        """See AbstractSplit."""
        return self.problem.tensors[tensor].dtype

    def itemsize(self, tensor: int) -> int:
        """See AbstractSplit."""
        return self.problem.tensors[tensor].itemsize

    def num_parts(self, record: EquationRecord) -> int:
        """See AbstractSplit."""
        del record
        return self.shape.num_devices

    def num_pieces(self, record: EquationRecord, factors: tuple[int, ...]) -> int:
        """See AbstractSplit."""
        del record, factors
        return self.shape.num_devices
