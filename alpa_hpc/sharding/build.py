"""Layer + its parameters' update -> LayerProblem: one sharding problem over forward, backward, accumulation and update (DESIGN 7.2).

Forward and backward count once a microbatch, synchronisation and update once an iteration. Values that cross the layer's border are spec
nodes of their own, *ports*, which neighbouring layers share, and so are parameters that several layers read; that makes layers of a stage
separable but for their ports.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from alpa_hpc.ir.graph import Atom, variables
from alpa_hpc.ir.work import Layer, ParamUpdate
from alpa_hpc.sharding.dim_classes import awkward_dims
from alpa_hpc.sharding.equation_work import NO_WORK, Leaving, equation_work
from alpa_hpc.sharding.graph import FREE, EquationRecord, Graph, Tensor, add_equation, operand_tensors
from alpa_hpc.sharding.pricing import MeshPrices, all_specs
from alpa_hpc.sharding.problem import ShardingProblem
from alpa_hpc.sharding.spec import replicated
from alpa_hpc.sharding.strategies.rule import shape_of


class SpecSpace(enum.Enum):
    """Which specs tensors may have: all that divide, or only those that split no awkward dim (`dim_classes`)."""

    FULL = "full"
    NARROW = "narrow"


@dataclass(frozen=True, slots=True, eq=False)
class Surroundings:
    """What a layer's problem takes from the rest of the step.

    loss_values: values that are results of the loss: each device holds these whole
    awkward:     of values between layers, the dims that a narrow space does not split
    shared:      places in the layer's parameters of those that other layers read too, and dims of these that a narrow space does not split
    """

    loss_values: frozenset[int]
    awkward: Mapping[int, frozenset[int]]
    shared: Mapping[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Port:
    """A value or its cotangent at the layer's border; `tensor` is the one whose spec the neighbours see."""

    value: int
    tensor: int


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A jaxpr in the problem: the tensors of its inputs, the record of each equation, the tensors of its outputs."""

    jaxpr: ClosedJaxpr
    inputs: tuple[int, ...]
    records: tuple[EquationRecord, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class UpdateProgram:
    """A parameter's update in the problem; `gradient` and `leaves` (the parameter first) are tensors in the spec of the update.

    `partials` are its programs in the rounds of reductions.
    """

    work: ParamUpdate
    gradient: int
    leaves: tuple[int, ...]
    partials: tuple[Program, ...]
    update: Program

    @property
    def programs(self) -> tuple[Program, ...]:
        """All that it runs, in order."""
        return (*self.partials, self.update)


@dataclass(frozen=True, slots=True, eq=False)
class LayerProblem:
    """The problem of one layer on one mesh, and what its tensors and nodes stand for.

    `params[i]` / `gradients[i]` = tensors of layer.params[i]; `replicas` = parameters owned elsewhere, and where their new values arrive;
    `shared` = places in `params` of those that other layers read too: in one stage all have them as they are stored.
    `spanning` = whether groups along an axis of the mesh are of several nodes.
    """

    layer: Layer
    remat: bool
    space: SpecSpace
    spanning: tuple[bool, bool]
    problem: ShardingProblem
    labels: tuple[tuple[str, ...], ...]
    tensors: tuple[Tensor, ...]
    params: tuple[int, ...]
    batch: tuple[int, ...]
    gradients: tuple[int, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    cotangent_inputs: tuple[Port, ...]
    cotangent_outputs: tuple[Port, ...]
    residuals: tuple[int, ...]
    forward: Program
    backward: Program
    updates: tuple[UpdateProgram, ...]
    replicas: tuple[tuple[int, int], ...]
    shared: tuple[int, ...]

    @property
    def remade(self) -> tuple[int, ...]:
        """Residuals that the backward makes again for itself."""
        return self.forward.outputs[len(self.outputs) :] if self.remat else ()

    @property
    def ports(self) -> tuple[int, ...]:
        """Nodes shared with other layers, in the order inputs, cotangents of inputs, outputs, cotangents of outputs, shared parameters."""
        return (*self.borders, *(self.tensors[self.params[place]].home for place in self.shared))

    @property
    def borders(self) -> tuple[int, ...]:
        """Those of values and their cotangents."""
        groups = (*self.inputs, *self.cotangent_inputs, *self.outputs, *self.cotangent_outputs)
        return tuple(self.tensors[port.tensor].home for port in groups)


def build_layer(
    layer: Layer,
    updates: tuple[ParamUpdate, ...],
    around: Surroundings,
    prices: MeshPrices,
    *,
    remat: bool,
    num_microbatches: int,
    space: SpecSpace = SpecSpace.FULL,
) -> LayerProblem:
    """The sharding problem of `layer` on the mesh of `prices`; `updates` are those of the parameters it owns."""
    graph = Graph(prices, awkward_dims(layer) if space is SpecSpace.NARROW else {})
    draft = _LayerDraft(graph, layer, around, float(num_microbatches), space)
    forward = draft.forward(remat=remat)
    backward, gradients = draft.backward(forward, remat=remat)
    for tensor in (*draft.params, *gradients):
        graph.hold(tensor, inflight=False)
    programs, replicas = _updates(graph, layer, updates, draft.params, gradients)
    assert len(forward.outputs) >= len(layer.outputs), "forward gives outputs, then residuals"
    return LayerProblem(
        layer=layer,
        remat=remat,
        space=space,
        spanning=prices.mesh.spanning,
        problem=graph.problem(),
        labels=tuple(node.labels for node in graph.nodes),
        tensors=tuple(graph.tensors),
        params=draft.params,
        batch=draft.batch,
        gradients=gradients,
        inputs=draft.inputs,
        outputs=draft.outputs,
        cotangent_inputs=draft.cotangent_inputs,
        cotangent_outputs=draft.cotangent_outputs,
        residuals=() if remat else forward.outputs[len(layer.outputs) :],
        forward=forward,
        backward=backward,
        updates=programs,
        replicas=replicas,
        shared=tuple(around.shared),
    )


def _updates(
    graph: Graph, layer: Layer, updates: tuple[ParamUpdate, ...], params: tuple[int, ...], gradients: tuple[int, ...]
) -> tuple[tuple[UpdateProgram, ...], tuple[tuple[int, int], ...]]:
    """The updates of owned parameters, and where the new values of the others arrive."""
    owned = {work.param: work for work in updates}
    programs: list[UpdateProgram] = []
    replicas: list[tuple[int, int]] = []
    for position, param in enumerate(layer.params):
        tensor, gradient = params[position], gradients[position]
        if param in owned:
            programs.append(_update(graph, f"update.{position}", owned[param], tensor, gradient))
        else:
            replicas.append((param, _replica(graph, f"replica.{position}", tensor, gradient)))
    return tuple(programs), tuple(replicas)


class _LayerDraft:
    """The sources and ports of a layer's graph, then its programs."""

    def __init__(self, graph: Graph, layer: Layer, around: Surroundings, weight: float, space: SpecSpace) -> None:
        self.graph, self.layer, self.weight = graph, layer, weight
        self.awkward = around.awkward if space is SpecSpace.NARROW else {}
        invars = layer.forward.jaxpr.invars
        first_batch, first_input = len(layer.params), len(layer.params) + len(layer.batch)
        self.params = tuple(self._param(i, var, around, space) for i, var in enumerate(invars[:first_batch]))
        self.batch = tuple(graph.add_source(f"batch.{i}", var) for i, var in enumerate(invars[first_batch:first_input]))
        by_value = dict(zip(layer.inputs, invars[first_input:], strict=True))
        self.inputs = self._ports("input", by_value)
        self.cotangent_inputs = self._ports("input_cotangent", {v: by_value[v] for v in layer.cotangent_inputs})
        results = dict(zip(layer.outputs, layer.forward.jaxpr.outvars, strict=False))
        self.outputs = self._ports("output", results, around.loss_values)
        self.cotangent_outputs = self._ports("output_cotangent", {v: results[v] for v in layer.cotangent_outputs})

    def _param(self, place: int, var: Var, around: Surroundings, space: SpecSpace) -> int:
        """A parameter; one that other layers read too may lie as these may have it."""
        narrow = space is SpecSpace.NARROW and place in around.shared
        specs = self.graph.specs_without(var, around.shared[place]) if narrow else None
        return self.graph.add_source(f"param.{place}", var, specs=specs)

    def _ports(self, kind: str, variables: Mapping[int, Atom], whole: frozenset[int] = frozenset()) -> tuple[Port, ...]:
        ports: list[Port] = []
        for position, (value, var) in enumerate(variables.items()):
            shape = shape_of(var)
            specs = self.graph.specs_without(var, self.awkward.get(value, frozenset()))
            if value in whole:
                specs = (replicated(len(shape)),)
            ports.append(Port(value, self.graph.add_source(f"{kind}.{position}", var, specs=specs)))
        return tuple(ports)

    def forward(self, *, remat: bool) -> Program:
        """The forward program, its outputs resharded to their ports; inputs are held for each microbatch in flight.

        Recomputed, it runs twice a microbatch and by the same strategies: residuals are made again where the backward expects them.
        """
        flat = self.layer.forward.jaxpr
        inputs = (*self.params, *self.batch, *(port.tensor for port in self.inputs))
        leaving = flat.outvars[: len(self.outputs)] if remat else flat.outvars
        weight = 2 * self.weight if remat else self.weight
        program = add_program(
            self.graph, "forward", self.layer.forward, inputs, Leaving(frozenset(variables(leaving)), frozenset()), weight
        )
        for port, tensor in zip(self.outputs, program.outputs, strict=False):
            _to_port(self.graph, tensor, port, self.weight)
        for port in self.inputs:
            self.graph.hold(port.tensor, inflight=True)
        return program

    def backward(self, forward: Program, *, remat: bool) -> tuple[Program, tuple[int, ...]]:
        """The backward program; cotangents of inputs go to their ports, gradients stay where they are made."""
        jaxpr = self.layer.backward
        residuals = forward.outputs[len(self.outputs) :]
        if not remat:
            for tensor in sorted(set(residuals)):
                self.graph.hold(tensor, inflight=True)
        sources = (*self.params, *self.batch, *(port.tensor for port in self.inputs), *residuals)
        inputs = (*sources, *(port.tensor for port in self.cotangent_outputs))
        first = len(self.cotangent_inputs)
        outvars = jaxpr.jaxpr.outvars
        leaving = Leaving(frozenset(variables(outvars)), frozenset(variables(outvars[first:])))
        program = add_program(self.graph, "backward", jaxpr, inputs, leaving, self.weight)
        for port, tensor in zip(self.cotangent_inputs, program.outputs, strict=False):
            _to_port(self.graph, tensor, port, self.weight)
        return program, program.outputs[first:]


