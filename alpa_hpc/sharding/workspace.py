"""A layer's programs -> bytes that live only while they run: what a task needs beyond the arrays it is given.

Tensors that XLA fuses away are not counted (see `equation_work`); a tensor lives from the equation that makes it to its last reader.
Results are not kept to the end: they are the program's buffers, counted there, and gradients are added to their accumulators as they come.
"""

from collections.abc import Callable, Iterator, Sequence

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem, Program
from alpa_hpc.sharding.equation_work import CONTRACTIONS, must_exist
from alpa_hpc.sharding.graph import FREE, EquationRecord


def peak_bytes(program: Program, num_bytes: Callable[[int], float]) -> float:
    """The most bytes that tensors made inside the program hold at once; `num_bytes` gives a tensor's bytes a device."""
    jaxpr = program.jaxpr.jaxpr
    exist = must_exist(jaxpr, frozenset())
    made = [
        {tensor for var, tensor in zip(eqn.outvars, record.results, strict=True) if var in exist}
        for eqn, record in zip(jaxpr.eqns, program.records, strict=True)
    ]
    last_read = {tensor: index for index, record in enumerate(program.records) for tensor in record.operands}
    ending: dict[int, list[int]] = {}
    held = peak = 0.0
    for index, tensors in enumerate(made):
        for tensor in tensors:
            held += num_bytes(tensor)
            ending.setdefault(last_read.get(tensor, index), []).append(tensor)
        peak = max(peak, held)
        held -= sum(num_bytes(tensor) for tensor in ending.pop(index, ()))
    return peak


def layer_workspace(problem: LayerProblem, num_bytes: Callable[[int], float]) -> float:
    """Bytes that the layer's forward or backward needs on top of its buffers; a recomputed layer's residuals live inside its backward."""
    return max(peak_bytes(problem.forward, num_bytes), remade_bytes(problem, num_bytes) + peak_bytes(problem.backward, num_bytes))


def remade_bytes(problem: LayerProblem, num_bytes: Callable[[int], float]) -> float:
    """Bytes of the residuals that a recomputing backward really holds.

    Those that matrix products and lookups make or read lie in memory. The others are elementwise functions of a product's result, made
    again where they are read: of all that follow one result, the largest counts, once.
    """
    made = {tensor for record in _contractions(problem.forward) for tensor in record.results}
    read = {tensor for record in _contractions(problem.backward) for tensor in record.operands}
    solid = set(problem.remade) & (made | read)
    followers: dict[int, float] = {}
    for tensor in set(problem.remade) - solid:
        home = problem.tensors[tensor].home
        followers[home] = max(followers.get(home, 0.0), num_bytes(tensor))
    counted = {FREE, *(problem.tensors[tensor].home for tensor in solid)}
    return sum(map(num_bytes, solid)) + sum(size for home, size in followers.items() if home not in counted)


def _contractions(program: Program) -> Iterator[EquationRecord]:
    for eqn, record in zip(program.jaxpr.jaxpr.eqns, program.records, strict=True):
        if eqn.primitive.name in CONTRACTIONS:
            yield record


def evenly_split_workspace(problem: LayerProblem, num_devices: int) -> float:
    """Bytes a device if every tensor were split over all devices: a lower bound that knows no strategy."""
    return layer_workspace(problem, lambda tensor: problem.tensors[tensor].num_bytes / num_devices)


def chosen_workspace(layers: Sequence[ChosenLayer], shape: MeshShape) -> float:
    """Bytes a device that the hungriest layer of a stage needs while it runs on a mesh of `shape`."""
    return max(_chosen_workspace(chosen, shape) for chosen in layers)


def _chosen_workspace(chosen: ChosenLayer, shape: MeshShape) -> float:
    tensors = chosen.problem.tensors
    return layer_workspace(chosen.problem, lambda tensor: tensors[tensor].num_bytes / chosen.spec(tensor).num_shards(shape))
