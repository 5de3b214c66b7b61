"""Assembly on real devices -> sessions that train and score batches: all meshes in this process, or one mesh of an MPI job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from alpa_hpc.errors import LaunchError
from alpa_hpc.ir.reference import microbatch_inputs
from alpa_hpc.ir.trace import TracedStep
from alpa_hpc.runtime.assemble import Assembly, compile_evaluation, compile_tasks, evaluation_program, place_batch, place_state
from alpa_hpc.runtime.execute import Executor, FeedBatch, IterationResult, prepare, run_interleaved, run_iteration
from alpa_hpc.runtime.instructions import Buffer
from alpa_hpc.runtime.transport import AbstractTransport, in_process_transports

Batch = Any
Figures = dict[str, float]


class Session(Protocol):
    """What the training loop needs: one iteration on a batch, and the loss of a batch without training on it."""

    def train(self, batch: Batch) -> Figures:
        """Run one iteration; the metrics of the step."""
        ...

    def score(self, batch: Batch) -> float:
        """The loss of a batch."""
        ...


@dataclass(slots=True, eq=False)
class MeshRunner:
    """One mesh: its compiled programs and its state."""

    assembly: Assembly
    traced: TracedStep
    index: int
    mesh: Mesh
    training: Executor
    scoring: Executor
    resident: Mapping[Buffer, jax.Array]

    def feed(self, batch: Batch) -> FeedBatch:
        """Microbatch inputs of a batch, put on the mesh as they are asked for."""
        leaves = {leaf: np.asarray(self.resident[Buffer(f"state.{leaf}")]) for leaf in self.traced.before_leaves}
        parts = microbatch_inputs(self.traced, leaves, batch)

        def fed(batch_input: int, microbatch: int) -> jax.Array:
            return place_batch(self.assembly, self.index, self.mesh, batch_input, np.asarray(parts[microbatch][batch_input]))

        return fed

    def take(self, result: IterationResult) -> Figures:
        """Keep the new state; the metrics as numbers."""
        self.resident = result.resident
        names = self.assembly.step.metric_names
        return {name: float(np.asarray(result.results[Buffer(f"metric.{k}")])) for k, name in enumerate(names)}

    def loss_of(self, result: IterationResult) -> float:
        """The loss of a scored batch: sum / count where the step counts, else the mean over microbatches."""
        totals = [float(np.asarray(result.results[Buffer(f"total.{k}")])) for k in range(self.traced.num_values)]
        return totals[0] / (totals[1] if len(totals) == 2 else self.traced.num_microbatches)


def build_runner(
    assembly: Assembly, traced: TracedStep, index: int, mesh: Mesh, transport: AbstractTransport, leaves: Mapping[int, np.ndarray]
) -> MeshRunner:
    """Compile the programs of mesh `index` and place its state."""
    training = prepare(assembly.programs[index], compile_tasks(assembly, index, mesh), transport)
    scoring = prepare(evaluation_program(assembly, index), compile_evaluation(assembly, index, mesh), transport)
    return MeshRunner(assembly, traced, index, mesh, training, scoring, place_state(assembly, index, mesh, leaves))


@dataclass(frozen=True, slots=True, eq=False)
class InProcessSession:
    """All meshes in this process, one thread going from mesh to mesh."""

    runners: Sequence[MeshRunner]

    def train(self, batch: Batch) -> Figures:
        """See Session."""
        feeds = [runner.feed(batch) for runner in self.runners]
        results = run_interleaved([runner.training for runner in self.runners], _handed_over(self.runners), feeds)
        return [runner.take(result) for runner, result in zip(self.runners, results, strict=True)][0]

    def score(self, batch: Batch) -> float:
        """See Session."""
        feeds = [runner.feed(batch) for runner in self.runners]
        results = run_interleaved([runner.scoring for runner in self.runners], _handed_over(self.runners), feeds)
        for runner, result in zip(self.runners, results, strict=True):
            runner.resident = result.resident
        return self.runners[0].loss_of(results[0])

    def whole_state(self) -> dict[int, np.ndarray]:
        """Every state leaf as a whole host array of its own (a copy: the next iteration consumes what is on the devices).

        Raises:
            LaunchError: an iteration failed or was interrupted, and the state went with it.
        """
        held = {int(buffer.name.removeprefix("state.")): value for runner in self.runners for buffer, value in runner.resident.items()}
        if not held:
            raise LaunchError("an iteration did not finish, and the state it had consumed is lost: start again from a state you kept.")
        return {leaf: np.array(held[leaf]) for leaf in sorted(held)}


def check_devices(num_devices: int) -> None:
    """Raise LaunchError where this process has fewer than `num_devices` devices."""
    devices = jax.devices()
    if len(devices) < num_devices:
        raise LaunchError(
            f"the cluster has {num_devices} devices, this process has {len(devices)} ({devices[0].platform}). For CPU devices that "
            f'share this machine, call jax.config.update("jax_num_cpu_devices", {num_devices}) before anything else uses jax (where there '
            "is a GPU, set JAX_PLATFORMS=cpu, too). To train on several machines use the command line, which starts one process a device."
        )


def in_process_session(
    assembly: Assembly, traced: TracedStep, mesh_devices: Sequence[Sequence[int]], leaves: Mapping[int, np.ndarray]
) -> InProcessSession:
    """Compile all meshes for this process's devices (device i of the plan is device i of the process) and place the state's whole `leaves`.

    Raises:
        LaunchError: this process has fewer devices than the meshes.
    """
    check_devices(sum(map(len, mesh_devices)))
    devices = jax.devices()
    meshes = [
        Mesh(np.array([devices[i] for i in ids]).reshape(stage.shape.sizes), ("x", "y"))
        for ids, stage in zip(mesh_devices, assembly.stages, strict=True)
    ]
    parts = zip(meshes, in_process_transports(meshes), strict=True)
    return InProcessSession(
        [build_runner(assembly, traced, index, mesh, transport, leaves) for index, (mesh, transport) in enumerate(parts)]
    )


def _handed_over(runners: Sequence[MeshRunner]) -> list[Mapping[Buffer, jax.Array]]:
    """The state of each mesh, no longer held by its runner: tasks consume it."""
    states = [runner.resident for runner in runners]
    for runner in runners:
        runner.resident = {}
    return states


@dataclass(frozen=True, slots=True, eq=False)
class RankSession:
    """This rank's part of one mesh; the other ranks run the same calls."""

    runner: MeshRunner

    def train(self, batch: Batch) -> Figures:
        """See Session."""
        feed = self.runner.feed(batch)
        (state,) = _handed_over([self.runner])
        return self.runner.take(run_iteration(self.runner.training, state, feed))

    def score(self, batch: Batch) -> float:
        """See Session."""
        feed = self.runner.feed(batch)
        (state,) = _handed_over([self.runner])
        result = run_iteration(self.runner.scoring, state, feed)
        self.runner.resident = result.resident
        return self.runner.loss_of(result)
