"""A dropout mask is drawn in pieces: each device draws what it needs of it, and keeps no more until the backward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.random_plans import NUM_LAYERS, Family, Variant, sgd_step

WIDTH, ROWS = 64, 32


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for number, weight in enumerate(params):
        key = jax.random.fold_in(batch["key"], number)
        x = x + jnp.where(jax.random.bernoulli(key, 0.9, x.shape), jnp.tanh(x @ weight), 0.0)
    return jnp.mean(x**2)


def batch(rows: int) -> dict[str, Any]:
    x = np.random.default_rng(rows).standard_normal((ROWS * rows, WIDTH)).astype(np.float32)
    return {"x": x, "key": jax.random.key(rows)}


def test_a_mask_lies_as_what_it_is_read_with():
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) for key in jax.random.split(jax.random.key(0), NUM_LAYERS)]
    family = Family(sgd_step(loss), {"params": weights}, batch)
    stage = family.stage(Variant(0, NUM_LAYERS, (4, 2), remat=False, seed=-1), 2)
    drawn = 0
    for chosen in stage.layers:
        program = chosen.problem.forward
        for eqn, record in zip(program.jaxpr.jaxpr.eqns, program.records, strict=True):
            if eqn.primitive.name == "random_bits":
                drawn += 1
                assert chosen.spec(record.results[0]).num_shards(stage.shape) == stage.shape.num_devices
    assert drawn == NUM_LAYERS
