"""The quickstart end to end, as a user starts it: plan, profile, train by mpirun; then again with a warm cost store, in one process."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.stages import Compiled

from alpa_hpc.config import load_config
from alpa_hpc.ir.reference import reference_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.launch.paths import open_run
from alpa_hpc.parts import open_training_data, prepared
from alpa_hpc.profiling.store import read_store
from alpa_hpc.runtime.assemble import Assembly, compile_tasks
from alpa_hpc.runtime.pipeline import StageIO
from alpa_hpc.runtime.stage import Stage, gradient_spec
from alpa_hpc.runtime.update_tasks import leaf_layouts
from alpa_hpc.train_job import read_plan, training_job
from alpa_hpc.training.data import Split
from alpa_hpc.training.metrics import read_metrics
from alpa_hpc.training.run import assemble_plan
from alpa_hpc.verify.check import TaskCheck, check_task

NUM_STEPS = 4
SHORT = (
    f"training.num_steps={NUM_STEPS}",
    "training.evaluate_batches=1",
    "profiling.max_rounds=1",
    "profiling.tasks_per_round=6",
    "profiling.repeats=3",
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Finished:
    """A run that has ended: its folder, what it printed, and its result.json."""

    folder: Path
    printed: str
    result: Mapping[str, Any]


def run_command(*arguments: str, cwd: Path) -> Finished:
    command = (sys.executable, "-m", "alpa_hpc", "+experiment=quickstart", *arguments)
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("run folder: "), last
    folder = Path(last.removeprefix("run folder: "))
    return Finished(folder, done.stdout, json.loads((folder / "result.json").read_text()))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def first(base: Path) -> Finished:
    return run_command(*SHORT, "launcher=local", f"runs={base}/runs", cwd=base)


@pytest.fixture(scope="module")
def second(first: Finished, base: Path) -> Finished:
    return run_command(*SHORT, "launcher=inprocess", f"runs={base}/runs", cwd=base)


def test_the_run_folder_holds_what_the_readme_says(first: Finished) -> None:
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "result.json", "status/plan.json", "status/train.json", "logs"):
        assert (first.folder / name).exists(), name
    assert json.loads((first.folder / "status" / "train.json").read_text())["state"] == "done"


def test_the_plan_was_searched_among_several(first: Finished) -> None:
    plans = first.result["planning"]["plans"]
    shapes = {json.dumps([(s["layers"], s["submesh"], s["shape"]) for s in plan["stages"]]) for plan in plans}
    assert len(shapes) >= 3
    assert all(plan["simulated_seconds"] > 0 for plan in plans)
    assert sum(plan["chosen"] for plan in plans) == 1


def test_stages_were_compiled_and_timed(first: Finished, base: Path) -> None:
    rows = read_store(base / "runs" / "costs").rows.values()
    assert len({row.stage for row in rows}) >= 6
    assert first.result["planning"]["counts"]["profile_tasks_new"] == len(rows)
    for row in rows:
        assert len(row.seconds_forward) == 3 and min(row.seconds_forward) > 0
        assert row.pid != os.getpid() and row.host


def test_training_equals_one_device_at_every_step(first: Finished) -> None:
    assert losses(first) == pytest.approx(reference_losses(first), rel=1e-5)


def test_a_second_run_measures_nothing_and_plans_the_same(first: Finished, second: Finished) -> None:
    assert second.result["planning"]["counts"]["profile_tasks_new"] == 0
    assert second.result["planning"]["counts"]["profile_tasks_reused"] == first.result["planning"]["counts"]["profile_tasks_new"]
    assert (second.folder / "plan.json").read_text() == (first.folder / "plan.json").read_text()


def test_one_process_trains_as_mpi_ranks_do(first: Finished, second: Finished) -> None:
    assert losses(second) == pytest.approx(losses(first), rel=1e-5)  # gloo adds in another order than one process does
    assert second.result["training"]["last_held_out_loss"] == pytest.approx(first.result["training"]["last_held_out_loss"], rel=1e-5)


# --- the programs that trained, compiled again from plan.json


@dataclass(frozen=True)
class CompiledMesh:
    """A mesh of the plan: its number and its programs for as many devices of this process."""

    assembly: Assembly
    index: int
    tasks: Mapping[str, Compiled]

    def check(self, name: str) -> TaskCheck:
        """One of the programs, held against the plan."""
        task = self.assembly.tasks(self.index)[name]
        return check_task(self.step, self.stage, self.io, task, 0, self.tasks[name])

    @property
    def step(self) -> LayeredStep:
        return self.assembly.step

    @property
    def stage(self) -> Stage:
        return self.assembly.stages[self.index]

    @property
    def io(self) -> StageIO:
        return self.assembly.pipeline.stages[self.index]

    @property
    def tiles_of_update(self) -> Mapping[int, tuple[int, ...]]:
        """The shape of one device's tile of each state leaf that the compiled update takes (gradients, leaves, totals, scalars)."""
        update = self.tasks["update"]
        replicas = set(self.io.params) - set(self.io.owned)
        leaves = [leaf for leaf in self.io.leaves if leaf not in replicas]
        first = len(self.io.owned)
        arguments = zip(leaves, update.in_avals[0][first:], update.input_shardings[0][first:], strict=False)
        return {leaf: sharding.shard_shape(aval.shape) for leaf, aval, sharding in arguments}


