"""A state is any pytree: what is no array stays in it, keys too, and a number is an array only where the step changes it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.grad import AuxKind, tracing, value_and_grad
from alpa_hpc.ir.reference import reference_step
from alpa_hpc.ir.trace import trace_step

BATCH = {"x": jnp.arange(8.0).reshape(4, 2)}


def state() -> dict[str, Any]:
    model = {"w": jnp.ones(2), "activation": jnp.tanh, "rate": 0.0, "rows": jnp.asarray(2), "training": True, "none": None}
    return {"model": model, "steps": 3, "key": jax.random.key(1, impl="rbg"), "raw": jax.random.PRNGKey(2)}


def loss(model: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"] if model["rate"] == 0 and model["training"] else jnp.nan * batch["x"]
    return jnp.mean(model["activation"](x @ model["w"])) * model["rows"]


def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    value, gradient = value_and_grad(loss)(state["model"], batch)
    model = {**state["model"], "w": state["model"]["w"] - gradient["w"]}
    key, _ = jax.random.split(state["key"])
    return {**state, "model": model, "steps": state["steps"] + 1, "key": key}, {"loss": value, "rate": jnp.asarray(model["rate"])}


def test_a_step_sees_its_state_as_it_was_given() -> None:
    traced = trace_step(step, state(), BATCH, num_microbatches=1)
    assert set(traced.state_names) == {"model/w", "model/rows", "steps", "key", "raw"}
    found, metrics = reference_step(traced, state(), BATCH)
    expected, expected_metrics = step(state(), BATCH)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert (found["model"]["activation"], found["model"]["rate"], found["model"]["training"]) == (jnp.tanh, 0.0, True)
    assert jax.random.key_impl(found["key"]) == "rbg"
    for one, other in ((found["key"], expected["key"]), (found["raw"], expected["raw"])):
        assert np.array_equal(jax.random.key_data(one), jax.random.key_data(other))
    assert int(found["steps"]) == 4
    np.testing.assert_allclose(found["model"]["w"], expected["model"]["w"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)


def test_numbers_are_arrays_for_a_step_that_wants_arrays() -> None:
    def as_arrays(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        value, gradient = value_and_grad(lambda w: jnp.mean(batch["x"] @ w))(state["w"])
        return {"w": state["w"] - gradient, "rate": state["rate"].astype(jnp.float32)}, {"loss": value}

    traced = trace_step(as_arrays, {"w": jnp.ones(2), "rate": 0.5}, BATCH, num_microbatches=2)
    assert traced.state_names == ("rate", "w")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "another function": (lambda model: {**model, "activation": jnp.sin}, "model/activation' is .*must stay as it is"),
    "an array": (lambda model: {**model, "activation": model["w"]}, "model/activation' is .*must stay as it is"),
    "another structure": (lambda model: {"w": model["w"]}, "must have the structure"),
    "another shape": (lambda model: {**model, "w": jnp.ones(3)}, "'model/w' changes"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_no_array_must_stay(name: str) -> None:
    change, text = CHANGES[name]

    def changing(state: dict[str, Any], batch: Any) -> Any:
        new_state, metrics = step(state, batch)
        return {**new_state, "model": change(new_state["model"])}, metrics

    with pytest.raises(TraceError, match=text):
        trace_step(changing, state(), BATCH, num_microbatches=1)


def test_what_has_no_gradient_gets_none() -> None:
    value, gradient = value_and_grad(loss)(state()["model"], BATCH)
    with tracing():
        _, shapes = jax.eval_shape(lambda w: value_and_grad(loss)({**state()["model"], "w": w}, BATCH), jnp.ones(2))
    assert jax.tree.structure(gradient) == jax.tree.structure(shapes) == jax.tree.structure({**dict.fromkeys(gradient), "w": 0})
    expected = jax.value_and_grad(lambda w: loss({**state()["model"], "w": w}, BATCH))(jnp.ones(2))
    np.testing.assert_allclose(value, expected[0])
    np.testing.assert_allclose(gradient["w"], expected[1])
    assert value_and_grad(jnp.sin)(0.5)[1] == jax.grad(jnp.sin)(0.5), "a number by itself is a parameter"


def test_keys_pass_in_and_out_of_the_loss() -> None:
    """One for all rows, one for each row, and one that the loss hands back, as modules that count what they drew do."""

    def noisy(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(batch["keys"])
        drawn = jax.random.normal(batch["key"])
        return jnp.mean((batch["x"] + noise) @ w) + drawn * w[0], jax.random.fold_in(batch["key"], 7)

    def noisy_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        (value, key), gradient = value_and_grad(noisy, has_aux=True, aux=AuxKind.LAST)(state["w"], batch)
        return {"w": state["w"] - gradient, "key": key}, {"loss": value}

    keys = jax.random.split(jax.random.key(3), 4)
    batch, before = {**BATCH, "key": jax.random.key(4), "keys": keys}, {"w": jnp.ones(2), "key": jax.random.key(0)}
    traced = trace_step(noisy_step, before, batch, num_microbatches=2)
    found, _ = reference_step(traced, before, batch)
    gradients: list[jax.Array] = []
    for number in (0, 1):
        rows = slice(2 * number, 2 * number + 2)
        part = {"x": batch["x"][rows], "keys": keys[rows], "key": jax.random.fold_in(batch["key"], number)}
        (_, last), gradient = jax.value_and_grad(noisy, has_aux=True)(before["w"], part)
        gradients.append(gradient)
    np.testing.assert_allclose(found["w"], before["w"] - (gradients[0] + gradients[1]) / 2, rtol=1e-5)
    assert np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(last))


def test_keys_cannot_be_added_up() -> None:
    def adding(state: jax.Array, batch: dict[str, jax.Array]) -> Any:
        loss = value_and_grad(lambda w: (jnp.mean(batch["x"] @ w), jax.random.key(0)), has_aux=True, aux=AuxKind.SUM)
        return state - loss(state)[1], {}

    with pytest.raises(TraceError, match="keys cannot be added up"):
        trace_step(adding, jnp.ones(2), BATCH, num_microbatches=1)


def test_a_raw_key_in_the_batch_is_told_from_rows() -> None:
    with pytest.raises(TraceError, match="If 'key' is a PRNG key, make it by jax.random.key instead"):
        trace_step(step, state(), {**BATCH, "key": jax.random.PRNGKey(0)}, num_microbatches=1)
