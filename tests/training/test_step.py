"""The optimiser and the train step: they lower a loss, warm up, clip, and carry a key only for models that read it."""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_hpc.errors import TraceError
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.training.data import open_data
from alpa_hpc.training.optimiser import build_optimiser
from alpa_hpc.training.options import DataKind, DataOptions, OptimiserKind, ParamDtype, TrainingOptions
from alpa_hpc.training.prepare import prepare
from alpa_hpc.training.step import build_train_step

OPTIONS = TrainingOptions(
    optimiser=OptimiserKind.ADAMW, param_dtype=ParamDtype.FLOAT32,
    batch_size=8, num_steps=100, learning_rate=0.05, warmup_steps=0, weight_decay=0.0, clip_norm=0.0,
    seed=0, evaluate_every=0, evaluate_batches=1,
)  # fmt: skip


@dataclass(frozen=True)
class Regression:
    """Least squares, with dropout of the inputs if the rate is not 0."""

    rate: float = 0.0

    def init(self, key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (3, 1)), "b": jnp.zeros((1,))}

    def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
        x = batch["x"]
        if self.rate:
            x = jnp.where(jax.random.bernoulli(key, 1 - self.rate, x.shape), x, 0.0)
        return jnp.mean((x @ params["w"] + params["b"] - batch["y"]) ** 2)

    def batch(self, batch_size: int) -> Any:
        return {"x": jax.ShapeDtypeStruct((batch_size, 3), jnp.float32), "y": jax.ShapeDtypeStruct((batch_size, 1), jnp.float32)}


def example(rows: int = 8) -> Any:
    x = np.random.default_rng(0).standard_normal((rows, 3), dtype=np.float32)
    return {"x": x, "y": x @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 0.3}


def updates(options: TrainingOptions, gradients: Any, params: Any, steps: int = 1) -> Any:
    optimiser = build_optimiser(options)
    state, last = optimiser.init(params), gradients
    for _ in range(steps):
        last, state = optimiser.update(gradients, state, params)
    return last


SGD = replace(OPTIONS, optimiser=OptimiserKind.SGD)
ADAFACTOR = replace(OPTIONS, optimiser=OptimiserKind.ADAFACTOR)


@pytest.mark.parametrize("options", [OPTIONS, replace(OPTIONS, warmup_steps=10, weight_decay=1e-4, clip_norm=5.0), SGD, ADAFACTOR])
def test_training_lowers_a_quadratic(options: TrainingOptions) -> None:
    train = build_train_step(Regression(), build_optimiser(options))
    state, step = train.init(jax.random.key(0)), jax.jit(train.step)
    losses = []
    for _ in range(200):
        state, metrics = step(state, example())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 1e-3 * losses[0]
    assert int(state["step"]) == 200


def test_warm_up_rises_in_equal_steps_to_the_rate_and_stays() -> None:
    params = gradients = {"w": jnp.ones((2, 2))}
    options = replace(OPTIONS, warmup_steps=4, learning_rate=0.4)
    sizes = [-float(updates(options, gradients, params, steps)["w"][0, 0]) for steps in (1, 2, 4, 9)]
    np.testing.assert_allclose(sizes, [0.1, 0.2, 0.4, 0.4], rtol=1e-4)
    one = -float(updates(replace(options, warmup_steps=1), gradients, params)["w"][0, 0])
    np.testing.assert_allclose(one, 0.4, rtol=1e-4)