@pytest.fixture(scope="module")
def meshes(first: Finished) -> tuple[CompiledMesh, ...]:
    paths = open_run(first.folder)
    plan = read_plan(paths)
    assembly = assemble_plan(training_job(load_config(paths.config), plan))
    compiled: list[CompiledMesh] = []
    for index, (numbers, stage) in enumerate(zip(plan.mesh_devices, plan.stages, strict=True)):
        mesh = Mesh(np.array(jax.devices())[list(numbers)].reshape(stage.shape.sizes), ("x", "y"))
        compiled.append(CompiledMesh(assembly, index, compile_tasks(assembly, index, mesh)))
    return tuple(compiled)


def test_every_program_exchanges_what_the_plan_says_to_the_byte(meshes: tuple[CompiledMesh, ...]) -> None:
    """Forward and backward: no gradient among it. Once an iteration: each gradient summed, each parameter handed out."""
    found: Counter[str] = Counter()
    for mesh in meshes:
        for name in mesh.tasks:
            for lane in mesh.check(name).lanes:
                assert lane.compiled_bytes == lane.planned_bytes, (mesh.index, name, lane)
                found[name] += lane.compiled_bytes
    assert sum(found.values()) > 0 or all(mesh.stage.shape.num_devices == 1 for mesh in meshes)


def test_optimiser_state_is_split_over_the_devices_that_share_a_gradient(meshes: tuple[CompiledMesh, ...]) -> None:
    checked = 0
    for mesh in meshes:
        layouts, sizes = leaf_layouts(mesh.step, mesh.stage, mesh.io), mesh.stage.shape.sizes
        tiles = mesh.tiles_of_update
        for param in mesh.io.owned:
            axes = {axis for reader in mesh.stage.readers(param) for axis in gradient_spec(reader, param).partial}
            share = prod(sizes[axis] for axis in axes)
            shape = mesh.step.state_avals[param].shape
            for leaf in mesh.stage.update_of(param)[1].work.leaves[1:]:
                assert tiles[leaf] == layouts[leaf].spec.local_shape(layouts[leaf].shape, mesh.stage.shape), "as planned"
                if share == mesh.stage.shape.num_devices > 1 and layouts[leaf].shape == shape and any(size % share == 0 for size in shape):
                    assert prod(tiles[leaf]) * share == prod(shape), mesh.step.state_names[leaf]
                    checked += 1
    assert checked > 0 or all(mesh.stage.shape.num_devices == 1 for mesh in meshes)


def losses(run: Finished) -> list[float]:
    found = [figures["loss"] for figures in read_metrics(run.folder / "metrics.jsonl")]
    assert len(found) == NUM_STEPS
    return found


def reference_losses(run: Finished) -> list[float]:
    config = load_config(run.folder / "config.yaml")
    made, data = prepared(config), open_training_data(config)
    step = jax.jit(lambda state, batch: reference_step(made.traced, state, batch))
    state: Any = made.train_step.init(jax.random.key(config.training.seed))
    found: list[float] = []
    for number in range(NUM_STEPS):
        batch = data.batch(Split.TRAINING, config.training.batch_size, config.training.seed, number)
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found
