"""Random strategies of operators that exchange more than sums of float32: code for CPUs exchanges what is planned, to the byte."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.runtime.assemble import Assembly
from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.sharding.splits import ChosenSplit
from alpa_hpc.sharding.task_tiles import backward_tiles, forward_tiles
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify.check import LaneCheck, check_task
from alpa_hpc.verify.narrowed import sent_sizes
from alpa_hpc.verify.target import described_mesh
from tests.random_plans import NUM_LAYERS, Family, Plan, Variant, optax_step, sgd_step

pytestmark = pytest.mark.slow

WIDTH = 8
SHAPE = MeshShape(2, 2)
FROZEN_SEED = 0


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


def narrow(params: Any, batch: Any) -> jax.Array:
    """Float32 that becomes bfloat16 and float32 again: code for GPUs exchanges it where it is narrow."""
    x = jnp.tanh(batch["x"] @ params["enter"]).astype(jnp.bfloat16)
    return jnp.mean(((x * x).T.astype(jnp.float32).T @ params["leave"]) ** 2)


CASES = {
    "bools": (bools, 1),
    "largest": (largest, 16),
    "halves": (halves, 0),
    "factors": (factors, 3),
    "loops": (loops, 0),
    "narrow": (narrow, 4),
}


@cache
def family(name: str) -> Family:
    params = {"enter": numbers(WIDTH, WIDTH, seed=0), "leave": numbers(WIDTH, WIDTH, seed=1), "none": numbers(0, WIDTH, seed=2)}
    return Family(sgd_step(CASES[name][0]), {"params": params}, lambda rows: {"x": numbers(rows, WIDTH, seed=rows)})


def variant(name: str) -> Variant:
    return Variant(0, NUM_LAYERS, SHAPE.sizes, remat=False, seed=CASES[name][1])


@cache
def assembly(name: str) -> Assembly:
    return family(name).assembly(Plan((variant(name),), 2))


def surplus(name: str, task: str, mesh: Mesh) -> list[LaneCheck]:
    """The lanes of a task in which planned and compiled bytes differ."""
    whole = assembly(name)
    compiled = compile_task(whole.tasks(0)[task], mesh)
    lanes = check_task(whole.step, whole.stages[0], whole.pipeline.stages[0], whole.tasks(0)[task], 0, compiled).lanes
    assert lanes or task == "update"
    return [lane for lane in lanes if lane.planned_bytes != lane.compiled_bytes]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("task", ["forward", "backward", "partials", "update"])
def test_code_exchanges_what_is_planned_to_the_byte(name: str, task: str) -> None:
    assert surplus(name, task, variant(name).mesh) == []


def test_the_gradient_of_a_frozen_parameter_is_summed_for_nobody() -> None:
    params = {"enter": numbers(WIDTH, WIDTH, seed=0), "leave": numbers(WIDTH, WIDTH, seed=1)}
    kinds: dict[Any, optax.GradientTransformation] = {"trained": optax.sgd(1.0), "frozen": optax.set_to_zero()}
    optimiser = optax.multi_transform(kinds, {"enter": "frozen", "leave": "trained"})
    state = {"params": params, "optimiser": optimiser.init(params)}
    made = Family(optax_step(largest, optimiser), state, lambda rows: {"x": numbers(rows, WIDTH, seed=rows)})
    one = Variant(0, NUM_LAYERS, SHAPE.sizes, remat=False, seed=FROZEN_SEED)
    whole = made.assembly(Plan((one,), 2))
    task = whole.tasks(0)["update"]
    lanes = check_task(whole.step, whole.stages[0], whole.pipeline.stages[0], task, 0, compile_task(task, one.mesh)).lanes
    assert lanes
    assert [lane for lane in lanes if lane.planned_bytes != lane.compiled_bytes] == []


@pytest.mark.gpu_code
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"factors"}))  # of a factorisation's operands XLA for GPUs gathers one less
def test_gpu_code_exchanges_what_is_planned_to_the_byte(name: str) -> None:
    mesh = described_mesh(CheckTarget.H100, Submesh(1, SHAPE.num_devices), SHAPE)
    assert surplus(name, "forward", mesh) + surplus(name, "backward", mesh) == []


@pytest.mark.parametrize(("name", "sizes"), [("narrow", {(4, 2), (4, 4), (2, 2)}), ("halves", {(2, 2), (4, 4)}), ("largest", {(4, 4)})])
def test_on_gpus_what_is_widened_or_narrowed_is_sent_narrow(name: str, sizes: set[tuple[int, int]]) -> None:
    """Bytes an element of what collectives make, and of what they send."""
    splits = [ChosenSplit(chosen, SHAPE) for chosen in assembly(name).stages[0].layers]
    sent = {**sent_sizes(forward_tiles(splits)), **sent_sizes(backward_tiles(splits))}
    assert {(one.made.itemsize, size) for one, size in sent.items()} == sizes