def test_clipping_scales_large_gradients_and_leaves_small_ones() -> None:
    params = {"a": jnp.zeros((2,)), "b": jnp.zeros((2, 2))}
    clip = replace(OPTIONS, clip_norm=1.0)
    for size in (1e-3, 30.0):
        gradients = jax.tree.map(lambda leaf, size=size: size * jnp.ones_like(leaf), params)
        norm = size * np.sqrt(6)
        expected = jax.tree.map(lambda leaf, norm=norm: leaf * min(1.0, 1.0 / norm), gradients)
        optimiser = build_optimiser(clip)
        _, state = optimiser.update(gradients, optimiser.init(params), params)
        moments = [leaf for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))]
        for moment, leaf in zip(moments, jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(moment, 0.1 * leaf, rtol=1e-5)
    zero = updates(clip, jax.tree.map(jnp.zeros_like, params), params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(zero)), "a zero gradient must not become 0/0"


@pytest.mark.parametrize("options", [OPTIONS, ADAFACTOR], ids=["adamw", "adafactor"])
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_only_matrices_decay_and_as_a_part_of_the_rate(options: TrainingOptions, warmup_steps: int) -> None:
    params = {"scale": jnp.ones((4,)), "w": jnp.ones((4, 4))}
    change = updates(replace(options, weight_decay=0.1, warmup_steps=warmup_steps), jax.tree.map(jnp.zeros_like, params), params)
    np.testing.assert_allclose(change["scale"], 0.0)
    np.testing.assert_allclose(change["w"], -0.05 / max(warmup_steps, 1) * 0.1, rtol=1e-5)


def test_sgd_is_nesterovs_with_decay_in_the_gradient() -> None:
    options = replace(SGD, learning_rate=0.1, weight_decay=0.01)
    optimiser, draw = build_optimiser(options), np.random.default_rng(0)
    params = {"scale": draw.normal(size=4), "w": draw.normal(size=(4, 4))}
    state = optimiser.init(jax.tree.map(jnp.asarray, params))
    velocity = {name: np.zeros_like(leaf) for name, leaf in params.items()}
    for _ in range(4):
        gradients = {name: draw.normal(size=leaf.shape) for name, leaf in params.items()}
        found, state = optimiser.update(jax.tree.map(jnp.asarray, gradients), state, jax.tree.map(jnp.asarray, params))
        change = cast(dict[str, Any], found)
        for name, decay in (("scale", 0.0), ("w", 0.01)):
            gradient = gradients[name] + decay * params[name]
            velocity[name] = 0.9 * velocity[name] + gradient
            np.testing.assert_allclose(change[name], -0.1 * (gradient + 0.9 * velocity[name]), rtol=1e-4, atol=1e-6)
            params[name] = params[name] + np.asarray(change[name], np.float64)


def test_metrics_are_those_of_plain_jax() -> None:
    model, batch = Regression(), example()
    train = build_train_step(model, build_optimiser(OPTIONS))
    state = train.init(jax.random.key(1))
    new, metrics = train.step(state, batch)
    loss, gradients = jax.value_and_grad(model.loss)(state["params"], batch, jax.random.key(0))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradients), rtol=1e-6)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), new) == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)


def test_only_a_model_that_reads_its_key_has_one_in_its_state() -> None:
    optimiser = build_optimiser(OPTIONS)
    assert "key" not in build_train_step(Regression(), optimiser).init(jax.random.key(0))
    train = build_train_step(Regression(rate=0.5), optimiser)
    state = train.init(jax.random.key(0))
    assert state["key"].dtype == jnp.uint32
    assert all(leaf.dtype in (jnp.float32, jnp.int32, jnp.uint32) for leaf in jax.tree.leaves(state)), "plain arrays only"


def test_dropout_differs_by_step_and_repeats_from_the_same_state() -> None:
    train = build_train_step(Regression(rate=0.5), build_optimiser(replace(OPTIONS, learning_rate=1e-12)))
    state, step = train.init(jax.random.key(0)), jax.jit(train.step)
    first, metrics = step(state, example())
    assert step(state, example())[1]["loss"] == metrics["loss"]
    assert step(first, example())[1]["loss"] != metrics["loss"]


class BadInit(Regression):
    def init(self, key: jax.Array) -> Any:
        raise ValueError("a bug\nof the user")


class BadLoss(Regression):
    def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
        raise ValueError("a bug\nof the user")


