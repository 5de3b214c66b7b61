"""Equations -> sharding problem: nodes that choose, tensors whose specs follow from a node's choice, edges that reshard (paper, section 4.2).

Three kinds of node. A *spec node* chooses how a family of tensors lies: a weight, a boundary value, or an operator's result with all the elementwise
operators that follow it. An *operator node* chooses how a contraction is split; its result is finished (summed, scattered) on its edge to the
spec node of the result. Both are exact: a follower never reshards, whatever reads it may. Operators without operands are free: each device makes its part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from alpa_hpc.sharding.assignment import EquationPlan, assignment_label, assignments, following, plan_of
from alpa_hpc.sharding.equation_work import NO_WORK, EquationWork
from alpa_hpc.sharding.pricing import MeshPrices, SpecList, all_specs, with_partials
from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem
from alpa_hpc.sharding.resharding import AllReduce, step_seconds
from alpa_hpc.sharding.spec import Spec, replicated
from alpa_hpc.sharding.strategies.registry import CONTRACTIONS, rule_of, whole_rule
from alpa_hpc.sharding.strategies.rule import OpRule

FREE = -1  # the home of tensors that any device makes by itself


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the layer: with choice k of node `home` it has spec `specs[k]` (a free tensor is whole everywhere)."""

    shape: tuple[int, ...]
    itemsize: int
    home: int
    specs: SpecList

    @property
    def num_bytes(self) -> float:
        """Bytes of the whole tensor."""
        return float(np.prod(self.shape, dtype=np.float64)) * self.itemsize


