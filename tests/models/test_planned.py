"""Plans of each model, with strategies drawn at random, do what one device does: loss, every gradient, and the momentum of SGD."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from alpa_hpc.models.llama import Llama
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.wide_resnet import WideResNet
from alpa_hpc.training.step import build_train_step
from tests.models import plain
from tests.random_plans import Family, Plan, Variant, assert_equal, run_plan, tokens

pytestmark = pytest.mark.slow


def family(model: Any, make_batch: Any, optimiser: optax.GradientTransformation) -> Family:
    train = build_train_step(model, optimiser)
    params = plain.drawn(model)
    state = {"params": params, "optimiser": jax.jit(optimiser.init)(params), "step": np.zeros((), np.int32)}
    return Family(train.step, state, make_batch)


def moe() -> Family:
    model = MoE(
        num_layers=2,
        hidden=16,
        num_heads=2,
        num_experts=4,
        vocab=32,
        sequence=8,
        group_size=16,
        mlp_factor=2,
        capacity_factor=1.1,
        aux_weight=0.1,
    )
    return family(model, lambda rows: tokens(rows, model.vocab, model.sequence + 1), optax.sgd(1.0))


def llama() -> Family:
    model = Llama(num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, mlp_width=32, vocab=32, sequence=8)
    return family(model, lambda rows: tokens(rows, model.vocab, model.sequence + 1), optax.sgd(1.0))


def wide_resnet() -> Family:
    model = WideResNet(depth=14, channels=4, width=2, num_classes=8, image=32)

    def batch(rows: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(rows)
        images = draw.standard_normal((rows, model.image, model.image, 3), dtype=np.float32)
        return {"images": images, "labels": draw.integers(0, model.num_classes, rows).astype(np.int32)}

    return family(model, batch, optax.sgd(1.0, momentum=0.9, nesterov=True))


PLANS = {
    "moe": (moe, Plan((Variant(0, 2, (2, 1), False, 1), Variant(2, 4, (1, 2), True, 2)), 2)),
    "llama": (llama, Plan((Variant(0, 4, (2, 2), True, 3),), 2)),
    "wide_resnet": (wide_resnet, Plan((Variant(0, 4, (2, 4), False, 3),), 2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_equals_one_device(name: str) -> None:
    make, plan = PLANS[name]
    made = make()
    assert_equal(made, plan, run_plan(made, plan), tolerance=5e-4)
