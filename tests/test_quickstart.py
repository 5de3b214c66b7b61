"""The quickstart end to end, as a user starts it: plan, profile, train by mpirun; then again with a warm cost store, in one process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

from alpa_hpc.config import load_config
from alpa_hpc.experiment import open_training_data, prepared
from alpa_hpc.ir.reference import reference_step
from alpa_hpc.profiling.store import read_store
from alpa_hpc.training.data import Split
from alpa_hpc.training.metrics import read_metrics

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
    assert losses(second) == pytest.approx(losses(first), rel=1e-6)
    assert second.result["training"]["last_held_out_loss"] == pytest.approx(first.result["training"]["last_held_out_loss"], rel=1e-5)


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
