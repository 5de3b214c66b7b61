"""What is added up is exchanged as one, in code for GPUs: plans of layers with branches, with strategies drawn at random.

Cotangents of the input of three products meet in the backward, and what two branches make in the forward.
"""

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.splits import ChosenSplit
from alpa_hpc.sharding.task_tiles import Layers, backward_tiles, forward_tiles
from alpa_hpc.sharding.tiles import Exchange
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify.check import check_task
from alpa_hpc.verify.target import described_mesh
from tests.random_plans import NUM_LAYERS, Family, Plan, Variant, sgd_step

pytestmark = pytest.mark.slow

WIDTH = 16
SUMS = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER})
VARIANTS = [Variant(0, NUM_LAYERS, (1, 8), False, 4), Variant(0, NUM_LAYERS, (1, 8), False, 30), Variant(0, NUM_LAYERS, (2, 4), True, 50)]


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for one in params:
        read = jnp.sin(x)
        x = x + (jnp.tanh(read @ one["query"]) * jnp.tanh(read @ one["key"])) @ one["out"] + jnp.tanh(read @ one["up"]) @ one["down"]
    return jnp.mean(x)


def batch(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, WIDTH)).astype(np.float32)}


@cache
def family() -> Family:
    names = ("query", "key", "out", "up", "down")
    keys = iter(jax.random.split(jax.random.key(0), len(names) * NUM_LAYERS))
    params = [{name: 0.3 * jax.random.normal(next(keys), (WIDTH, WIDTH)) for name in names} for _ in range(NUM_LAYERS)]
    return Family(sgd_step(loss), {"params": params}, batch)


def exchanges(layers: Layers, *, gpu: bool) -> Counter[CollectiveKind]:
    tiles = (*forward_tiles(layers, gpu=gpu), *backward_tiles(layers, gpu=gpu))
    return Counter(step.lane.kind for one in tiles for step in one.steps if isinstance(step, Exchange))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gpus_exchange_sums_and_cpus_their_summands(variant: Variant):
    splits = [ChosenSplit(chosen, MeshShape(*variant.shape)) for chosen in family().stage(variant, 2).layers]
    fewer = exchanges(splits, gpu=False) - exchanges(splits, gpu=True)
    assert fewer[CollectiveKind.ALL_GATHER]
    assert not SUMS.isdisjoint(fewer)


@pytest.mark.gpu_code
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("variant", VARIANTS[1:], ids=str)
def test_gpu_code_exchanges_what_is_planned_to_the_byte(variant: Variant):
    whole, shape = family().assembly(Plan((variant,), 2)), MeshShape(*variant.shape)
    task = whole.tasks(0)["backward"]
    compiled = compile_task(task, described_mesh(CheckTarget.H100, Submesh(1, 8), shape))
    for lane in check_task(whole.step, whole.stages[0], whole.pipeline.stages[0], task, 0, compiled).lanes:
        assert lane.planned_bytes == lane.compiled_bytes, lane
