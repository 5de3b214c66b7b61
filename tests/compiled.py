"""A train step as one stage on one mesh: planned in the whole space, compiled task by task; its collectives as found and as planned."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from alpa_hpc.baselines.optimum import restricted_optimum
from alpa_hpc.baselines.restriction import FREE, Restriction
from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.flops import equation_flops
from alpa_hpc.ir.inline import HEAVY
from alpa_hpc.ir.trace import TracedStep, trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.runtime.assemble import Assembly, assemble
from alpa_hpc.runtime.schedule import OneFOneB
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.verify.hlo import Collective, collectives
from alpa_hpc.verify.traffic import PlannedCollective, planned_collectives

Traffic = Counter[CollectiveKind]  # bytes a device

LINK = Link(1e9, 1e-6)
NO_COMPUTE = DeviceSpec("no compute", 1 << 40, 1e30, 1e30, 1e30, 1.0)
PRODUCTS = DeviceSpec("products", 1 << 40, 1e10, 1e10, 1e30, 1.0)
"""Takes time for products and convolutions alone: to repeat them on all devices is dearer than what the tests' collectives take."""
WORKING = ("forward", "backward", "update")
SCALAR = 4  # bytes


@dataclass(frozen=True, eq=False)
class Traced:
    """A train step, and its layers."""

    traced: TracedStep
    step: LayeredStep


def traced(function: Callable[..., Any], state: Any, batch: Any, *, num_microbatches: int = 1, num_layers: int = 1) -> Traced:
    """Trace `function(state, batch)`, which are arrays or shapes, and cut it."""
    one = trace_step(function, jax.eval_shape(lambda: state), jax.eval_shape(lambda: batch), num_microbatches=num_microbatches)
    return Traced(one, cut_layers(one, num_layers=num_layers, imbalance=1.0))


def prices_on(shape: MeshShape, device: DeviceSpec = NO_COMPUTE, link: Link = LINK) -> MeshPrices:
    """Prices on equal links."""
    cluster = ClusterSpec("one node", 1, shape.num_devices, device, link, link)
    return MeshPrices(logical_mesh(cluster, Submesh(1, shape.num_devices), shape))


@dataclass(frozen=True, eq=False)
class Planned:
    """The optimum of a step under a restriction."""

    step: LayeredStep
    stage: Stage
    seconds: float

    @cached_property
    def assembly(self) -> Assembly:
        return assemble(self.step, (self.stage,), OneFOneB())

    @cached_property
    def found(self) -> Mapping[str, tuple[Collective, ...]]:
        """The collectives of each compiled task; none in those that are left out."""
        shape = self.stage.shape
        mesh = Mesh(np.array(jax.devices()[: shape.num_devices]).reshape(shape.sizes), ("x", "y"))
        tasks = self.assembly.tasks(0)  # compiled without the passes behind HLO, which leave its collectives as they are
        return {name: collectives(compile_task(tasks[name], mesh).as_text() or "") for name in WORKING}

    @cached_property
    def predicted(self) -> Mapping[str, Traffic]:
        """Bytes a device of each kind of collective that the plan stands for, task by task; sums of gradients are the update's."""
        io, tasks = self.assembly.pipeline.stages[0], self.assembly.tasks(0)
        found = {name: planned_collectives(self.step, self.stage, io, tasks[name]) for name in WORKING}
        if "partials" in tasks:
            sums = planned_collectives(self.step, self.stage, io, tasks["partials"])
            found["update"] += tuple(one for one in sums if one.num_bytes > SCALAR)
        return {name: traffic_of(some) for name, some in found.items()}

    def traffic(self, *names: str) -> Traffic:
        """Bytes a device of each kind of collective in compiled tasks."""
        total: Traffic = Counter()
        for one in (one for name in names for one in self.found[name]):
            total[one.kind] += one.num_bytes
        return total

    @property
    def communication(self) -> float:
        """Seconds beyond those of all products, evenly shared by the devices."""
        flop = sum(
            equation_flops(eqn)
            for layer in self.step.layers
            for program in (layer.forward, layer.backward)
            for eqn in program.jaxpr.eqns
            if eqn.primitive.name in HEAVY
        )
        return self.seconds - self.step.num_microbatches * flop / PRODUCTS.flops_32bit / self.stage.shape.num_devices

    def count(self, *names: str, over: int = SCALAR) -> Counter[CollectiveKind]:
        """How many collectives of more than `over` bytes some compiled tasks have: a loss takes 4."""
        return Counter(one.kind for name in names for one in self.found[name] if one.num_bytes > over)

    def param(self, name: str) -> Spec:
        """How the parameter of that name is stored."""
        names = {full.removeprefix("params/"): param for param, full in enumerate(self.step.state_names)}
        return self.stage.param_spec(names[name])

    def state(self, name: str) -> Spec:
        """How any leaf of the state of that name is stored."""
        leaf = self.step.state_names.index(name)
        for chosen in self.stage.layers:
            for update in chosen.problem.updates:
                if leaf in update.work.leaves:
                    return chosen.spec(update.leaves[update.work.leaves.index(leaf)])
        raise AssertionError(f"{name} belongs to no parameter")


def traffic_of(planned: Iterable[PlannedCollective]) -> Traffic:
    """Bytes a device of each kind."""
    total: Traffic = Counter()
    for one in planned:
        total[one.lane.kind] += one.num_bytes
    return total


def planned(made: Traced, shape: MeshShape, restriction: Restriction = FREE, *, device: DeviceSpec = PRODUCTS) -> Planned:
    """The proved optimum."""
    found = restricted_optimum(made.step, prices_on(shape, device), restriction, remat=False)
    assert found.solution.lower_bound >= found.solution.objective * (1 - 1e-6), "the optimum is proved"
    return Planned(made.step, found.stage, found.solution.objective)


def assert_compiles_as_planned(plan: Planned) -> None:
    """Each task's compiled collectives move the bytes that the plan says, kind by kind."""
    for name in WORKING:
        assert plan.traffic(name) == plan.predicted[name], name