def _to_port(graph: Graph, tensor: int, port: Port, weight: float) -> None:
    home = graph.tensors[port.tensor]
    graph.require(tensor, home.home, home.specs, weight)


def add_program(graph: Graph, name: str, jaxpr: ClosedJaxpr, inputs: tuple[int, ...], leaving: Leaving, weight: float) -> Program:
    """Put all equations of a flat jaxpr into the graph."""
    flat: Jaxpr = jaxpr.jaxpr
    tensor_of: dict[Var, int] = dict(zip(flat.invars, inputs, strict=True))
    for var in flat.constvars:
        tensor_of[var] = graph.free_tensor(var)
    records: list[EquationRecord] = []
    for index, (eqn, how) in enumerate(zip(flat.eqns, equation_work(flat, leaving), strict=True)):
        operands = operand_tensors(eqn, tensor_of)
        if eqn.primitive.name == "optimization_barrier":
            record = EquationRecord(FREE, (), operands, operands, NO_WORK, replicated=False)
        else:
            record = add_equation(graph, f"{name}.{index}.{eqn.primitive.name}", eqn, operands, how, weight)
        records.append(record)
        tensor_of.update(zip(eqn.outvars, record.results, strict=True))
    outputs = tuple(tensor_of[var] if isinstance(var, Var) else graph.free_tensor(var) for var in flat.outvars)
    return Program(jaxpr, inputs, tuple(records), outputs)


