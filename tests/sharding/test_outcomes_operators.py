"""More small steps with known answers: experts, convolutions, lookups, random masks, factored optimisers; see `test_outcomes.py`."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

from alpa_hpc.baselines.baseline import Baseline
from alpa_hpc.cluster import collectives
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.grad import value_and_grad
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.transformer import layer_norm
from alpa_hpc.runtime.assemble import place_state
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.spec import Spec
from tests.compiled import LINK, PRODUCTS, Traced, assert_compiles_as_planned, planned, traced
from tests.sharding.operators import Trial, all_plans, check, floats, only_equation
from tests.sharding.test_outcomes import LOSS, dense, dense_params, reduced, restricted, sizes_of, step_of

FLAT, LINE = MeshShape(4, 1), MeshShape(1, 4)
AR, AG, RS, A2A = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL


# ---- experts

BATCH, LENGTH, HIDDEN, EXPERTS = 64, 16, 64, 16
MIXTURE = MoE(2, HIDDEN, 16, EXPERTS, vocab=8, sequence=LENGTH, group_size=32, mlp_factor=8)


@cache
def mixture() -> Traced:
    """One mixture of experts behind a norm, its choices without a loss of their own."""
    pair = jax.eval_shape(MIXTURE.init, jax.random.key(0))["pairs"][0]["mixture"]
    names = ("norm2_scale", "norm2_bias", "gate", "up", "down")
    params = {name: jnp.zeros(pair[name].shape) for name in names}
    biases = {name: jnp.zeros(pair[name].shape) for name in ("up_bias", "down_bias")}

    def apply(block: Any, x: jax.Array) -> jax.Array:
        fed, _ = MIXTURE.experts({**block, **biases}, layer_norm(x, block["norm2_scale"], block["norm2_bias"]))
        return x + fed

    return step_of(apply, params, (BATCH, LENGTH, HIDDEN), optax.sgd(1e-2))


@pytest.mark.parametrize("shape", [FLAT, LINE])
def test_experts_are_reached_by_four_all_to_alls(shape: MeshShape) -> None:
    """Cost: each token's row to two experts and back, in both directions; and the sync of every gradient but those of the experts."""
    sent = 4 * BATCH * LENGTH * HIDDEN * 2
    expected = 4 * collectives.all_to_all(LINK, 4, float(sent)) + sum(map(reduced, (HIDDEN, HIDDEN, HIDDEN * EXPERTS))) + LOSS
    made = restricted(mixture(), Baseline.EXPERT, shape)
    assert made.communication == pytest.approx(expected, rel=1e-4)
    assert made.count("forward", "backward")[A2A] == 4
    assert made.traffic("forward", "backward")[A2A] == sent
    split = tuple(axis for axis in (0, 1) if shape.sizes[axis] > 1)
    assert [made.param(name) for name in ("up", "down", "gate")] == [Spec((split, (), ())), Spec((split, (), ())), Spec(((), ()))]
    assert_compiles_as_planned(made)
    assert planned(mixture(), shape).communication <= expected * (1 + 1e-4)


# ---- convolutions


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def batch_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    mean, square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(square - mean * mean + 1e-5) * scale + shift


