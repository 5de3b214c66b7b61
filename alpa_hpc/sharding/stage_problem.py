"""Layer problems -> the sharding problem of a whole stage, ports joined: what the evaluator checks, and the general solver solves."""

from collections.abc import Mapping, Sequence

from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem
from alpa_hpc.sharding.wiring import LayerWiring, wire

INNER = 1_000_000  # variable of node n of the stage's layer number i: (i + 1) * INNER + n; ports are numbered from 0


def numbering(problem: LayerProblem, wiring: LayerWiring, place: int) -> dict[int, int]:
    """Stage-wide variable number of each node of the stage's layer number `place`."""
    numbers = {node: (place + 1) * INNER + node for node in range(len(problem.labels))}
    numbers.update(zip(problem.ports, wiring.ports, strict=True))
    return numbers


def stage_problem(step: LayeredStep, layers: Sequence[LayerProblem]) -> tuple[ShardingProblem, tuple[dict[int, int], ...]]:
    """The whole stage as one problem, ports joined, and for each layer the node number of its nodes: what the evaluator checks."""
    wiring = wire(step, layers[0].layer.index, layers[-1].layer.index + 1)
    dense: dict[int, int] = {}
    numbers: list[dict[int, int]] = []
    costs: list[Costs] = []
    fixed: list[Costs] = []
    inflight: list[Costs] = []
    names: dict[int, str] = {}
    edges: list[Edge] = []
    for place, (problem, wires) in enumerate(zip(layers, wiring, strict=True)):
        local = {node: dense.setdefault(number, len(dense)) for node, number in numbering(problem, wires, place).items()}
        numbers.append(local)
        _add_nodes(costs, problem.problem.node_costs, local)
        _add_nodes(fixed, problem.problem.fixed_bytes, local)
        _add_nodes(inflight, problem.problem.inflight_bytes, local)
        for node, number in local.items():
            names.setdefault(number, problem.problem.names[node])
        edges += [Edge(local[edge.source], local[edge.target], edge.costs) for edge in problem.problem.edges]
    whole = ShardingProblem(tuple(costs), tuple(edges), tuple(fixed), tuple(inflight), names=tuple(names.values()))
    return whole, tuple(numbers)


def _add_nodes(column: list[Costs], values: Sequence[Costs], local: Mapping[int, int]) -> None:
    """Append what is new, and add to the ports that an earlier layer has brought."""
    for node, number in local.items():
        if number < len(column):
            column[number] = column[number] + values[node]
        else:
            assert number == len(column), "nodes are numbered in order of appearance"
            column.append(values[node])
