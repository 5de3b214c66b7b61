"""Plans of each model, with strategies drawn at random, do what one device does: loss, every gradient, and the momentum of SGD."""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from alpa_hpc.models.llama import Llama
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.wide_resnet import WideResNet
from alpa_hpc.training.step import build_train_step
from tests.random_plans import Family, Plan, Variant, assert_equal, run_plan, tokens

pytestmark = pytest.mark.slow


def family(model: Any, make_batch: Any, optimiser: optax.GradientTransformation) -> Family:
    train = build_train_step(model, optimiser)
    return Family(train.step, train.init(jax.random.key(0)), make_batch)


@cache
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


@cache
def llama() -> Family:
    model = Llama(num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, mlp_width=32, vocab=32, sequence=8)
    return family(model, lambda rows: tokens(rows, model.vocab, model.sequence + 1), optax.sgd(1.0))


@cache
def wide_resnet() -> Family:
    model = WideResNet(depth=14, channels=4, width=2, num_classes=8, image=32)

    def batch(rows: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(rows)
        images = draw.standard_normal((rows, model.image, model.image, 3), dtype=np.float32)
        return {"images": images, "labels": draw.integers(0, model.num_classes, rows).astype(np.int32)}

    return family(model, batch, optax.sgd(1.0, momentum=0.9, nesterov=True))


FAMILIES = {"moe": moe, "llama": llama, "wide_resnet": wide_resnet}
PLANS = {
    "two stages": Plan((Variant(0, 2, (2, 2), False, 1), Variant(2, 4, (2, 1), True, 2)), 2),
    "one stage": Plan((Variant(0, 4, (2, 4), False, 3),), 2),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_equals_one_device(name: str, plan: str) -> None:
    made = FAMILIES[name]()
    assert_equal(made, PLANS[plan], run_plan(made, PLANS[plan]), tolerance=5e-4)