@dataclass(frozen=True, slots=True)
class EquationRecord:
    """An equation in the problem: choice k of `node` runs it by `plans[k]` (a free one by `plans[0]`). Literals are tensor -1."""

    node: int
    plans: tuple[EquationPlan, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    work: EquationWork
    replicated: bool


@dataclass(slots=True, eq=False)
class _Node:
    name: str
    labels: tuple[str, ...]
    seconds: Costs
    fixed: Costs
    inflight: Costs


@dataclass(slots=True, eq=False)
class Graph:
    """A sharding problem being written. `weight` arguments say how often an iteration runs the thing."""

    prices: MeshPrices
    nodes: list[_Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    edges: dict[tuple[int, int], Costs] = field(default_factory=dict)

    def add_node(self, name: str, labels: Sequence[str]) -> int:
        """A node that chooses among `labels`."""
        zeros = np.zeros(len(labels))
        self.nodes.append(_Node(name, tuple(labels), zeros, zeros.copy(), zeros.copy()))
        return len(self.nodes) - 1

    def add_tensor(self, aval: Var, home: int, specs: SpecList) -> int:
        """A tensor whose spec node `home` decides."""
        shape, itemsize = tuple(aval.aval.shape), itemsize_of(aval)  # type: ignore[attr-defined]
        self.tensors.append(Tensor(shape, itemsize, home, specs))
        return len(self.tensors) - 1

    def add_source(self, name: str, var: Var, *, specs: SpecList | None = None) -> int:
        """A tensor that comes from outside, with a node that chooses among all its specs (or `specs`)."""
        chosen = all_specs(tuple(var.aval.shape), self.prices.mesh) if specs is None else specs  # type: ignore[attr-defined]
        return self.add_tensor(var, self.add_node(name, [str(spec) for spec in chosen]), chosen)

    def free_tensor(self, var: Var) -> int:
        """A tensor that costs nothing to have, whole or in part."""
        return self.add_tensor(var, FREE, (replicated(len(var.aval.shape)),))  # type: ignore[attr-defined]

    def charge(self, node: int, seconds: Costs | float) -> None:
        """Add to a node's seconds an iteration."""
        self.nodes[node].seconds = self.nodes[node].seconds + seconds

    def hold(self, tensor: int, *, inflight: bool) -> None:
        """Count a tensor's bytes a device at its home: all iteration, or once a microbatch in flight."""
        home = self.tensors[tensor].home
        if home == FREE:
            return
        local = self.local_bytes(tensor)
        node = self.nodes[home]
        if inflight:
            node.inflight = node.inflight + local
        else:
            node.fixed = node.fixed + local

    def local_bytes(self, tensor: int) -> Costs:
        """Bytes a device of a tensor, for each choice of its home."""
        t = self.tensors[tensor]
        return np.array([t.num_bytes / spec.num_shards(self.prices.mesh.shape) for spec in t.specs])

    def require(self, tensor: int, node: int, wanted: SpecList, weight: float) -> None:
        """`node`'s choice k reads `tensor` in spec `wanted[k]`: the resharding edge (or part of the node's own cost)."""
        t = self.tensors[tensor]
        if t.home == FREE:
            return
        targets = tuple(dict.fromkeys(wanted))
        column = [targets.index(spec) for spec in wanted]
        sources = tuple(dict.fromkeys(t.specs))
        row = [sources.index(spec) for spec in t.specs]
        costs = weight * self.prices.reshard_matrix(sources, targets, t.num_bytes)[np.ix_(row, column)]
        self._join(t.home, node, costs)

    def _join(self, source: int, target: int, costs: Costs) -> None:
        if source == target:
            self.charge(source, np.diagonal(costs))
        elif (target, source) in self.edges:
            self.edges[target, source] = self.edges[target, source] + costs.T
        else:
            self.edges[source, target] = self.edges.get((source, target), 0.0) + costs

    def problem(self) -> ShardingProblem:
        """The finished problem."""
        return ShardingProblem(
            tuple(node.seconds for node in self.nodes),
            tuple(Edge(u, v, costs) for (u, v), costs in self.edges.items()),
            tuple(node.fixed for node in self.nodes),
            tuple(node.inflight for node in self.nodes),
            names=tuple(node.name for node in self.nodes),
        )


def itemsize_of(var: Var) -> int:
    """Bytes an element; a PRNG key counts as 8."""
    dtype = var.aval.dtype  # type: ignore[attr-defined]
    return int(getattr(dtype, "itemsize", 8))


def add_equation(graph: Graph, name: str, eqn: JaxprEqn, operands: tuple[int, ...], how: EquationWork, weight: float) -> EquationRecord:
    """Put an equation into the graph: free, following an operand, or with a node of its own."""
    rule = rule_of(eqn)
    heavy = rule is None or eqn.primitive.name in CONTRACTIONS or how.gradient_reduction
    if all(t < 0 or graph.tensors[t].home == FREE for t in operands) and not (heavy and how.flop > 0):
        return _free(graph, eqn, operands)
    if rule is None:
        return _whole(graph, name, eqn, operands, how, weight)
    if heavy:
        return _contraction(graph, name, eqn, operands, rule, how, weight)
    for position in _leaders(graph, operands):
        record = _follow(graph, eqn, operands, position, rule, how, weight)
        if record is not None:
            return record
    return _own_spec(graph, name, eqn, operands, rule, how, weight)


def _free(graph: Graph, eqn: JaxprEqn, operands: tuple[int, ...]) -> EquationRecord:
    plan = plan_of(whole_rule(eqn), (-1, -1), graph.prices.mesh.shape)
    results = tuple(graph.free_tensor(var) for var in eqn.outvars)
    return EquationRecord(FREE, (plan,), operands, results, NO_WORK, replicated=False)


def _whole(graph: Graph, name: str, eqn: JaxprEqn, operands: tuple[int, ...], how: EquationWork, weight: float) -> EquationRecord:
    rule = whole_rule(eqn)
    plan = plan_of(rule, (-1, -1), graph.prices.mesh.shape)
    node = graph.add_node(name, ["whole"])
    return _finish(graph, eqn, operands, node, (plan,), rule, how, weight)


def _contraction(graph: Graph, name: str, eqn: JaxprEqn, operands: tuple[int, ...], rule: OpRule, how: EquationWork, weight: float) -> EquationRecord:
    mesh = graph.prices.mesh
    options = assignments(rule, mesh.shape)
    plans = tuple(plan_of(rule, option, mesh.shape) for option in options)
    node = graph.add_node(name, [assignment_label(option) for option in options])
    _charge_work(graph, node, plans, how, weight)
    _require_operands(graph, node, operands, plans, weight)
    results: list[int] = []
    for position, var in enumerate(eqn.outvars):
        specs = all_specs(tuple(var.aval.shape), mesh)
        if how.may_stay_partial:
            specs = with_partials(specs, mesh)
        spec_node = graph.add_node(f"{name}:result", [str(spec) for spec in specs])
        raw = tuple(plan.raw[position] for plan in plans)
        result = graph.add_tensor(var, node, raw)
        graph.require(result, spec_node, specs, weight)
        graph.tensors[result] = Tensor(graph.tensors[result].shape, graph.tensors[result].itemsize, spec_node, specs)
        results.append(result)
    return EquationRecord(node, plans, operands, tuple(results), how, replicated=False)


def _leaders(graph: Graph, operands: tuple[int, ...]) -> list[int]:
    """Operand positions worth following, the largest first, then the one made last."""
    candidates = [i for i, t in enumerate(operands) if t >= 0 and graph.tensors[t].home != FREE]
    return sorted(candidates, key=lambda i: (-graph.tensors[operands[i]].num_bytes, -graph.tensors[operands[i]].home))


def _follow(
    graph: Graph, eqn: JaxprEqn, operands: tuple[int, ...], position: int, rule: OpRule, how: EquationWork, weight: float
) -> EquationRecord | None:
    leader = graph.tensors[operands[position]]
    plans: dict[Spec, EquationPlan] = {}
    for spec in dict.fromkeys(leader.specs):
        plan = following(rule, position, spec, graph.prices.mesh.shape)
        if plan is None:
            return None
        plans[spec] = plan
    chosen = tuple(plans[spec] for spec in leader.specs)
    return _finish(graph, eqn, operands, leader.home, chosen, rule, how, weight)


def _own_spec(graph: Graph, name: str, eqn: JaxprEqn, operands: tuple[int, ...], rule: OpRule, how: EquationWork, weight: float) -> EquationRecord:
    options = assignments(rule, graph.prices.mesh.shape)
    plans = tuple(plan_of(rule, option, graph.prices.mesh.shape) for option in options)
    node = graph.add_node(name, [assignment_label(option) for option in options])
    return _finish(graph, eqn, operands, node, plans, rule, how, weight)


def _finish(
    graph: Graph, eqn: JaxprEqn, operands: tuple[int, ...], node: int, plans: tuple[EquationPlan, ...], rule: OpRule, how: EquationWork, weight: float
) -> EquationRecord:
    """An operator whose sums are completed at once, inside node `node`."""
    _charge_work(graph, node, plans, how, weight)
    _require_operands(graph, node, operands, plans, weight)
    results: list[int] = []
    for position, var in enumerate(eqn.outvars):
        specs = tuple(_completed(plan, position) for plan in plans)
        result = graph.add_tensor(var, node, specs)
        results.append(result)
        _charge_completion(graph, node, result, plans, position, weight)
    whole = not rule.sizes and graph.prices.mesh.shape.num_devices > 1
    return EquationRecord(node, plans, operands, tuple(results), how, replicated=whole)


def _completed(plan: EquationPlan, position: int) -> Spec:
    """The result's spec once the sums this operator itself makes are complete (those its operands brought along stay)."""
    raw = plan.raw[position]
    brought = {axis for operand in plan.operands for axis in operand.partial}
    return Spec(raw.dims, tuple(axis for axis in raw.partial if axis in brought))


def _charge_completion(graph: Graph, node: int, result: int, plans: tuple[EquationPlan, ...], position: int, weight: float) -> None:
    tensor = graph.tensors[result]
    seconds = np.zeros(len(plans))
    for k, plan in enumerate(plans):
        done = tensor.specs[k]
        axes = [axis for axis in plan.raw[position].partial if axis not in done.partial] + [axis for axis, _ in plan.combined]
        local = tensor.num_bytes / done.num_shards(graph.prices.mesh.shape)
        seconds[k] = sum(step_seconds(AllReduce(axis), graph.prices.mesh, local) for axis in axes)
    if seconds.any():
        graph.charge(node, weight * seconds)


def _charge_work(graph: Graph, node: int, plans: tuple[EquationPlan, ...], how: EquationWork, weight: float) -> None:
    if how.flop or how.num_bytes:
        seconds = [graph.prices.compute(how.flop, how.num_bytes, how.itemsize, plan.split) for plan in plans]
        graph.charge(node, weight * np.array(seconds))


def _require_operands(graph: Graph, node: int, operands: tuple[int, ...], plans: tuple[EquationPlan, ...], weight: float) -> None:
    for position, tensor in enumerate(operands):
        if tensor >= 0:
            graph.require(tensor, node, tuple(plan.operands[position] for plan in plans), weight)


def operand_tensors(eqn: JaxprEqn, tensor_of: dict[Var, int]) -> tuple[int, ...]:
    """The tensors an equation reads; literals are -1."""
    return tuple(-1 if isinstance(atom, Literal) else tensor_of[atom] for atom in eqn.invars)

