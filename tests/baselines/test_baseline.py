"""Baselines are restrictions of one problem: each plan is of its kind and talks as it does, none is cheaper than the free optimum."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from alpa_hpc.baselines.baseline import Baseline, Inapplicable, baseline_restriction
from alpa_hpc.baselines.optimum import restricted_optimum
from alpa_hpc.baselines.restriction import FREE, Restriction
from alpa_hpc.cluster.hardware import DeviceSpec, Link, MeshShape
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.ir.grad import value_and_grad
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.models.gpt import GPT
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.wide_resnet import WideResNet
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.training.prepare import prepare
from tests.compiled import LINK, NO_COMPUTE, Planned, Traced, planned, prices_on, traced
from tests.planning import TRAINING

AR, AG, RS, A2A = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)
WORKING = DeviceSpec("slow", 1 << 40, 1e9, 1e9, 1e12, 1.0)
FLAT, GRID, LINE = MeshShape(4, 1), MeshShape(2, 2), MeshShape(1, 4)
MIXTURE = MoE(num_layers=2, hidden=32, num_heads=4, num_experts=4, vocab=64, sequence=8, group_size=8, mlp_factor=4, aux_weight=0.0)
MODELS = {
    "gpt": GPT(num_layers=2, hidden=32, num_heads=4, vocab=64, sequence=8),
    "moe": MIXTURE,
    "wide resnet": WideResNet(depth=14, channels=8, width=2, num_classes=8, image=32),
}


@cache
def model(name: str) -> Traced:
    made = prepare(MODELS[name], TRAINING, LayerOptions(num_layers=3, imbalance=1.0), num_microbatches=2)
    return Traced(made.traced, made.step)


@cache
def plan(name: str, baseline: Baseline, shape: MeshShape) -> Planned:
    return planned(model(name), shape, applied(name, baseline, shape), device=WORKING)


def applied(name: str, baseline: Baseline, shape: MeshShape) -> Restriction:
    found = baseline_restriction(baseline, model(name).step, shape)
    assert isinstance(found, Restriction), found
    return found


def params_of(made: Planned) -> dict[str, Spec]:
    names = made.step.state_names
    return {names[param].removeprefix("params/"): made.stage.param_spec(param) for param in made.assembly.pipeline.stages[0].params}


def gradient_bytes(made: Planned) -> int:
    """Of all gradients; those of two layers that read a parameter are added before they are exchanged."""
    params = {param for layer in made.step.layers for param in layer.params}
    return sum(4 * made.step.state_avals[param].size for param in params)


def axes_of(spec: Spec) -> set[int]:
    return {axis for dim in spec.dims for axis in dim}


# ---- each is what its name says


@pytest.mark.parametrize("name", ["gpt", "wide resnet"])
def test_data_parallelism_reduces_gradients_once_and_keeps_all_state_whole(name: str) -> None:
    made = plan(name, Baseline.DATA, FLAT)
    assert set(made.predicted["update"]) == {AR}
    assert 0.99 * gradient_bytes(made) <= made.predicted["update"][AR] <= gradient_bytes(made), (
        "a sum that BatchNorm needs comes for nothing"
    )
    assert not any(map(axes_of, params_of(made).values()))
    stored = [chosen.spec(leaf) for chosen in made.stage.layers for update in chosen.problem.updates for leaf in update.leaves]
    assert not any(map(axes_of, stored))


def test_data_parallelism_says_nothing_but_the_loss_before_the_update() -> None:
    made = plan("gpt", Baseline.DATA, FLAT)
    assert made.predicted["forward"] == {AR: 4}
    assert made.predicted["backward"] == {}


def test_zero_2_scatters_gradients_and_gathers_weights_once() -> None:
    made = plan("gpt", Baseline.ZERO_2, FLAT)
    assert made.predicted["update"][RS] == gradient_bytes(made)
    assert set(made.predicted["update"]) == {RS, AG}
    assert made.predicted["forward"] == {AR: 4} and made.predicted["backward"] == {}
    assert not any(map(axes_of, params_of(made).values()))
    stored = [chosen.spec(update.gradient) for chosen in made.stage.layers for update in chosen.problem.updates]
    assert stored and all(axes_of(spec) == {0} for spec in stored)


def test_zero_3_stores_matrices_split_and_gathers_them_for_each_use() -> None:
    made = plan("gpt", Baseline.ZERO_3, FLAT)
    specs = params_of(made)
    matrices = {name for name in specs if name.rpartition("/")[2] in ("qkv", "out", "up", "down", "embedding")}
    assert matrices and all(axes_of(specs[name]) == {0} for name in matrices)
    assert not any(axes_of(specs[name]) for name in specs.keys() - matrices), "vectors stay whole"
    whole = sum(4 * made.step.state_avals[made.step.state_names.index(f"params/{name}")].size for name in matrices)
    assert made.predicted["forward"][AG] >= whole
    assert set(made.predicted["forward"]) <= {AG, AR} and made.predicted["forward"][AR] == 4


@pytest.mark.parametrize("shape", [GRID, LINE])
def test_tensor_parallelism_splits_columns_then_rows(shape: MeshShape) -> None:
    made = plan("gpt", Baseline.TENSOR, shape)
    specs = params_of(made)
    assert specs["blocks/0/qkv"].dims == ((), (), (1,), ())
    assert specs["blocks/0/out"].dims == ((1,), (), ())
    assert specs["blocks/1/up"].dims == ((), (1,))
    assert specs["blocks/1/down"].dims == ((1,), ())
    assert specs["embedding"].dims == ((1,), ())
    assert RS not in made.predicted["forward"] and A2A not in made.predicted["forward"]


@pytest.mark.parametrize("shape", [GRID, LINE])
def test_sequence_parallelism_scatters_and_gathers_where_tensor_parallelism_reduces(shape: MeshShape) -> None:
    tensor, sequence = plan("gpt", Baseline.TENSOR, shape), plan("gpt", Baseline.SEQUENCE, shape)
    for chosen in sequence.stage.layers:
        for port in (*chosen.problem.inputs, *chosen.problem.cotangent_inputs):
            if len(chosen.spec(port.tensor).dims) == 3:
                assert 1 in chosen.spec(port.tensor).dims[1], "a value between blocks is split along its sequence"
    assert params_of(sequence)["blocks/0/qkv"] == params_of(tensor)["blocks/0/qkv"]
    assert sequence.predicted["forward"][RS] > 0
    assert sequence.predicted["forward"][AR] < tensor.predicted["forward"][AR]


def test_expert_parallelism_exchanges_tokens_and_splits_experts_alone() -> None:
    made = plan("moe", Baseline.EXPERT, FLAT)
    specs = params_of(made)
    assert specs["pairs/0/mixture/up"].dims == ((0,), (), ())
    assert specs["pairs/0/mixture/down"].dims == ((0,), (), ())
    assert not any(axes_of(spec) for name, spec in specs.items() if "mixture" not in name)
    assert not axes_of(specs["pairs/0/mixture/qkv"])
    sent = 4 * 4 * MIXTURE.capacity(8) * 8 * 32 // 4  # float32: experts x slots x groups x hidden, of one device
    assert made.predicted["forward"][A2A] == 2 * sent <= made.predicted["backward"][A2A]


def test_the_largest_dim_of_every_parameter_and_batch_input_is_split() -> None:
    made = plan("gpt", Baseline.LARGEST_DIM, FLAT)
    for name, spec in params_of(made).items():
        shape = made.step.state_avals[made.step.state_names.index(f"params/{name}")].shape
        divisible = [d for d, size in enumerate(shape) if size % 4 == 0]
        largest = max(divisible, key=lambda d: shape[d])
        assert spec.dims == tuple((0,) if d == largest else () for d in range(len(shape))), name


# ---- or says why it cannot be


@pytest.mark.parametrize(
    ("name", "baseline", "shape", "words"),
    [
        ("gpt", Baseline.EXPERT, FLAT, "no product of the model has a matrix for each of several experts"),
        ("moe", Baseline.EXPERT, MeshShape(8, 1), "there are 4 experts, expected a multiple of 8"),
        ("wide resnet", Baseline.SEQUENCE, GRID, "no value between layers has a token dim"),
        ("gpt", Baseline.TENSOR, FLAT, "axis 1 of the mesh, over which weights are split, has one device"),
        ("gpt", Baseline.TENSOR, MeshShape(1, 7), "no matrix has an inner dim that 7 devices divide"),
        ("gpt", Baseline.DATA, MeshShape(4, 4), "a microbatch has 8 rows, expected a multiple of 16"),
        ("gpt", Baseline.SEQUENCE, MeshShape(16, 2), "a microbatch has 8 rows, expected a multiple of 16"),
    ],
)
def test_a_baseline_that_cannot_be_says_why(name: str, baseline: Baseline, shape: MeshShape, words: str) -> None:
    found = baseline_restriction(baseline, model(name).step, shape)
    assert isinstance(found, Inapplicable)
    assert found.reason.startswith(f"{baseline.value}: ") and words in found.reason


# ---- the optimum over all strategies is at most the optimum over some


def dense_loss(sizes: tuple[int, ...], draw: random.Random) -> tuple[Any, Callable[[Any, Any], jax.Array], tuple[int, ...]]:
    activation = draw.choice((jnp.tanh, jax.nn.relu, jax.nn.gelu))
    norms = draw.random() < 0.5

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w, b in params:
            x = activation(x @ w + b)
            x = x - x.mean(-1, keepdims=True) if norms else x
        return jnp.mean(x**2)

    params = [(jnp.zeros((a, b)), jnp.zeros((b,))) for a, b in zip(sizes, sizes[1:], strict=False)]
    return params, loss, draw.choice(((4, sizes[0]), (8, 4, sizes[0]), (4, 8, sizes[0])))


def conv_loss(sizes: tuple[int, ...], draw: random.Random) -> tuple[Any, Callable[[Any, Any], jax.Array], tuple[int, ...]]:
    normalised = draw.random() < 0.5

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w, scale in params:
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu((x - x.mean((0, 1, 2))) * scale if normalised else x * scale)
        return jnp.mean(x**2)

    params = [(jnp.zeros((3, 3, a, b)), jnp.zeros((b,))) for a, b in zip(sizes, sizes[1:], strict=False)]
    return params, loss, (draw.choice((4, 8)), 4, 4, sizes[0])


def experts_loss(sizes: tuple[int, ...], draw: random.Random) -> tuple[Any, Callable[[Any, Any], jax.Array], tuple[int, ...]]:
    """A dense layer, then as many tokens to each of some experts, by their places."""
    experts, slots, (hidden, width) = draw.choice((2, 4, 8)), draw.choice((2, 4)), sizes[:2]

    def loss(params: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params["dense"])
        sent = x.reshape(x.shape[0], experts, slots, hidden)
        back = jnp.einsum("becw,ewh->bech", jax.nn.relu(jnp.einsum("bech,ehw->becw", sent, params["up"])), params["down"])
        return jnp.mean((x + back.reshape(x.shape)) ** 2)

    params = {
        "dense": jnp.zeros((hidden, hidden)),
        "up": jnp.zeros((experts, hidden, width)),
        "down": jnp.zeros((experts, width, hidden)),
    }
    return params, loss, (draw.choice((4, 8)), experts * slots, hidden)


def random_model(seed: int) -> Traced:
    draw = random.Random(seed)
    sizes = tuple(draw.choice((4, 6, 8, 16, 64)) for _ in range(draw.choice((3, 4))))
    params, loss, shape = (dense_loss, conv_loss, experts_loss)[seed % 3](sizes, draw)
    optimiser = draw.choice((optax.sgd(0.1), optax.adam(0.1)))

    def step(state: Any, batch: Any) -> Any:
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, inner = optimiser.update(gradients, state["optimiser"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimiser": inner}, {"loss": value}

    number = draw.choice((1, 2))
    batch = {"x": np.zeros((number * shape[0], *shape[1:]), np.float32)}
    state = {"params": params, "optimiser": optimiser.init(params)}
    return traced(step, state, batch, num_microbatches=number, num_layers=draw.choice((1, 2)))


SEEDS = range(15)


@cache
def compared(seed: int) -> tuple[str, ...]:
    """Compare a random model's free optimum with those of baselines, without and with a limit of memory; what was compared."""
    draw, made = random.Random(seed), random_model(seed)
    shape = draw.choice((FLAT, GRID, LINE))
    device = draw.choice((NO_COMPUTE, WORKING, replace(WORKING, flops_32bit=1e7)))
    prices = prices_on(shape, device, draw.choice((LINK, Link(1e6, 1e-6), Link(1e9, 1e-3))))
    free = restricted_optimum(made.step, prices, FREE, remat=False).solution
    restrictions = [found for one in Baseline if isinstance(found := baseline_restriction(one, made.step, shape), Restriction)]
    for restriction in restrictions:
        bound = restricted_optimum(made.step, prices, restriction, remat=False).solution
        assert free.lower_bound <= bound.objective * (1 + 1e-9), restriction.name
    limit, one = free.peak_bytes * draw.choice((0.8, 1.5)), draw.choice(restrictions)
    names = tuple(restriction.name for restriction in restrictions)
    try:
        bound = restricted_optimum(made.step, prices, one, remat=False, memory_limit=limit).solution
    except InfeasibleError:
        return (*names, "does not fit")
    best = restricted_optimum(made.step, prices, FREE, remat=False, memory_limit=limit).solution
    assert best.lower_bound <= bound.objective * (1 + 1e-9), one.name
    return (*names, "fits")


@pytest.mark.parametrize("seed", SEEDS)
def test_no_baseline_is_cheaper_than_the_free_optimum(seed: int) -> None:
    assert len(compared(seed)) > 3


def test_every_baseline_was_compared() -> None:
    seen = Counter(name for seed in SEEDS for name in compared(seed))
    assert min(seen[name] for name in (*(baseline.value for baseline in Baseline), "fits", "does not fit")) >= 2, seen
