"""Losses made of whatever operators there are: each is cut, split at random, run, and equals one device; what must run whole is named."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.replicated import replicated_share, replicated_work
from alpa_hpc.sharding.stage import StageSolver
from tests.random_plans import CLUSTER, NUM_LAYERS, Family, Plan, Variant, assert_equal, run_plan, sgd_step

SHAPES = [(2, 2), (4, 1)]
Loss = Callable[[Any, Any], jax.Array]


def numbers(*shape: int, seed: int = 0, scale: float = 0.5) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def image_loss(params: Any, batch: Any) -> jax.Array:
    """Plain, strided, depthwise and pointwise convolutions, batch norm, pooling by maximum and by mean."""
    x = batch["x"]
    x = lax.conv_general_dilated(x, params["first"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-3)
    x = jax.nn.relu(x)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    x = lax.conv_general_dilated(x, params["depth"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8)
    x = jnp.tanh(lax.conv_general_dilated(x, params["point"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    x = lax.reduce_window(x, 0.0, lax.add, (1, 4, 4, 1), (1, 4, 4, 1), "VALID")[:, 0, 0] / 16
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


IMAGE = {"first": numbers(3, 3, 4, 8), "depth": numbers(3, 3, 1, 8), "point": numbers(1, 1, 8, 16), "last": numbers(16, 4)}


def image_batch(rows: int) -> dict[str, np.ndarray]:
    return {"x": numbers(rows, 8, 8, 4, seed=rows), "y": numbers(rows, 4, seed=rows + 1)}


LONG = 300  # steps: more than are unrolled


def recurrent_loss(params: Any, batch: Any) -> jax.Array:
    """A recurrent net over a long time, between two dense layers."""
    x = jnp.tanh(batch["x"] @ params["enter"])

    def cell(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        hidden, memory = state
        gates = x @ params["input"] + hidden @ params["hidden"]
        keep, write, show = jnp.split(jax.nn.sigmoid(gates), 3, axis=-1)
        memory = keep * memory + write * jnp.tanh(x)
        return (show * jnp.tanh(memory), memory), hidden

    start = jnp.zeros((x.shape[0], 8)), jnp.ones((x.shape[0], 8))
    _, shown = lax.scan(cell, start, jnp.moveaxis(jnp.tile(x[:, None], (1, LONG, 1)), 1, 0))
    return jnp.mean((shown.mean(0) @ params["leave"] - batch["y"]) ** 2)


RECURRENT = {"enter": numbers(4, 8), "input": numbers(8, 24), "hidden": numbers(8, 24, seed=1), "leave": numbers(8, 2)}


def recurrent_batch(rows: int) -> dict[str, np.ndarray]:
    return {"x": numbers(rows, 4, seed=rows), "y": numbers(rows, 2, seed=rows + 1)}


def experts_loss(params: Any, batch: Any) -> jax.Array:
    """Top-2 gating with a capacity, dispatch to experts and back."""
    x = batch["x"]
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, params["gate"]))
    values, chosen = lax.top_k(gates, 2)
    place = jnp.cumsum(jax.nn.one_hot(chosen[..., 0], 4), axis=1)
    fits = jax.nn.one_hot(chosen[..., 0], 4)[..., None] * jax.nn.one_hot((place - 1).astype(jnp.int32), 4)
    combine = values[..., 0][..., None, None] * fits
    inside = jnp.einsum("gsec,gsm->egcm", fits, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inside, params["up"]))
    outside = jnp.einsum("egch,ehm->egcm", hidden, params["down"])
    y = x + jnp.einsum("gsec,egcm->gsm", combine, outside)
    y = y + jnp.take_along_axis(y, chosen, axis=2).sum(-1, keepdims=True)
    return jnp.mean((y @ params["last"] - batch["y"]) ** 2) + 0.01 * jnp.mean(gates.mean(1) ** 2)


EXPERTS = {"gate": numbers(8, 4), "up": numbers(4, 8, 16), "down": numbers(4, 16, 8, seed=1), "last": numbers(8, 2)}


def experts_batch(rows: int) -> dict[str, np.ndarray]:
    return {"x": numbers(rows, 8, 8, seed=rows), "y": numbers(rows, 8, 2, seed=rows + 1)}


USERS_MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def odd_loss(params: Any, batch: Any) -> jax.Array:
    """Loops, branches, a constraint, transforms, factorisations, sorting, drawing of numbers, and code that is no JAX at all."""
    x = jnp.tanh(batch["x"] @ params["enter"])
    x = lax.with_sharding_constraint(x, NamedSharding(USERS_MESH, P(None, "model")))  # pyright: ignore[reportArgumentType]
    x = lax.fori_loop(0, 3, lambda _, y: y * 0.5 + jnp.sin(y), x)
    x = lax.cond(params["enter"][0, 0] > 0, lambda y: y @ params["square"], lambda y: y - 1.0, x)
    x = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, x.shape), x, 0.1)
    x = x + jnp.sort(x, axis=0) * 0.1 + jnp.fft.fft(x, axis=1).real * 0.1
    factors = jnp.linalg.cholesky(x[:, :, None] * x[:, None, :] + 3.0 * jnp.eye(x.shape[1]))
    x = x + jnp.einsum("bij,bj->bi", factors, x)
    outside = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.stop_gradient(x), vmap_method="sequential")
    return jnp.mean(((x + outside) @ params["last"] - batch["y"]) ** 2)


ODD = {"enter": numbers(4, 8), "square": numbers(8, 8), "last": numbers(8, 2)}


def odd_batch(rows: int) -> dict[str, np.ndarray]:
    return {"x": numbers(rows, 4, seed=rows), "y": numbers(rows, 2, seed=rows + 1)}


def hollow_loss(params: Any, batch: Any) -> jax.Array:
    """Arrays without elements: a parameter, pieces of a scan by halves, what a gather takes, and what a product sums over."""
    x = jnp.tanh(batch["x"] @ params["enter"])
    x = lax.associative_scan(lambda left, right: 0.5 * left + right, x, axis=1)
    nothing = jnp.sin(x[:, :0]) @ params["square"]
    x = jnp.concatenate([nothing, x, x[:, jnp.zeros(0, int)]], axis=1)
    x = x + jnp.einsum("rtw,rtv->rwv", nothing, nothing).sum((1, 2))[:, None, None]
    return jnp.mean((x.mean(1) @ params["last"] - batch["y"]) ** 2) + jnp.sum(params["none"] ** 2)


HOLLOW = {"enter": numbers(4, 8), "square": numbers(8, 8), "last": numbers(8, 2), "none": numbers(0, 8)}


def hollow_batch(rows: int) -> dict[str, np.ndarray]:
    return {"x": numbers(rows, 4, 4, seed=rows), "y": numbers(rows, 2, seed=rows + 1)}


GRAPHS: dict[str, tuple[Loss, dict[str, np.ndarray], Callable[[int], dict[str, np.ndarray]]]] = {
    "image": (image_loss, IMAGE, image_batch),
    "recurrent": (recurrent_loss, RECURRENT, recurrent_batch),
    "experts": (experts_loss, EXPERTS, experts_batch),
    "odd": (odd_loss, ODD, odd_batch),
    "hollow": (hollow_loss, HOLLOW, hollow_batch),
}


@cache
def family(name: str) -> Family:
    loss, params, batch = GRAPHS[name]
    return Family(sgd_step(loss), {"params": jax.tree.map(jnp.asarray, params)}, batch)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_strategies_equal_one_device(name: str, shape: tuple[int, int]) -> None:
    seed = random.Random(name).randrange(1000)
    plan = Plan((Variant(0, NUM_LAYERS, shape, remat=shape[1] == 1, seed=seed),), 2)
    assert_equal(family(name), plan, run_plan(family(name), plan))


def solver(name: str, rows: int, cols: int) -> StageSolver:
    prices = MeshPrices(logical_mesh(CLUSTER, Submesh(2, 4), MeshShape(rows, cols)))
    return StageSolver(family(name).work(2).layered, prices, remat=False)


@pytest.mark.parametrize("name", ["image", "recurrent", "experts"])
def test_next_to_nothing_runs_whole(name: str) -> None:
    solved = solver(name, 2, 4)
    problems = [solved.problem(index) for index in range(NUM_LAYERS)]
    assert replicated_share(problems).flop <= 0.02, replicated_work(problems)


def test_what_runs_whole_is_named() -> None:
    solved = solver("odd", 2, 4)
    found = {work.primitive for work in replicated_work([solved.problem(index) for index in range(NUM_LAYERS)])}
    assert found == {"pure_callback"}


def test_a_users_constraint_says_which_dims_are_split() -> None:
    solved = solver("odd", 2, 4)
    kept = [
        record.plans
        for index in range(NUM_LAYERS)
        for program in (solved.problem(index).forward, solved.problem(index).backward)
        for eqn, record in zip(program.jaxpr.jaxpr.eqns, program.records, strict=True)
        if eqn.primitive.name == "sharding_constraint"
    ]
    assert kept, "the constraint is still there"
    assert all({tuple(map(bool, plan.raw[0].dims)) for plan in plans} == {(False, True)} for plans in kept)
