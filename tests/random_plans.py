"""Random valid plans of small models, run in this process and compared with the one-device reference.

What makes 200 plans affordable: microbatches have the same rows whatever their number, plans are put together from a pool of stages with
random strategies, and a stage's compiled tasks are kept. A family is one model with one optimiser.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.grad import value_and_grad
from alpa_hpc.ir.reference import microbatch_inputs, reference_step
from alpa_hpc.ir.trace import TracedStep, trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.runtime.assemble import Assembly, assemble, place_batch, place_state
from alpa_hpc.runtime.check import check_programs
from alpa_hpc.runtime.execute import FeedBatch, Task, prepare, run_interleaved
from alpa_hpc.runtime.instructions import Buffer, MeshProgram
from alpa_hpc.runtime.schedule import OneFOneB
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.tasks import StageTask, compile_task
from alpa_hpc.runtime.transport import in_process_transports
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.wiring import port_names

DEVICE = DeviceSpec("cpu", 4 << 30, 1e11, 1e11, 1e10, 0.5)
CLUSTER = ClusterSpec("two nodes", 2, 4, DEVICE, Link(1e10, 1e-6), Link(1e9, 1e-5))
ROWS = 8  # of a microbatch
NUM_LAYERS = 4
SMALL_SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1))

Step = Callable[..., tuple[Any, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Variant:
    """A stage of the pool: its layers, its mesh, and how its strategies are drawn."""

    start: int
    stop: int
    shape: tuple[int, int]
    remat: bool
    seed: int

    @property
    def devices(self) -> list[Any]:
        """Stages of one plan may share devices: in one process that changes nothing."""
        size = self.shape[0] * self.shape[1]
        first = {0: 0}.get(self.start, 8 - size if self.stop == NUM_LAYERS else 2)
        return jax.devices()[first : first + size]

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices).reshape(self.shape), ("x", "y"))


@dataclass(frozen=True)
class Plan:
    """Stages, and into how many microbatches a batch is split."""

    stages: tuple[Variant, ...]
    num_microbatches: int


@dataclass(frozen=True, eq=False)
class Work:
    """A step traced with some number of microbatches, and what it does to `state` on one device."""

    traced: TracedStep
    layered: LayeredStep
    batch: dict[str, np.ndarray]
    expected_state: object
    expected_metrics: Mapping[str, jax.Array]


@dataclass(eq=False)
class Family:
    """A model and its optimiser: `step(state, batch)` from `state`; `make_batch(rows)`. The solver's choices are those for `cluster`."""

    step: Step
    state: Any
    make_batch: Callable[[int], Any]
    cluster: ClusterSpec = CLUSTER
    works: dict[int, Work] = field(default_factory=dict)
    solvers: dict[tuple[int, tuple[int, int], bool], StageSolver] = field(default_factory=dict)
    compiled: dict[tuple[object, ...], Task] = field(default_factory=dict)

    def work(self, num_microbatches: int) -> Work:
        if num_microbatches not in self.works:
            batch = self.make_batch(ROWS * num_microbatches)
            traced = trace_step(self.step, self.state, batch, num_microbatches=num_microbatches)
            state, metrics = reference_step(traced, self.state, batch)
            layered = cut_layers(traced, num_layers=NUM_LAYERS, imbalance=3.0)
            self.works[num_microbatches] = Work(traced, layered, batch, state, metrics)
        return self.works[num_microbatches]

    def stage(self, variant: Variant, num_microbatches: int) -> Stage:
        key = (num_microbatches, variant.shape, variant.remat)
        if key not in self.solvers:
            rows, cols = variant.shape
            submesh = Submesh(2, 4) if rows * cols == 8 else Submesh(1, rows * cols)
            prices = MeshPrices(logical_mesh(self.cluster, submesh, MeshShape(rows, cols)))
            self.solvers[key] = StageSolver(self.work(num_microbatches).layered, prices, variant.remat)
        solver = self.solvers[key]
        if variant.seed < 0:
            return Stage(MeshShape(*variant.shape), solver.choose(variant.start, variant.stop, MemoryPrice(0.0, 0.0)))
        return Stage(MeshShape(*variant.shape), random_strategies(solver, variant))

    def assembly(self, plan: Plan) -> Assembly:
        stages = [self.stage(variant, plan.num_microbatches) for variant in plan.stages]
        assembly = assemble(self.work(plan.num_microbatches).layered, stages, OneFOneB())
        check_programs(assembly.programs, OneFOneB())
        return assembly

    def tasks(self, assembly: Assembly, index: int, variant: Variant) -> dict[str, Task]:
        """The compiled tasks of a mesh; those that were compiled for another plan are taken from there."""
        return {name: self.task(assembly, index, variant, task) for name, task in assembly.tasks(index).items()}

    def task(self, assembly: Assembly, index: int, variant: Variant, task: StageTask) -> Task:
        io = assembly.pipeline.stages[index]
        names = (io.inputs, io.outputs, io.cotangent_inputs, io.cotangent_outputs, io.owned, io.loss_outputs, io.params, io.leaves)
        counted = assembly.pipeline.num_microbatches if task.name.startswith(("update", "partials")) else 0
        key = (variant, task.name, task.inputs, task.outputs, names, counted)
        if key not in self.compiled:
            self.compiled[key] = compile_task(task, variant.mesh)
        return self.compiled[key]


