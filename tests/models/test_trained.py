"""The small size of each model trains in one process, and the smallest size of the paper is planned for its GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alpa_hpc.config import compose_experiment
from alpa_hpc.experiment import run
from alpa_hpc.training.metrics import read_metrics
from tests.quick import QUICK_FLAGS

SHORT = (
    *("launcher=inprocess", "profiling=analytic", "cluster.num_nodes=1", "cluster.devices_per_node=1", "layers.num_layers=1"),
    *("schedule.num_microbatches=2", "training.num_steps=25", "training.warmup_steps=3", "training.evaluate_every=0"),
)
MODELS = {
    "moe_tiny": ("model.num_layers=2", "model.hidden=32", "training.batch_size=16", "training.learning_rate=3e-3"),
    "llama_tiny": ("model.num_layers=2", "model.hidden=64", "training.batch_size=16", "training.learning_rate=3e-3"),
    "wresnet_tiny": ("data=synthetic_images", "training.optimiser=sgd", "training.learning_rate=0.02", "training.batch_size=32"),
}
TRAIN = """
import sys
from alpa_hpc.config import compose_experiment
from alpa_hpc.experiment import run
for overrides in sys.argv[1:]:
    run(compose_experiment("quickstart", overrides.split()))
"""

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folder of each model; one process trains all, and it is not this one, since jax counts its devices once a process."""
    runs = {model: tmp_path_factory.mktemp(model) for model in MODELS}
    overrides = [" ".join((f"model={model}", *SHORT, *MODELS[model], f"runs={folder}")) for model, folder in runs.items()]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *overrides],
        env={**os.environ, "XLA_FLAGS": QUICK_FLAGS},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {model: next((folder / "quickstart").iterdir()) for model, folder in runs.items()}


@pytest.mark.parametrize("model", MODELS)
def test_the_small_size_learns(model: str, trained: dict[str, Path]) -> None:
    losses = [line["loss"] for line in read_metrics(trained[model] / "metrics.jsonl")]
    assert len(losses) == 25
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]
    rate = "examples_per_second" if model == "wresnet_tiny" else "tokens_per_second"
    assert json.loads((trained[model] / "result.json").read_text())["training"][rate] > 0


@pytest.mark.parametrize("name", ["moe380m", "wresnet250m"])
def test_the_papers_smallest_size_fits_its_gpu(name: str, tmp_path: Path) -> None:
    folder = run(compose_experiment(name, ["mode=plan", f"runs={tmp_path}"]))
    planning = json.loads((folder / "result.json").read_text())["planning"]
    assert 0 < max(planning["stage_bytes"]) < planning["memory_bytes"]
    assert planning["predicted_step_seconds"] > 0