def _update(graph: Graph, name: str, work: ParamUpdate, param: int, gradient: int) -> UpdateProgram:
    """The update runs where one node says; the gradient comes there once (reduce-scatter), the new weight leaves once (all-gather)."""
    first_leaf = 1
    invars = work.update.jaxpr.invars
    shape = shape_of(invars[first_leaf])
    specs = all_specs(shape, graph.prices.mesh)
    node = graph.add_node(name, [str(spec) for spec in specs])
    gradient_here = graph.add_tensor(invars[0], node, specs)
    graph.require(gradient, node, specs, 1.0)
    param_here = graph.add_tensor(invars[first_leaf], node, specs)
    graph.require(param, node, specs, 1.0)
    leaves = [param_here]
    for var in invars[first_leaf + 1 : first_leaf + len(work.leaves)]:
        leaf = graph.add_tensor(var, node, specs) if shape_of(var) == shape else graph.free_tensor(var)
        graph.hold(leaf, inflight=False)
        leaves.append(leaf)
    partials: list[Program] = []
    for part in work.partials:
        kept = frozenset(variables(part.program.jaxpr.outvars))
        partials.append(_update_program(graph, f"{name}.partials", part.program, (gradient_here, *leaves), Leaving(kept, kept)))
    kept = frozenset(variables(work.update.jaxpr.outvars))
    update = _update_program(graph, f"{name}.update", work.update, (gradient_here, *leaves), Leaving(kept, frozenset()))
    _return_leaves(graph, update, param, leaves)
    return UpdateProgram(work, gradient_here, tuple(leaves), tuple(partials), update)


def _update_program(graph: Graph, name: str, jaxpr: ClosedJaxpr, sources: tuple[int, ...], leaving: Leaving) -> Program:
    """Sums that only leave (`leaving.gradients`: scalars of reductions) may stay partial: the task completes them, all at once."""
    scalars = tuple(graph.free_tensor(var) for var in jaxpr.jaxpr.invars[len(sources) :])
    return add_program(graph, name, jaxpr, (*sources, *scalars), leaving, 1.0)


def _return_leaves(graph: Graph, update: Program, param: int, leaves: list[int]) -> None:
    for new, leaf in zip(update.outputs, [param, *leaves[1:]], strict=True):
        target = graph.tensors[leaf]
        if target.home != FREE:
            graph.require(new, target.home, target.specs, 1.0)
        elif graph.tensors[new].home != FREE:
            graph.require(new, graph.tensors[new].home, target.specs * len(graph.tensors[new].specs), 1.0)


def _replica(graph: Graph, name: str, tensor: int, gradient: int) -> int:
    """A parameter owned by another layer: its gradient leaves in some full spec, its new value arrives in the same."""
    source = graph.tensors[tensor]
    specs = source.specs
    node = graph.add_node(name, [str(spec) for spec in specs])
    graph.tensors.append(Tensor(source.shape, source.dtype, source.itemsize, node, specs))
    here = len(graph.tensors) - 1
    graph.require(gradient, node, specs, 1.0)
    graph.require(here, source.home, source.specs, 1.0)
    return here