def random_strategies(solver: StageSolver, variant: Variant) -> tuple[ChosenLayer, ...]:
    """Any strategy for each node, the same for ports that layers share. Everything a plan may hold is valid this way."""
    draw = random.Random(variant.seed)
    ports: dict[tuple[str, int], int] = {}
    chosen: list[ChosenLayer] = []
    for index in range(variant.start, variant.stop):
        problem = solver.problem(index)
        choices = [draw.randrange(len(labels)) for labels in problem.labels]
        for name, node in zip(port_names(problem.layer, problem.shared), problem.ports, strict=True):
            choices[node] = ports.setdefault(name, choices[node])
        chosen.append(ChosenLayer(problem, tuple(choices)))
    return tuple(chosen)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a plan did: state leaves by mesh and position, and each mesh's metrics."""

    leaves: list[dict[int, np.ndarray]]
    metrics: list[dict[str, float]]


def run_plan(
    family: Family, plan: Plan, programs: Sequence[MeshProgram] | None = None, tasks: Sequence[dict[str, Task]] | None = None
) -> Outcome:
    """One iteration of a plan, all meshes in this thread; `programs` and `tasks` stand in for the right ones."""
    assembly, work = family.assembly(plan), family.work(plan.num_microbatches)
    meshes = [variant.mesh for variant in plan.stages]
    leaves = {number: np.asarray(leaf) for number, leaf in enumerate(work.traced.layout.arrays(family.state))}
    microbatches = microbatch_inputs(work.traced, leaves, work.batch)
    transports = in_process_transports(meshes)
    programs = assembly.programs if programs is None else programs
    tasks = [family.tasks(assembly, index, variant) for index, variant in enumerate(plan.stages)] if tasks is None else tasks
    executors = [prepare(program, mine, transport) for program, mine, transport in zip(programs, tasks, transports, strict=True)]
    residents = [place_state(assembly, index, mesh, leaves) for index, mesh in enumerate(meshes)]

    def feed(index: int) -> FeedBatch:
        return lambda number, microbatch: place_batch(assembly, index, meshes[index], number, np.asarray(microbatches[microbatch][number]))

    results = run_interleaved(executors, residents, [feed(index) for index in range(len(meshes))])
    found = [{int(buffer.name.split(".")[1]): np.asarray(x) for buffer, x in result.resident.items()} for result in results]
    names = work.layered.metric_names
    metrics = [{name: float(result.results[Buffer(f"metric.{k}")]) for k, name in enumerate(names)} for result in results]
    return Outcome(found, metrics)


def assert_equal(family: Family, plan: Plan, outcome: Outcome, tolerance: float = 2e-4) -> None:
    """Each state leaf has changed as it does on one device (for SGD with rate 1 the change is the gradient), and so are the metrics."""
    work = family.work(plan.num_microbatches)
    layout = work.traced.layout
    before = [np.asarray(x, np.float64) for x in layout.arrays(family.state)]
    after = [np.asarray(x, np.float64) for x in layout.arrays(work.expected_state)]
    seen: set[int] = set()
    for mesh, leaves in enumerate(outcome.leaves):
        for number, leaf in leaves.items():
            expected, found = after[number] - before[number], np.asarray(leaf, np.float64) - before[number]
            bound = tolerance * np.abs(expected).max(initial=0.0) + 1e-6
            worst = np.abs(found - expected).max(initial=0.0)
            name = work.layered.state_names[number]
            assert worst <= bound, f"{name} on mesh {mesh} is off by {worst:.2e}, {worst / (bound + 1e-30):.1f} times the tolerance"
            seen.add(number)
    assert seen == set(range(len(before))), "every leaf lives somewhere"
    for metrics in outcome.metrics:
        for name, value in metrics.items():
            np.testing.assert_allclose(value, float(work.expected_metrics[name]), rtol=max(tolerance, 1e-4), err_msg=name)


