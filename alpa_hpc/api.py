"""(Train step, ClusterSpec) -> ParallelTraining on this process's devices, for use as a library: trace, plan or take a plan, compile, run.

The paper's Algorithm 1 with analytic costs (section 7 has the decorator of the same name); no jobs are involved.

parallel = parallelize(step, cluster=cluster, num_microbatches=4)
training = parallel.start(state, batch)      # plans, compiles, places the state
metrics = training.step(batch)               # trains in place: the state lives on the devices
state = training.state()                     # a copy, whole, on the host
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_hpc.arguments import check_argument, check_fields
from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import ConfigError, PlanError, TraceError
from alpa_hpc.ir.state import shapes_of
from alpa_hpc.ir.trace import TracedStep, rows_of, trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.plan.codec import plan_from_json, plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.families import NOTHING_KNOWN, pricer_for
from alpa_hpc.planner.lookup import make_plan, schedule_of, stages_of_plan
from alpa_hpc.planner.microbatches import TriedNumber, best_number, numbers_for, tried, try_numbers
from alpa_hpc.planner.refine import Interest
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan
from alpa_hpc.planner.simulating import fastest_modelled
from alpa_hpc.runtime.assemble import assemble
from alpa_hpc.runtime.check import check_programs
from alpa_hpc.runtime.options import SEARCHED, ScheduleKind
from alpa_hpc.runtime.session import InProcessSession, check_devices, in_process_session
from alpa_hpc.sharding.solved import Solved
from alpa_hpc.stages.candidate import LogicalShapes, SubmeshShapes
from alpa_hpc.stages.options import RematChoice, SearchOptions, with_layers_for
from alpa_hpc.units import bytes_words
from alpa_hpc.verify.plan import check_plan_code
from alpa_hpc.verify.target import check_compiler

Step = Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]  # (state, batch) -> (new state, metrics), with one value_and_grad

DEFAULT_LAYERS = LayerOptions(num_layers=4, imbalance=0.5)
DEFAULT_SEARCH = SearchOptions(
    name="default",
    submesh_shapes=SubmeshShapes.ALL,
    logical_shapes=LogicalShapes.ALL,
    num_best=4,
    remat=RematChoice.SEARCH,
    table_cap=10_000_000,
    solver_seconds=60.0,
)


def parallelize(
    step: Step,
    *,
    cluster: ClusterSpec,
    num_microbatches: int = SEARCHED,
    plan: ParallelPlan | None = None,
    layers: LayerOptions = DEFAULT_LAYERS,
    search: SearchOptions = DEFAULT_SEARCH,
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
) -> "ParallelStep":
    """Say how a train step is to be parallelised; nothing is traced or searched yet.

    `step(state, batch) -> (new_state, metrics)` is pure JAX for one device, with one `alpa_hpc.value_and_grad`; metrics are a dict of
    scalars. The rows of the batch are split into `num_microbatches`; without that the search tries all numbers that divide them and takes
    the one whose plan is the fastest, which changes what is computed where rows of a microbatch depend on each other, as in a batch norm.
    With a `plan`, made for the same step, batch, `layers` and cluster, nothing is searched, its number of microbatches is taken where none
    is given, and `schedule` is not looked at, nor is `search`, but for how it cuts layers. The forward pass is cut into 4 layers by
    default; more give the search more freedom and more work.
    """
    return ParallelStep(step, cluster, num_microbatches, plan, layers, search, schedule)


def load_plan(path: str | Path) -> ParallelPlan:
    """Read a plan.json of a run, or of `save_plan`. Raises PlanError where it is absent, torn, or of another version."""
    check_argument("path", path, str | Path)
    path = Path(path)
    if not path.is_file():
        raise PlanError(f"{path} is not a file, expected a plan: the plan.json of a run folder, or what save_plan wrote.")
    return plan_from_json(path.read_text(encoding="utf-8"), str(path))


def save_plan(plan: ParallelPlan, path: str | Path) -> None:
    """Write a plan as JSON, for `load_plan`. Raises PlanError where no file can be at `path`."""
    check_argument("plan", plan, ParallelPlan)
    check_argument("path", path, str | Path)
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise PlanError(f"{path} cannot be written, expected the name of a file in a folder that exists, found {_obstacle(path)}.")
    path.write_text(plan_to_json(plan), encoding="utf-8")


def _obstacle(path: Path) -> str:
    return "a folder of that name" if path.is_dir() else f"no folder {path.parent}: make it first"


@dataclass(frozen=True, slots=True, eq=False)
class ParallelStep:
    """A train step with all that is needed to plan it; made by `parallelize`."""

    step: Step
    cluster: ClusterSpec
    num_microbatches: int
    plan: ParallelPlan | None
    layers: LayerOptions
    search: SearchOptions
    schedule: ScheduleKind

    def __post_init__(self) -> None:
        check_fields(self, "parallelize")
        if self.num_microbatches < SEARCHED:
            raise ConfigError(
                f"parallelize: num_microbatches is {self.num_microbatches}, expected at least 1 (1 runs the batch as it is), or none to "
                "have it chosen"
            )

    def find_plan(self, state: Any, batch: Any) -> ParallelPlan:
        """The given plan, else the fastest one found; needs shapes and dtypes alone, and no device of the cluster.

        Raises:
            TraceError: the step cannot be cut into microbatches or layers.
            InfeasibleError: nothing fits the cluster.
            PlanError: the given plan is for another step, batch or cluster.
        """
        learnt: dict[str, Solved] = {}
        layered = self._trace(state, batch, self._number(state, batch, learnt))[1]
        plan = self._planned(layered, learnt)
        if plan is self.plan:
            stages_of_plan(plan, layered, self.cluster)  # a plan from elsewhere is checked; one just found was made from its stages
        return plan

    def start(self, state: Any, batch: Any) -> "ParallelTraining":
        """Plan, compile for the first devices of this process, and place `state` (arrays); of `batch` only shapes and dtypes count.

        Raises:
            LaunchError: this process has fewer devices than the cluster.
            TraceError: the step cannot be cut into microbatches or layers.
            InfeasibleError: nothing fits the cluster.
            PlanError: the given plan is for another step, batch or cluster.
        """
        check_devices(self.cluster.num_devices)  # before planning, which may take minutes
        learnt: dict[str, Solved] = {}
        traced, layered = self._trace(state, batch, self._number(state, batch, learnt))
        leaves = _host_leaves(traced, state)
        plan = self._planned(layered, learnt)
        schedule = schedule_of(plan)
        assembly = assemble(layered, stages_of_plan(plan, layered, self.cluster), schedule)
        check_programs(assembly.programs, schedule)
        session = in_process_session(assembly, traced, plan.mesh_devices, leaves)
        return ParallelTraining(plan, self.cluster, traced, shapes_of(batch), session)

    def _number(self, state: Any, batch: Any, learnt: dict[str, Solved]) -> int:
        """The number of microbatches: given, or the plan's, or the best there is; then what was solved on the way comes into `learnt`."""
        if self.num_microbatches != SEARCHED:
            return self.num_microbatches
        if self.plan is not None:
            return self.plan.num_microbatches
        num_rows, schedule = rows_of(shapes_of(batch), 1), SCHEDULES[self.schedule]

        def try_at(number: int, most_seconds: float) -> TriedNumber:
            def search(interest: Interest) -> SimulatedPlan:
                pricer = pricer_for(self._trace(state, batch, number)[1], self.cluster, self.search, schedule)
                try:
                    return fastest_modelled(pricer, self.search, schedule, interest)
                finally:
                    learnt.update(pricer.learnt)

            return tried(number, most_seconds, search)

        return best_number(try_numbers(numbers_for(num_rows, self.cluster.num_devices), try_at))

    def _trace(self, state: Any, batch: Any, num_microbatches: int) -> tuple[TracedStep, LayeredStep]:
        traced = trace_step(self.step, state, shapes_of(batch), num_microbatches=num_microbatches)
        _check_metrics(traced)
        layers, clustering = with_layers_for(self.layers, self.search, self.cluster.num_devices), self.search.clustering
        return traced, cut_layers(traced, num_layers=layers.num_layers, imbalance=layers.imbalance, clustering=clustering)

    def _planned(self, layered: LayeredStep, known: Mapping[str, Solved]) -> ParallelPlan:
        return self.plan if self.plan is not None else search_plan(layered, self.cluster, self.search, self.schedule, known)