class BadBatch(Regression):
    def batch(self, batch_size: int) -> Any:
        raise ValueError("a bug\nof the user")


class Untrainable(Regression):
    def init(self, key: jax.Array) -> Any:
        return {**super().init(key), "count": jnp.zeros((3,), jnp.int32)}


class Shapeless(Regression):
    def batch(self, batch_size: int) -> Any:
        return {"x": (batch_size, 3)}


class Nothing(Regression):
    def init(self, key: jax.Array) -> Any:
        return {}


class Negative(Regression):
    def init(self, key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (-3, 1))}


class Fractions(Regression):
    def batch(self, batch_size: int) -> Any:
        return {**super().batch(batch_size), "y": jax.ShapeDtypeStruct((batch_size, 0.5), jnp.float32)}  # pyright: ignore[reportArgumentType]


class Keys(Regression):
    def batch(self, batch_size: int) -> Any:
        return {**super().batch(batch_size), "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))}


class Empty(Regression):
    def batch(self, batch_size: int) -> Any:
        return None


class Doubled(Regression):
    def batch(self, batch_size: int) -> Any:
        return {**super().batch(batch_size), "y": jax.ShapeDtypeStruct((2 * batch_size, 1), jnp.float32)}


class Numbers(Regression):
    def init(self, key: jax.Array) -> Any:
        return {"w": np.ones((3, 1), np.float32), "b": 0.5}


class OneRow(Regression):
    def batch(self, batch_size: int) -> Any:
        return super().batch(1)


class FourRows(Regression):
    def batch(self, batch_size: int) -> Any:
        return super().batch(4)


@pytest.mark.parametrize(("model", "method"), [(BadInit(), "init"), (BadLoss(), "loss"), (BadBatch(), "batch")])
def test_a_fault_of_the_users_own_method_is_named_with_its_line(model: Regression, method: str) -> None:
    with pytest.raises(TraceError, match=rf"^the model's {method} raises ValueError: a bug \(.*test_step\.py, line \d+: raise Val.*\)$"):
        build_train_step(model, build_optimiser(OPTIONS))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Untrainable(), "parameter 'count' of dtype int32, expected a floating one"),
        (Nothing(), "init gives {}, expected a pytree of arrays"),
        (Negative(), r"parameter 'w' of shape \[-3, 1\], expected sizes >= 0"),
    ],
)
def test_a_parameter_that_cannot_be_trained_is_named(model: Regression, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        build_train_step(model, build_optimiser(OPTIONS))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Shapeless(), r"batch gives .*, expected a pytree of jax\.ShapeDtypeStruct"),
        (Empty(), r"batch gives None, expected a pytree of jax\.ShapeDtypeStruct"),
        (Fractions(), r"shape \(1, 0\.5\), expected whole numbers"),
        (Keys(), "array of key<fry>, expected numbers"),
        (Doubled(), r"batch\(1\) has 1 and 2 rows, expected 1"),
        (FourRows(), r"batch\(1\) has 4 rows, expected 1"),
        (BadBatch(), r"the model's batch raises ValueError: a bug \("),
    ],
)
def test_a_batch_that_is_none_is_refused_wherever_it_is_asked_for(model: Regression, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        build_train_step(model, build_optimiser(OPTIONS))
    with pytest.raises(TraceError, match=message):
        open_data(DataOptions(kind=DataKind.SYNTHETIC, path="", held_out_fraction=0.0), model, 0)


def test_parameters_may_be_numbers_and_numpy_arrays() -> None:
    train = build_train_step(Numbers(), build_optimiser(OPTIONS))
    _, metrics = train.step(train.init(jax.random.key(0)), example())
    assert np.isfinite(metrics["loss"])


def test_a_batch_of_another_size_than_asked_for_is_refused() -> None:
    with pytest.raises(TraceError, match=r"batch\(8\) has 1 rows, expected 8"):
        prepare(OneRow(), OPTIONS, LayerOptions(num_layers=1, imbalance=0.5), 2)
