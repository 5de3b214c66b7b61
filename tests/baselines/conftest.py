"""A tiny GPT of four layers on two described nodes whose links are so fast that splitting always pays."""

import pytest

from alpa_hpc.baselines.manual import Pricers
from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.models.gpt import GPT
from alpa_hpc.training.options import OptimiserKind, ParamDtype, TrainingOptions
from alpa_hpc.training.prepare import prepare

TRAINING = TrainingOptions(
    optimiser=OptimiserKind.ADAMW,
    param_dtype=ParamDtype.FLOAT32,
    batch_size=16,
    num_steps=1,
    learning_rate=1e-3,
    warmup_steps=0,
    weight_decay=0.0,
    clip_norm=0.0,
    seed=0,
    evaluate_every=0,
    evaluate_batches=1,
)
CLUSTER = ClusterSpec("fast", 2, 4, DeviceSpec("slow", 1 << 30, 1e9, 1e9, 1e12, 1.0), Link(1e12, 1e-9), Link(1e12, 1e-9))


@pytest.fixture(scope="session")
def pricers() -> Pricers:
    model = GPT(num_layers=4, hidden=32, num_heads=4, vocab=64, sequence=8)
    step = prepare(model, TRAINING, LayerOptions(num_layers=4, imbalance=0.5), num_microbatches=4).step
    return Pricers(step, CLUSTER)