@dataclass(frozen=True, slots=True, eq=False)
class ParallelTraining:
    """A training under way: it owns the state, spread over the devices. Made by `ParallelStep.start`."""

    plan: ParallelPlan
    cluster: ClusterSpec
    _traced: TracedStep
    _batch_shapes: Any
    _session: InProcessSession

    def step(self, batch: Any) -> dict[str, float]:
        """Train on a batch and return the step's metrics. Raises TraceError for a batch of other shapes than the first one."""
        return self._session.train(_fitting(batch, self._batch_shapes))

    def score(self, batch: Any) -> float:
        """The loss of a batch, by forward passes alone; the state stays as it is. Raises TraceError like `step`."""
        return self._session.score(_fitting(batch, self._batch_shapes))

    def state(self) -> Any:
        """A copy of the whole state: the pytree that was given to `start`, of numpy arrays (keys are keys, other objects themselves)."""
        leaves = self._session.whole_state()
        return self._traced.layout.state([leaves[leaf] for leaf in range(len(self._traced.state_avals))])

    def explain(self) -> str:
        """The plan for people: what each stage runs and where; predicted memory of a device and seconds of an iteration."""
        return explain_plan(self.plan, self.cluster)


def search_plan(
    step: LayeredStep, cluster: ClusterSpec, search: SearchOptions, schedule: ScheduleKind, known: Mapping[str, Solved] = NOTHING_KNOWN
) -> ParallelPlan:
    """The paper's Algorithm 1 with analytic costs, in this process; where compiled code is not as planned, or not to be had, it warns.

    Raises:
        InfeasibleError: nothing fits.
        ConfigError: `search.check_target` asks for code that this installation cannot compile.
    """
    check_compiler(search.check_target)
    chosen = fastest_modelled(pricer_for(step, cluster, search, SCHEDULES[schedule], known), search, SCHEDULES[schedule])
    plan = make_plan(step, chosen, cluster, schedule)
    checked = check_plan_code(chosen.assembly, [stage.submesh for stage in plan.stages], search.check_target)
    for text in checked.warnings:
        warnings.warn(text, stacklevel=2)
    return plan


