"""Small steps with known answers, on four devices: what a correct intra-operator pass decides (paper, section 4; the original's own tests).

Seconds are those of collectives alone, by our formulas. A plan of the original's is reproduced where a restriction names it; the free
optimum is never dearer than it, and what compiles is what was planned.
"""

import gc
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from alpa_hpc.baselines.baseline import Baseline, baseline_restriction
from alpa_hpc.baselines.restriction import BATCH_ON_AXIS_0, Restriction
from alpa_hpc.cluster import collectives
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.grad import value_and_grad
from alpa_hpc.ir.reference import reference_step
from alpa_hpc.runtime.session import in_process_session
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.spec import Spec
from tests.compiled import LINK, Planned, Traced, assert_compiles_as_planned, planned, traced

FLAT, GRID, LINE = MeshShape(4, 1), MeshShape(2, 2), MeshShape(1, 4)
AR, AG, RS, A2A = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL
LOSS = collectives.all_reduce(LINK, 4, 4.0)
Params = dict[str, jax.Array]


def reduced(*shape: int, size: int = 4) -> float:
    """Seconds to all-reduce a float32 tensor."""
    return collectives.all_reduce(LINK, size, 4.0 * prod(shape))


Apply = Callable[[Any, jax.Array], jax.Array]


def step_with(apply: Apply, optimiser: optax.GradientTransformation) -> Callable[[Any, Any], Any]:
    """A training step of mean squares of `apply(params, x)`."""

    def step(state: Any, batch: Any) -> Any:
        value, gradients = value_and_grad(lambda p, b: jnp.mean(jnp.square(apply(p, b["x"]))))(state["params"], batch)
        updates, inner = optimiser.update(gradients, state["optimiser"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimiser": inner}, {"loss": value}

    return step


def step_of(apply: Apply, params: Any, rows: tuple[int, ...], optimiser: optax.GradientTransformation, num_layers: int = 1) -> Traced:
    """The same, traced from shapes."""
    state = {"params": params, "optimiser": optimiser.init(params)}
    return traced(step_with(apply, optimiser), state, {"x": np.zeros(rows, np.float32)}, num_layers=num_layers)


def sizes_of(made: Traced) -> list[int]:
    return [made.step.state_avals[param].size for param in made.traced.params]


def restricted(made: Traced, baseline: Baseline, shape: MeshShape) -> Planned:
    found = baseline_restriction(baseline, made.step, shape)
    assert isinstance(found, Restriction), found
    return planned(made, shape, found)


def dense_params(width: int, layers: int) -> dict[str, Params]:
    return {f"{i}": {"w": jnp.zeros((width, width)), "b": jnp.zeros((width,))} for i in range(layers)}


def dense(params: dict[str, Params], x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x


@cache
def narrow() -> Traced:
    """Six dense layers of 32, a batch of 256: gradients are smaller than activations."""
    return step_of(dense, dense_params(32, 6), (256, 32), optax.adam(1e-2))


@cache
def wide(num_layers: int = 1) -> Traced:
    """Six dense layers of 256, a batch of 32: activations are smaller than weights."""
    return step_of(dense, dense_params(256, 6), (32, 256), optax.adam(1e-2), num_layers)


# ---- data parallelism


@pytest.mark.parametrize("shape", [FLAT, LINE])
def test_a_narrow_mlp_is_data_parallel(shape: MeshShape) -> None:
    """Cost: the sum over parameters of AR(4 |p|), and the loss; one all-reduce of gradients in all; all parameters whole."""
    expected = sum(map(reduced, sizes_of(narrow()))) + LOSS
    assert planned(narrow(), shape).communication <= expected * (1 + 1e-6)
    made = restricted(narrow(), Baseline.DATA, shape)
    assert made.communication == pytest.approx(expected, rel=1e-6)
    assert made.count("forward", "backward", "update") == {AR: 1}
    assert made.traffic("update") == {AR: 4 * sum(sizes_of(narrow()))}
    assert not any(axes for i in range(6) for leaf in "wb" for axes in made.param(f"{i}/{leaf}").dims)
    assert_compiles_as_planned(made)


def test_the_free_optimum_of_a_narrow_mlp_compiles_as_planned() -> None:
    made = planned(narrow(), FLAT)
    assert_compiles_as_planned(made)


@pytest.mark.parametrize("shape", [FLAT, GRID])
def test_forced_data_parallelism_of_a_wide_mlp_costs_an_all_reduce_of_all_gradients(shape: MeshShape) -> None:
    made = restricted(wide(), Baseline.DATA, shape)
    axes = [size for size in shape.sizes if size > 1]
    expected = sum(reduced(size, size=parts) for size in (*sizes_of(wide()), 1) for parts in axes)
    assert made.communication == pytest.approx(expected, rel=1e-4)
    moved = made.traffic("backward", "update")
    assert set(moved) == {AR}
    if shape == GRID:  # over both axes at once; what is summed over one of them already (a bias) takes two turns
        assert 4 * sum(sizes_of(wide())) <= moved[AR] <= 4.1 * sum(sizes_of(wide()))
    else:
        assert moved[AR] == 4 * sum(sizes_of(wide()))
        assert made.count("forward", "backward", "update") == {AR: 1}
    assert planned(wide(), shape).communication < 0.5 * expected
    assert_compiles_as_planned(made)


def test_zero_2_scatters_once_and_gathers_once_for_the_same_seconds() -> None:
    made = restricted(narrow(), Baseline.ZERO_2, FLAT)
    assert made.communication == pytest.approx(sum(map(reduced, sizes_of(narrow()))) + LOSS, rel=1e-6)
    assert made.traffic("backward", "update") == dict.fromkeys((RS, AG), 4 * sum(sizes_of(narrow())))
    for leaf in ("mu", "nu"):
        assert made.state(f"optimiser/0/{leaf}/0/w").num_shards(FLAT) == 4, "the optimiser's state is split"
    assert_compiles_as_planned(made)


def test_a_batch_forced_on_axis_0_is_data_parallel_there_and_model_parallel_without_it() -> None:
    rows = planned(narrow(), FLAT, BATCH_ON_AXIS_0)
    assert rows.communication <= (sum(map(reduced, sizes_of(narrow()))) + LOSS) * (1 + 1e-6)
    assert set(rows.traffic("forward")) == {AR}
    columns = planned(wide(), LINE, BATCH_ON_AXIS_0)
    assert columns.communication <= 5 * reduced(32, 256) * (1 + 1e-4)
    assert_compiles_as_planned(columns)


# ---- tensor parallelism


@pytest.mark.parametrize("shape", [FLAT, LINE])
def test_a_wide_mlp_is_model_parallel(shape: MeshShape) -> None:
    """Cost: five times AR(32 * 256 * 4): three products by rows forwards, two products by columns backwards."""
    made = planned(wide(), shape)
    assert made.communication <= 5 * reduced(32, 256) * (1 + 1e-4)
    assert all(made.param(f"{i}/w").num_shards(shape) == 4 for i in range(6))
    assert_compiles_as_planned(made)


def test_kernels_by_columns_then_rows_are_reduced_five_times() -> None:
    """The original's plan itself: even layers by columns, odd ones by rows; an all-reduce, or the two halves of one, each time."""
    made = restricted(wide(num_layers=3), Baseline.TENSOR, LINE)
    assert made.communication == pytest.approx(5 * reduced(32, 256), rel=1e-4)
    counts = made.count("forward", "backward")
    assert counts[AR] + counts[RS] == 5 and counts[RS] == counts[AG]
    assert made.count("update") == {}
    assert [made.param(f"{i}/w") for i in range(6)] == [Spec(((), (1,))), Spec(((1,), ()))] * 3
    assert_compiles_as_planned(made)


def bert_params(hidden: int, layers: int) -> dict[str, Params]:
    sizes = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden), "up": (hidden, 4 * hidden), "down": (4 * hidden, hidden)}
    layer = {name: jnp.zeros(size) for name, size in sizes.items()} | {f"{name}_bias": jnp.zeros(size[1:]) for name, size in sizes.items()}
    norms = {f"{name}{i}": jnp.ones((hidden,)) for name in ("scale", "shift") for i in (1, 2)}
    return {f"{i}": layer | norms for i in range(layers)}


def bert(heads: int) -> Callable[[Any, jax.Array], jax.Array]:
    """Encoder layers with a norm behind each residual sum, on activations [batch, sequence, hidden]."""

    def norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5) * scale + shift

    def attention(layer: Params, x: jax.Array) -> jax.Array:
        hidden = x.shape[-1]
        split = (heads, hidden // heads, 3)
        qkv = jnp.einsum("bsh,hndk->bsndk", x, layer["qkv"].reshape(hidden, *split)) + layer["qkv_bias"].reshape(split)
        q, k, v = (qkv[..., i] for i in range(3))
        scores = jnp.einsum("bsnd,btnd->bnst", q, k) / float(np.sqrt(hidden // heads))
        mixed = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores), v)
        return jnp.einsum("bsnd,ndh->bsh", mixed, layer["out"].reshape(heads, hidden // heads, hidden)) + layer["out_bias"]

    def apply(params: dict[str, Params], x: jax.Array) -> jax.Array:
        for layer in params.values():
            x = norm(x + attention(layer, x), layer["scale1"], layer["shift1"])
            wide = jax.nn.gelu(x @ layer["up"] + layer["up_bias"])
            x = norm(x + wide @ layer["down"] + layer["down_bias"], layer["scale2"], layer["shift2"])
        return x

    return apply


@cache
def encoder(hidden: int, batch: int, length: int) -> Traced:
    """Two encoder layers of 8 heads on given activations."""
    return step_of(bert(8), bert_params(hidden, 2), (batch, length, hidden), optax.adam(1e-2), num_layers=2)


def test_bert_of_many_tokens_is_data_parallel() -> None:
    made = restricted(encoder(32, 64, 64), Baseline.DATA, FLAT)
    expected = sum(map(reduced, sizes_of(encoder(32, 64, 64)))) + LOSS
    assert made.communication == pytest.approx(expected, rel=1e-3)
    assert made.traffic("backward", "update") == {AR: 4 * sum(sizes_of(encoder(32, 64, 64)))}
    assert planned(encoder(32, 64, 64), FLAT).communication <= expected * (1 + 1e-3)
    assert_compiles_as_planned(made)


def test_bert_of_few_tokens_is_reduced_seven_times() -> None:
    """Twice a layer in each direction, but for the input, which has no gradient."""
    made = restricted(encoder(128, 8, 8), Baseline.TENSOR, LINE)
    expected = 7 * reduced(8, 8, 128)
    assert made.communication == pytest.approx(expected, rel=1e-3)
    assert made.count("forward", "backward", "update") == {AR: 7}
    assert [made.param(f"1/{name}") for name in ("up", "down")] == [Spec(((), (1,))), Spec(((1,), ()))]
    assert_compiles_as_planned(made)
    assert planned(encoder(128, 8, 8), LINE).communication <= expected * (1 + 1e-3)


def test_a_batch_of_one_forced_on_an_axis_of_one_device_is_model_parallel() -> None:
    made = planned(encoder(128, 1, 8), LINE, BATCH_ON_AXIS_0)
    assert made.communication <= 7 * reduced(1, 8, 128) * (1 + 1e-3)
    assert_compiles_as_planned(made)


# ---- several microbatches


@pytest.mark.parametrize("baseline", [Baseline.DATA, Baseline.ZERO_2])
def test_gradients_of_two_microbatches_are_summed_once_and_train_as_one_device_does(baseline: Baseline) -> None:
    """No collective the size of a gradient in forward and backward; one all-reduce, or its two halves, in the update."""
    optimiser = optax.sgd(0.5)
    state = {"params": jax.tree.map(lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), dense_params(16, 2))}
    state["optimiser"] = optimiser.init(state["params"])
    batch = {"x": np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)}
    one = traced(step_with(dense, optimiser), state, batch, num_microbatches=2)
    made = restricted(one, baseline, LINE)
    assert made.count("forward", "backward") == {}
    assert set(made.count("update")) == ({AR} if baseline is Baseline.DATA else {RS, AG})
    leaves = dict(enumerate(map(np.asarray, jax.tree.leaves(state))))
    session = in_process_session(made.assembly, one.traced, [range(4)], leaves)
    session.train(batch)
    expected, _ = reference_step(one.traced, state, batch)
    for found, wanted, before in zip(session.whole_state().values(), jax.tree.leaves(expected), leaves.values(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=5e-4, atol=1e-6)
        assert not np.array_equal(wanted, before)


def test_a_session_that_is_let_go_leaves_nothing_on_the_devices() -> None:
    state = {"params": dense_params(8, 2), "optimiser": (optax.EmptyState(), optax.EmptyState())}
    batch = {"x": np.ones((8, 8), np.float32)}
    one = traced(step_with(dense, optax.sgd(0.5)), state, batch, num_microbatches=2)
    leaves = dict(enumerate(map(np.asarray, jax.tree.leaves(state))))
    made = restricted(one, Baseline.ZERO_2, FLAT)
    before = {id(x) for x in jax.live_arrays()}
    session = in_process_session(made.assembly, one.traced, [range(4)], leaves)
    for _ in range(2):
        session.train(batch)
    held = [x for x in jax.live_arrays() if id(x) not in before]
    assert len(held) == len(leaves), "the state, and nothing of an iteration"
    del held, session
    gc.collect()
    assert not [x for x in jax.live_arrays() if id(x) not in before]


# ---- a split that is given


def test_tiles_of_a_given_split_on_a_grid() -> None:
    """By rows over axis 0, by columns over axis 1, by both; and the rows of a microbatch, half of a batch of 64, over axis 0."""
    by_rows, by_columns = Spec(((0,), ())), Spec(((), (1,)))
    assert by_columns.local_shape((6, 4), GRID) == (6, 2)
    assert by_rows.local_shape((6, 4), GRID) == (3, 4)
    assert Spec(((0,), (1,))).local_shape((6, 4), GRID) == (3, 2)
    assert by_rows.local_shape((64 // 2, 6), GRID) == (16, 6)
