"""Random strategies of operators that exchange more than sums of float32: code for CPUs exchanges what is planned, to the byte."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.verify.check import check_task
from tests.random_plans import NUM_LAYERS, Family, Plan, Variant, sgd_step

pytestmark = pytest.mark.slow

WIDTH = 8


def numbers(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def bools(params: Any, batch: Any) -> jax.Array:
    """Devices join whether any element, or all of a row, are so; a parameter has no elements."""
    x = jnp.tanh(batch["x"] @ params["enter"])
    x = jnp.where(jnp.any(x > 2, axis=1, keepdims=True) | jnp.all(x > 0), 0.5 * x, x)
    return jnp.mean((x @ params["leave"]) ** 2) + jnp.sum(params["none"] ** 2)


def largest(params: Any, batch: Any) -> jax.Array:
    """A maximum of all rows and columns."""
    x = jnp.tanh(batch["x"] @ params["enter"])
    return jnp.mean((x / lax.stop_gradient(jnp.max(jnp.abs(x))) @ params["leave"]) ** 2)


def halves(params: Any, batch: Any) -> jax.Array:
    """Products in bfloat16, which XLA for CPUs exchanges as float32."""
    x = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["enter"].astype(jnp.bfloat16))
    return jnp.mean((x @ params["leave"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


def factors(params: Any, batch: Any) -> jax.Array:
    """A system of equations is solved, which reads the system twice in JAX's words; a mask chooses between the same and the same."""
    x = batch["x"] @ params["enter"]
    squares = x[:, :, None] * x[:, None, :] + 4 * jnp.eye(WIDTH)
    x = x + jnp.linalg.solve(squares, x[..., None])[..., 0]
    x = jax.vmap(lambda row: lax.cond(row[0] > 0, lambda y: 2 * y, jnp.sin, row))(x)
    return jnp.mean((x @ params["leave"]) ** 2)


def loops(params: Any, batch: Any) -> jax.Array:
    """A loop makes a sum over rows that nobody reads."""
    x = jnp.tanh(batch["x"] @ params["enter"])
    _, sums = lax.scan(lambda total, time: (total + jnp.sum(x * time, 0), jnp.sum(x * time, 1)), jnp.zeros(WIDTH), jnp.arange(3.0))
    return jnp.mean(((x + sums.sum(0)[:, None]) @ params["leave"]) ** 2)


CASES = {"bools": (bools, 1), "largest": (largest, 16), "halves": (halves, 0), "factors": (factors, 3), "loops": (loops, 0)}


@cache
def family(name: str) -> Family:
    params = {"enter": numbers(WIDTH, WIDTH, seed=0), "leave": numbers(WIDTH, WIDTH, seed=1), "none": numbers(0, WIDTH, seed=2)}
    return Family(sgd_step(CASES[name][0]), {"params": params}, lambda rows: {"x": numbers(rows, WIDTH, seed=rows)})


@pytest.mark.parametrize("name", CASES)
def test_code_exchanges_what_is_planned_to_the_byte(name: str) -> None:
    variant = Variant(0, NUM_LAYERS, (2, 2), remat=False, seed=CASES[name][1])
    whole = family(name).assembly(Plan((variant,), 2))
    [stage], [io] = whole.stages, whole.pipeline.stages
    for task in map(whole.tasks(0).__getitem__, ("forward", "backward", "partials", "update")):
        lanes = check_task(whole.step, stage, io, task, 0, compile_task(task, variant.mesh)).lanes
        assert lanes or task.name == "update"
        assert [lane for lane in lanes if lane.planned_bytes != lane.compiled_bytes] == []