def explain_plan(plan: ParallelPlan, cluster: ClusterSpec) -> str:
    """A plan as a few lines of text."""
    lines = [
        f"{cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.kind}; number of stages: {len(plan.stages)}, "
        f"of microbatches: {plan.num_microbatches}; schedule: {plan.schedule}"
    ]
    for index, (stage, num_bytes) in enumerate(zip(plan.stages, plan.prediction.stage_bytes, strict=True)):
        layers = f"layers {stage.start} to {stage.stop - 1} of {plan.num_layers}"
        mesh = f"{stage.shape.rows} x {stage.shape.cols} mesh of devices {', '.join(map(str, stage.devices))}"
        memory = f"{bytes_words(num_bytes)} a device{', recomputed in the backward pass' if stage.remat else ''}"
        lines.append(f"stage {index}: {layers}; {mesh}; {memory}")
    lines.append(f"predicted: {plan.prediction.iteration_seconds:.3g} seconds an iteration")
    return "\n".join(lines)


def _check_metrics(traced: TracedStep) -> None:
    """Raise TraceError for metrics that are no real scalars, which cannot be reported."""
    metrics = traced.after.out_avals[len(traced.state_avals) :]
    for name, aval in zip(traced.metric_names, metrics, strict=True):
        if aval.shape:
            raise TraceError(f"metric '{name}' must be a scalar, found {aval.dtype}{list(aval.shape)}. Reduce it inside the step.")
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise TraceError(f"metric '{name}' must be a real number, found {aval.dtype}. Report its parts or its size (jnp.abs).")


def _host_leaves(traced: TracedStep, state: Any) -> dict[int, np.ndarray]:
    """The state's leaves as whole host arrays, of the dtypes that were traced."""
    leaves = traced.layout.arrays(state)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TraceError("the state to start from must hold arrays, found shapes: shapes alone are enough for find_plan only.")
    return {index: np.asarray(leaf, dtype=aval.dtype) for index, (leaf, aval) in enumerate(zip(leaves, traced.state_avals, strict=True))}


def _fitting(batch: Any, shapes: Any) -> Any:
    """The batch in the dtypes that were traced. Raises TraceError where its structure, shapes or dtypes are others."""
    found, expected = shapes_of(batch), shapes
    if jax.tree.structure(found) != jax.tree.structure(expected):
        raise TraceError(
            f"the batch has the structure {jax.tree.structure(found)}, expected that of `start`: {jax.tree.structure(expected)}."
        )
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise TraceError(
                f"batch leaf '{jax.tree_util.keystr(path, simple=True, separator='/')}' is {one.dtype}{list(one.shape)}, expected "
                f"{other.dtype}{list(other.shape)} as in `start`: a plan is for one shape. Start again for another."
            )
    return jax.tree.map(lambda leaf, shape: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype=shape.dtype), batch, expected)
