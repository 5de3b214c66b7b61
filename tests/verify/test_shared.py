"""What layers, or one layer twice, make of the same arrays is exchanged once: plans with strategies drawn at random, to the byte.

The model is an unrolled recurrent net of images. Its layers read the same kernel, whose reversal for the gradient changes nothing, and the
gradient of a square is the sum of two products that differ in the order of their factors.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.stages import Compiled

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.runtime.assemble import Assembly
from alpa_hpc.sharding.splits import ChosenSplit
from alpa_hpc.sharding.task_tiles import backward_tiles, forward_tiles
from alpa_hpc.sharding.tiles import Exchange
from alpa_hpc.verify.check import check_task
from tests.random_plans import NUM_LAYERS, Family, Plan, Variant, sgd_step

pytestmark = pytest.mark.slow

CHANNELS, SIDE = 16, 4
VARIANTS = [Variant(0, NUM_LAYERS, (2, 2), remat, seed) for seed, remat in ((2, False), (7, True), (10, False), (10, True))]


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for _ in range(NUM_LAYERS):
        x = lax.conv_general_dilated(x, params["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jnp.tanh(x * x - params["shift"])
    return jnp.mean(x)


def batch(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, SIDE, SIDE, CHANNELS)).astype(np.float32)}


@cache
def family() -> Family:
    kernel = 0.3 * jax.random.normal(jax.random.key(0), (1, 1, CHANNELS, CHANNELS))
    return Family(sgd_step(loss), {"params": {"kernel": kernel, "shift": jnp.ones(CHANNELS)}}, batch)


def assembly(variant: Variant) -> Assembly:
    return family().assembly(Plan((variant,), 2))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_code_exchanges_what_is_planned_to_the_byte(variant: Variant):
    whole = assembly(variant)
    for task in whole.tasks(0).values():
        compiled = family().task(whole, 0, variant, task)
        assert isinstance(compiled, Compiled)
        for lane in check_task(whole.step, whole.stages[0], whole.pipeline.stages[0], task, 0, compiled).lanes:
            assert lane.planned_bytes == lane.compiled_bytes, (task.name, lane)


def exchanges(splits: list[ChosenSplit], *, gpu: bool) -> int:
    tiles = (*forward_tiles(splits), *backward_tiles(splits, gpu=gpu))
    return sum(isinstance(step, Exchange) for one in tiles for step in one.steps)


def test_layers_share_exchanges_and_recomputing_ones_fewer_where_barriers_hold():
    shared = hidden = 0
    for variant in VARIANTS:
        splits = [ChosenSplit(chosen, MeshShape(*variant.shape)) for chosen in assembly(variant).stages[0].layers]
        together = exchanges(splits, gpu=True)
        shared += together < sum(exchanges([split], gpu=True) for split in splits)
        hidden += variant.remat and exchanges(splits, gpu=False) < together
    assert shared >= 2
    assert hidden >= 2