def pool(draw: random.Random, per_range: int) -> dict[tuple[int, int], list[Variant]]:
    """Some stages for every range of layers."""
    stages: dict[tuple[int, int], list[Variant]] = {}
    for start in range(NUM_LAYERS):
        for stop in range(start + 1, NUM_LAYERS + 1):
            shapes = draw.sample(SMALL_SHAPES, per_range)
            if (start, stop) == (0, NUM_LAYERS):
                shapes = [*draw.sample(SMALL_SHAPES[1:], per_range), (2, 4), (4, 2)]
            stages[start, stop] = [
                Variant(start, stop, shape, draw.random() < 0.4, -1 if draw.random() < 0.2 else draw.randrange(10**6)) for shape in shapes
            ]
    return stages


def random_plans(seed: int, count: int, per_range: int, numbers_of_microbatches: Sequence[int]) -> list[Plan]:
    """`count` different plans of 1, 2 or 3 stages (each number of microbatches makes other updates, which must be compiled)."""
    draw = random.Random(seed)
    stages = pool(draw, per_range)
    plans: dict[Plan, None] = {}
    for _ in range(100 * count):
        if len(plans) == count:
            return list(plans)
        cuts = sorted(draw.sample(range(1, NUM_LAYERS), draw.choice((0, 1, 1, 2, 2))))
        ranges = zip((0, *cuts), (*cuts, NUM_LAYERS), strict=True)
        plans[Plan(tuple(draw.choice(stages[one]) for one in ranges), draw.choice(numbers_of_microbatches))] = None
    raise AssertionError(f"the pool has only {len(plans)} plans, expected {count}: enlarge it")


def splits(family: Family, plan: Plan) -> tuple[bool, bool]:
    """Whether some matrix product is split by rows of the batch, and whether some weight is split."""
    by_rows = by_weight = False
    for variant in plan.stages:
        for chosen in family.stage(variant, plan.num_microbatches).layers:
            for eqn, record in zip(chosen.problem.forward.jaxpr.jaxpr.eqns, chosen.problem.forward.records, strict=True):
                if eqn.primitive.name == "dot_general" and record.node >= 0:
                    left, right = record.plans[chosen.choices[record.node]].operands
                    by_rows |= bool(left.dims[0])
                    by_weight |= len(right.dims) == 2 and right != Spec(((), ()))
    return by_rows, by_weight


def sgd_step(loss: Callable[..., object], **options: Any) -> Step:
    """A step of rate 1: new parameters = old ones - gradient."""

    def step(state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        value, gradients = value_and_grad(loss, **options)(state["params"], batch)
        params = jax.tree.map(lambda p, g: p - g.astype(p.dtype), state["params"], gradients)
        return {**state, "params": params}, {"loss": value, "grad_norm": optax.tree.norm(gradients)}

    return step


def optax_step(loss: Callable[..., object], optimiser: optax.GradientTransformation) -> Step:
    def step(state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, inner = optimiser.update(gradients, state["optimiser"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimiser": inner}, {"loss": value}

    return step


def tokens(rows: int, vocab: int, length: int) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(rows).integers(0, vocab, (rows, length)).astype(np.int32)}


WIDTH, VOCAB, LENGTH = 16, 32, 8


def mlp_params(num_blocks: int = NUM_LAYERS) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2 * num_blocks + 1)
    blocks = [
        {
            "up": 0.3 * jax.random.normal(keys[2 * i], (WIDTH, 2 * WIDTH)),
            "bias": jnp.zeros((2 * WIDTH,)),
            "down": 0.3 * jax.random.normal(keys[2 * i + 1], (2 * WIDTH, WIDTH)),
        }
        for i in range(num_blocks)
    ]
    return {"embedding": jax.random.normal(keys[-1], (VOCAB, WIDTH)), "blocks": blocks}


def mlp_logits(params: Any, batch: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Embedding, residual blocks, and the embedding again."""
    embedding = params["embedding"].astype(dtype)
    x = jnp.take(embedding, batch["tokens"][:, :-1], axis=0, mode="clip")
    for block in params["blocks"]:
        up, bias, down = (block[name].astype(dtype) for name in ("up", "bias", "down"))
        x = x + jnp.tanh(x @ up + bias) @ down
    return (x @ embedding.T).astype(jnp.float32)


def token_losses(logits: jax.Array, batch: Any) -> jax.Array:
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    normaliser = jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1)) + highest[..., 0]
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == batch["tokens"][:, 1:, None]
    return normaliser - jnp.sum(jnp.where(is_label, logits, 0), axis=-1)


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(token_losses(mlp_logits(params, batch), batch))


def mlp_batch(rows: int) -> dict[str, np.ndarray]:
    return tokens(rows, VOCAB, LENGTH + 1)
