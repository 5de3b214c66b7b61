"""Equations -> sharding problem: nodes that choose, tensors whose specs follow from a choice, edges that reshard (paper, section 4.2).

Two kinds of node. A *spec node* chooses how a family of tensors lies: a weight, a boundary value, or an operator's result with all the
elementwise operators that follow it. An *operator node* chooses how a contraction is split; its result is finished (summed, scattered) on
its edge to the spec node of the result. Both are exact: a follower never reshards, whatever reads it may. Operators without operands are
free: each device makes what it needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from alpa_hpc.ir.graph import Atom, aval_of
from alpa_hpc.sharding.assignment import EquationPlan, PlanTable, following_plans, own_plans, waiting_plans, whole_plan
from alpa_hpc.sharding.constraints import CONSTRAINT, honoured_plans
from alpa_hpc.sharding.equation_work import CONTRACTIONS, NO_WORK, EquationWork, itemsize_of
from alpa_hpc.sharding.pricing import MeshPrices, all_specs, same, with_partials
from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem
from alpa_hpc.sharding.spec import SpecList, replicated
from alpa_hpc.sharding.strategies.registry import whole_rule
from alpa_hpc.sharding.strategies.rule import UNSPLIT, OpRule, shape_of

FREE = -1  # the home of tensors that any device makes by itself


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the layer: with choice k of node `home` it has spec `specs[k]` (a free tensor is whole everywhere)."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    home: int
    specs: SpecList

    @property
    def num_bytes(self) -> float:
        """Bytes of the whole tensor."""
        return float(prod(self.shape)) * self.itemsize


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
    avoided: Mapping[Var, frozenset[int]] = field(default_factory=dict[Var, frozenset[int]])  # dims that no spec splits
    nodes: list[_Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    edges: dict[tuple[int, int], Costs] = field(default_factory=dict)

    def add_node(self, name: str, labels: Sequence[str]) -> int:
        """A node that chooses among `labels`."""
        zeros = np.zeros(len(labels))
        self.nodes.append(_Node(name, tuple(labels), zeros, zeros.copy(), zeros.copy()))
        return len(self.nodes) - 1

    def add_tensor(self, atom: Atom, home: int, specs: SpecList) -> int:
        """A tensor whose spec node `home` decides."""
        self.tensors.append(Tensor(shape_of(atom), str(aval_of(atom).dtype), itemsize_of(atom), home, specs))
        return len(self.tensors) - 1

    def specs_for(self, var: Atom) -> SpecList:
        """Every spec that a tensor may have."""
        return self.specs_without(var, frozenset() if isinstance(var, Literal) else self.avoided.get(var, frozenset()))

    def specs_without(self, var: Atom, avoided: frozenset[int]) -> SpecList:
        """Every spec that splits none of the dims `avoided`."""
        specs = all_specs(shape_of(var), self.prices.mesh)
        return same(tuple(spec for spec in specs if not any(spec.dims[d] for d in avoided))) if avoided else specs

    def add_source(self, name: str, var: Atom, *, specs: SpecList | None = None) -> int:
        """A tensor that comes from outside, with a node that chooses among all its specs (or `specs`)."""
        chosen = self.specs_for(var) if specs is None else specs
        return self.add_tensor(var, self.add_node(name, [str(spec) for spec in chosen]), chosen)

    def free_tensor(self, atom: Atom) -> int:
        """A tensor that costs nothing to have, whole or in part."""
        return self.add_tensor(atom, FREE, (replicated(len(shape_of(atom))),))

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
        costs = weight * self.prices.reshard_matrix(t.specs, wanted, t.num_bytes)
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
        assert len({node.name for node in self.nodes}) == len(self.nodes), "a plan says by name what a node chose"
        return ShardingProblem(
            tuple(node.seconds for node in self.nodes),
            tuple(Edge(u, v, costs) for (u, v), costs in self.edges.items()),
            tuple(node.fixed for node in self.nodes),
            tuple(node.inflight for node in self.nodes),
            names=tuple(node.name for node in self.nodes),
        )


def add_equation(graph: Graph, name: str, eqn: JaxprEqn, operands: tuple[int, ...], how: EquationWork, weight: float) -> EquationRecord:
    """Put an equation into the graph: free, following an operand, or with a node of its own."""
    adding = _Adding(graph, name, eqn, operands, how, weight)
    heavy = how.rule is None or eqn.primitive.name in CONTRACTIONS or how.gradient_reduction
    if all(t < 0 or graph.tensors[t].home == FREE for t in operands) and not (heavy and how.flop > 0):
        return adding.free()
    if how.rule is None:
        return adding.finished(graph.add_node(name, ["whole"]), whole_plan(whole_rule(eqn), graph.prices.mesh.shape))
    if heavy:
        return adding.contraction(own_plans(how.rule, graph.prices.mesh.shape))
    if eqn.primitive.name == CONSTRAINT:
        table = honoured_plans(eqn, how.rule, graph.prices.mesh.shape)
        return adding.finished(graph.add_node(name, table.labels), table)
    for position in adding.leaders():
        leader = graph.tensors[operands[position]]
        table = following_plans(how.rule, position, leader.specs, graph.prices.mesh.shape)
        if table is not None:
            return adding.finished(leader.home, table)
    waits = how.rule.linear and len(how.may_stay_partial) == len(eqn.outvars)
    table = (waiting_plans if waits else own_plans)(how.rule, graph.prices.mesh.shape)
    return adding.finished(graph.add_node(name, table.labels), table)


@dataclass(frozen=True, slots=True, eq=False)
class _Adding:
    """An equation on its way into the graph; `operands` are its tensors, `weight` how often an iteration runs it."""

    graph: Graph
    name: str
    eqn: JaxprEqn
    operands: tuple[int, ...]
    how: EquationWork
    weight: float

    def free(self) -> EquationRecord:
        """Nothing it reads costs anything, so each device makes the result by itself."""
        table = whole_plan(whole_rule(self.eqn), self.graph.prices.mesh.shape)
        results = tuple(self.graph.free_tensor(var) for var in self.eqn.outvars)
        return EquationRecord(FREE, table.plans, self.operands, results, NO_WORK, replicated=False)

    def contraction(self, table: PlanTable) -> EquationRecord:
        """An operator node, and a spec node for each result."""
        node = self.graph.add_node(self.name, table.labels)
        self._charge(node, table)
        results = tuple(self._result(node, table, position, var) for position, var in enumerate(self.eqn.outvars))
        return EquationRecord(node, table.plans, self.operands, results, self.how, replicated=self._is_replicated)

    def _result(self, node: int, table: PlanTable, position: int, var: Var) -> int:
        """The result as it is made lies on the operator's node; it is finished on the way to the spec node where it stays."""
        mesh = self.graph.prices.mesh
        assert self.how.rule is not None, "contractions have rules"
        factors = self.how.rule.results[position]  # a dim without a factor is never made in pieces, so its pieces are not worth a spec
        specs = same(
            tuple(
                spec
                for spec in self.graph.specs_for(var)
                if not any(dim for dim, factor in zip(spec.dims, factors, strict=True) if factor == UNSPLIT)
            )
        )
        if position in self.how.may_stay_partial:
            specs = with_partials(specs, mesh)
        which = f".{position}" if len(self.eqn.outvars) > 1 else ""
        spec_node = self.graph.add_node(f"{self.name}:result{which}", [str(spec) for spec in specs])
        result = self.graph.add_tensor(var, node, table.raw[position])
        self._complete(node, table, position, table.raw[position], self.graph.tensors[result].num_bytes)
        self.graph.require(result, spec_node, specs, self.weight)
        self.graph.tensors[result] = replace(self.graph.tensors[result], home=spec_node, specs=specs)
        return result

    def leaders(self) -> list[int]:
        """Operand positions worth following: the largest first, then the one that can lie in most ways, then the one made last.

        A vector stretched to the size of another operand can be split along its own dim alone: followed, it would keep a batch whole. So
        would a key whatever is drawn by it; a broadcast of a scalar alone may follow it, since it is made where it is read.
        """
        if self.how.rule is not None and self.eqn.primitive.name != "broadcast_in_dim" and _makes_all_its_dims(self.how.rule):
            return []
        tensors = [self.graph.tensors[t] for t in self.operands]
        candidates = [i for i, t in enumerate(self.operands) if t >= 0 and tensors[i].home != FREE]
        return sorted(candidates, key=lambda i: (-tensors[i].num_bytes, -len(set(tensors[i].specs)), -tensors[i].home))

    def finished(self, node: int, table: PlanTable) -> EquationRecord:
        """An operator whose sums are completed at once, inside node `node`."""
        self._charge(node, table)
        results = tuple(self.graph.add_tensor(var, node, table.finished[i]) for i, var in enumerate(self.eqn.outvars))
        for position, result in enumerate(results):
            self._complete(node, table, position, table.finished[position], self.graph.tensors[result].num_bytes)
        return EquationRecord(node, table.plans, self.operands, results, self.how, replicated=self._is_replicated)

    def _complete(self, node: int, table: PlanTable, position: int, done: SpecList, num_bytes: float) -> None:
        """The collectives that bring a result to the specs `done`."""
        seconds = self.graph.prices.completion(table, position, done, num_bytes)
        if seconds.any():
            self.graph.charge(node, self.weight * seconds)

    @property
    def _is_replicated(self) -> bool:
        """Whether every device repeats all of it, for want of a way to split it."""
        whole = self.how.rule is None or not self.how.rule.sizes
        return whole and self.graph.prices.mesh.shape.num_devices > 1

    def _charge(self, node: int, table: PlanTable) -> None:
        """The operator's own work, and the resharding of its operands."""
        if self.how.work:
            self.graph.charge(node, self.weight * self.graph.prices.work(self.how.work, table.plans))
        for position, tensor in enumerate(self.operands):
            if tensor >= 0:
                self.graph.require(tensor, node, table.operands[position], self.weight)


def _makes_all_its_dims(rule: OpRule) -> bool:
    """Whether results have factors, and operands none."""
    return not _has_factors(rule.operands) and _has_factors(rule.results)


def _has_factors(tensors: Sequence[tuple[int, ...]]) -> bool:
    return any(factor != UNSPLIT for dims in tensors for factor in dims)


def operand_tensors(eqn: JaxprEqn, tensor_of: dict[Var, int]) -> tuple[int, ...]:
    """The tensors an equation reads; literals are -1."""
    return tuple(-1 if isinstance(atom, Literal) else tensor_of[atom] for atom in eqn.invars)
