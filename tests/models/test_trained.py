"""The small size of each model trains by the command line in one process, and the smallest size of the paper is planned for its GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alpa_hpc.config import compose_experiment
from alpa_hpc.experiment import run
from alpa_hpc.training.metrics import read_metrics

SHORT = (
    *("launcher=inprocess", "profiling=analytic", "cluster.num_nodes=2", "cluster.devices_per_node=1", "layers.num_layers=2"),
    *("schedule.num_microbatches=2", "training.num_steps=40", "training.warmup_steps=5", "training.evaluate_every=0"),
)
MODELS = {
    "moe_tiny": ("training.batch_size=16", "training.learning_rate=3e-3"),
    "llama_tiny": ("training.batch_size=16", "training.learning_rate=3e-3"),
    "wresnet_tiny": ("data=synthetic_images", "training.optimiser=sgd", "training.learning_rate=0.02", "training.batch_size=32"),
}

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("model", MODELS)
def test_the_small_size_learns(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "alpa_hpc", "+experiment=quickstart", f"model={model}", *SHORT, *MODELS[model], f"runs={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)  # jax counts its devices once a process
    assert done.returncode == 0, done.stderr[-4000:]
    [folder] = (tmp_path / "quickstart").iterdir()
    losses = [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]
    assert len(losses) == 40
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    rate = "examples_per_second" if model == "wresnet_tiny" else "tokens_per_second"
    assert json.loads((folder / "result.json").read_text())["training"][rate] > 0


@pytest.mark.parametrize("name", ["moe380m", "wresnet250m"])
def test_the_papers_smallest_size_fits_its_gpu(name: str, tmp_path: Path) -> None:
    folder = run(compose_experiment(name, ["mode=plan", f"runs={tmp_path}"]))
    planning = json.loads((folder / "result.json").read_text())["planning"]
    assert 0 < max(planning["stage_bytes"]) < planning["memory_bytes"]
    assert planning["predicted_step_seconds"] > 0
