"""Gradients of weights that are read at every step, as parts of one: the sum over devices waits until the iteration ends."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.splits import ChosenSplit
from alpa_hpc.sharding.task_tiles import backward_tiles
from alpa_hpc.sharding.tiles import Exchange
from tests.random_plans import NUM_LAYERS, Family, Variant, sgd_step

WIDTH, STEPS, ROWS = 8, 6, 64


def loss(params: Any, batch: Any) -> jax.Array:
    """A recurrent net whose two gates are one product, as LSTMs have them."""
    state = batch["x"]
    for _ in range(STEPS):
        gate, change = jnp.split(state @ jnp.concatenate([params["gate"], params["change"]], axis=1), 2, axis=1)
        state = state + jax.nn.sigmoid(gate) * jnp.tanh(change)
    return jnp.mean(state**2)


def batch(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(rows).standard_normal((ROWS * rows, WIDTH)).astype(np.float32)}


def test_no_gradient_is_summed_at_every_step():
    weights = jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH))
    family = Family(sgd_step(loss), {"params": {"gate": weights[0], "change": weights[1]}}, batch)
    shape = MeshShape(4, 1)
    stage = family.stage(Variant(0, NUM_LAYERS, shape.sizes, remat=False, seed=-1), 8)
    tiles = backward_tiles([ChosenSplit(chosen, shape) for chosen in stage.layers], gpu=False)
    exchanged = [step.lane.kind for one in tiles for step in one.steps if isinstance(step, Exchange)]
    assert not {CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER}.intersection(exchanged)
    gradients = [chosen.spec(tensor) for chosen in stage.layers for tensor in chosen.problem.gradients]
    assert any(spec.partial for spec in gradients)