def normed_convolutions(params: Any, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jax.nn.relu(batch_norm(conv(x, layer["kernel"], stride=2), layer["scale"], layer["shift"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    return x


def test_convolutions_of_many_images_are_data_parallel() -> None:
    """Cost: AR of every gradient, and of each BatchNorm's two means, forwards and backwards; one collective for both of them."""
    params = {f"{i}": {"kernel": jnp.zeros((3, 3, 4, 4)), "scale": jnp.ones((4,)), "shift": jnp.zeros((4,))} for i in range(3)}
    made = step_of(normed_convolutions, params, (16, 16, 16, 4), optax.sgd(1e-2, momentum=0.9))
    data = restricted(made, Baseline.DATA, FLAT)
    expected = sum(map(reduced, sizes_of(made))) + 3 * 4 * reduced(4) + LOSS
    assert data.communication <= expected * 1.05
    assert data.count("forward") == {AR: 3}
    assert set(data.traffic("backward", "update")) == {AR}
    assert_compiles_as_planned(data)
    assert planned(made, FLAT).communication <= expected * 1.05


def test_convolutions_of_many_channels_are_reduced_three_times() -> None:
    def apply(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params.values():
            x = jax.nn.relu(conv(x, kernel))
        return x

    made = step_of(apply, {f"{i}": jnp.zeros((3, 3, 256, 256)) for i in range(4)}, (8, 4, 4, 256), optax.sgd(1e-2))
    free = planned(made, LINE)
    assert free.communication <= 3 * reduced(8, 4, 4, 256) * (1 + 1e-3)
    assert_compiles_as_planned(free)


def test_a_depthwise_convolution_by_channels_and_a_pointwise_one_are_reduced_once() -> None:
    def apply(params: Any, x: jax.Array) -> jax.Array:
        return conv(jax.nn.relu(conv(x, params["depth"], groups=256)), params["point"])

    params = {"depth": jnp.zeros((3, 3, 1, 256)), "point": jnp.zeros((1, 1, 256, 256))}
    free = planned(step_of(apply, params, (8, 4, 4, 256), optax.sgd(1e-2)), LINE)
    assert free.communication <= reduced(8, 4, 4, 256) * (1 + 1e-3)
    assert_compiles_as_planned(free)


# ---- lookups, random masks, single operators


def test_an_mlp_behind_a_lookup_is_reduced_once() -> None:
    """The table by columns, the weights by rows: one AR of the result, and nothing backwards."""

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any, ids: jax.Array) -> jax.Array:
            return jnp.mean((params["table"][ids] @ params["w"]) ** 2)

        value, gradients = value_and_grad(loss)(state, batch["ids"])
        return jax.tree.map(lambda p, g: p - g, state, gradients), {"loss": value}

    params = {"table": jnp.zeros((256, 64)), "w": jnp.zeros((64, 64))}
    free = planned(traced(step, params, {"ids": np.zeros((32,), np.int32)}), LINE)
    assert free.communication <= reduced(32, 64) * (1 + 1e-3)
    assert_compiles_as_planned(free)


def test_masks_of_a_data_parallel_mlp_are_drawn_without_a_word() -> None:
    """Each device draws its own rows of the mask: one all-reduce, that of the gradients."""

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any, given: Any) -> jax.Array:
            x = given["x"] @ params["w"]
            kept = jax.random.bernoulli(given["key"], 0.5, x.shape)
            return jnp.mean((jnp.where(kept, 2 * x, 0) @ params["v"]) ** 2)

        value, gradients = value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - g, state, gradients), {"loss": value}

    params = {"w": jnp.zeros((32, 32)), "v": jnp.zeros((32, 32))}
    made = restricted(traced(step, params, {"x": np.zeros((256, 32), np.float32), "key": jax.random.key(0)}), Baseline.DATA, FLAT)
    assert made.communication == pytest.approx(2 * reduced(32, 32) + LOSS, rel=1e-4)
    assert made.count("forward", "backward", "update") == {AR: 1}
    assert_compiles_as_planned(made)


def test_state_that_only_changes_by_itself_is_split_and_stays_so() -> None:
    def step(state: Any, batch: Any) -> Any:
        value, gradient = value_and_grad(lambda x, b: jnp.sum(x * b))(state, batch["b"][0])
        return state + 1 - gradient, {"loss": value}

    memory_bound = replace(PRODUCTS, memory_bandwidth=1e8)
    made = planned(traced(step, jnp.zeros((128, 128)), {"b": np.zeros((1, 128, 128), np.float32)}), FLAT, device=memory_bound)
    (spec,) = [made.stage.param_spec(param) for param in made.assembly.pipeline.stages[0].params]
    assert spec.num_shards(FLAT) == 4
    assert made.count("forward", "backward", "update") == {}
    assert made.traffic("forward", "backward", "update") == {AR: 4}, "the loss"


SINGLE = {
    "argmax over rows": (lambda x: jnp.argmax(x, 0), (floats(144, 144),), ((144, 36),)),
    "reshape": (lambda x: x.reshape(8, 18), (floats(144),), ((36,),)),
    "vector by matrix": (
        lambda x, w: lax.dot_general(x, w, (((0,), (0,)), ((), ()))),
        (floats(128), floats(128, 256)),
        ((128,), (128, 64)),
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_an_operator_is_split_without_a_word(name: str) -> None:
    """Some strategy splits its last operand over all devices, leaves no sum to finish, and gives what one device does."""
    function, operands, tiles = SINGLE[name]
    eqn, values = only_equation(function, *operands)
    silent = [
        one
        for one in all_plans(eqn, FLAT)
        if not one.combined
        and not any(spec.partial for spec in (*one.raw, *one.operands))
        and tuple(spec.local_shape(x.shape, FLAT) for spec, x in zip(one.operands, values, strict=True)) == tiles
    ]
    assert len(silent) == 1
    check([Trial(eqn, values, silent)], FLAT)


# ---- optimisers


def test_a_factored_optimiser_is_split_like_another() -> None:
    """Adafactor keeps a row and a column for each matrix; whatever that costs, data parallelism with the same optimiser costs no less."""
    optimiser = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    made = step_of(dense, dense_params(32, 6), (256, 32), optimiser)
    scattered, whole = restricted(made, Baseline.ZERO_2, FLAT), restricted(made, Baseline.DATA, FLAT)
    assert whole.traffic("backward", "update") == {AR: 4 * sum(sizes_of(made))}
    assert planned(made, FLAT).communication <= min(whole.communication, scattered.communication) * (1 + 1e-6)
    assert scattered.traffic("backward", "update")[RS] == 4 * sum(sizes_of(made))


def test_state_is_placed_as_the_step_keeps_it() -> None:
    """Counters are whole; kernels and both of their moments are split, from the first step on."""
    params = {f"{i}": {"w": jnp.ones((16, 16)), "b": jnp.zeros((16,))} for i in range(2)}
    made = step_of(dense, params, (64, 16), optax.adam(1e-2))
    plan = restricted(made, Baseline.ZERO_3, FLAT)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("x", "y"))
    shapes = [np.zeros(aval.shape, aval.dtype) for aval in made.step.state_avals]
    placed = place_state(plan.assembly, 0, mesh, dict(enumerate(shapes)))
    local = {made.step.state_names[int(buffer.name.removeprefix("state."))]: x for buffer, x in placed.items()}
    tiles = {name: x.addressable_shards[0].data.size for name, x in local.items()}
    assert tiles["optimiser/0/count"] == 1
    assert [tiles[name] for name in ("params/0/w", "optimiser/0/mu/1/w", "optimiser/0/nu/0/w")] == [64, 64, 64]
