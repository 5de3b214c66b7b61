"""What a user's function raises is told with the user's own line, whoever called and whatever lies between."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from alpa_hpc.errors import ConfigError, TraceError
from alpa_hpc.ir.faults import calling_place, faults_of, place_of_equation
from alpa_hpc.models.gpt import GPT

HERE = "test_faults.py, line "


def product(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x[:2])  # wrong shapes


def look_up(x: jax.Array) -> jax.Array:
    return {"a": x}["b"]


def decide(x: jax.Array) -> jax.Array:
    return x if x[0, 0] > 0 else -x


FAULTS = {
    "raises TypeError: dot_general requires .*: return jnp.tanh(x @ x[:2])  # wrong shapes": product,
    "raises KeyError: 'b' .*: return {.a.: x}": look_up,
    "raises TracerBoolConversionError: Attempted boolean conversion .*: return x if x": decide,
}


@pytest.mark.parametrize("message", FAULTS)
@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.vmap(lambda _, x: f(x), (0, None)))])
def test_the_line_is_the_users(message: str, wrapped) -> None:
    function = FAULTS[message]
    arguments = (jnp.ones((3, 3)),)
    with pytest.raises(TraceError) as caught, faults_of("the loss"):
        jax.make_jaxpr(jax.jit(lambda x: jax.tree.map(function, x)))(arguments)
    assert str(caught.value).startswith("the loss " + message.partition(" .*")[0].partition(":")[0])
    assert HERE in str(caught.value)
    assert type(caught.value.__cause__).__name__ in message


def test_errors_of_ours_and_interrupts_pass() -> None:
    with pytest.raises(ConfigError, match="^as it is$"), faults_of("the loss"):
        raise ConfigError("as it is")
    with pytest.raises(KeyboardInterrupt), faults_of("the loss"):
        raise KeyboardInterrupt


def test_a_model_of_ours_counts_as_the_users() -> None:
    model = GPT(num_layers=1, hidden=16, num_heads=4, vocab=32, sequence=8)
    params = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(TraceError, match=r"models.gpt\.py, line \d+: "), faults_of("the loss"):
        jax.eval_shape(model.loss, params, {}, jax.random.key(0))


def test_a_fault_without_a_line_of_the_users_is_told_without() -> None:
    with pytest.raises(TraceError) as caught:
        exec(compile("with faults_of('it'):\n    raise ValueError('bare')", jax.__file__, "exec"), {"faults_of": faults_of})  # noqa: S102
    assert str(caught.value) == "it raises ValueError: bare"


def test_a_library_in_between_is_not_the_users() -> None:
    def schedule(step: Any) -> Any:
        return step.no_such_attribute

    state = optax.sgd(schedule).init(jnp.ones(3))
    with pytest.raises(TraceError, match=r"AttributeError: .*test_faults\.py, line \d+: return step\.no_such_attribute"), faults_of("it"):
        jax.eval_shape(optax.sgd(schedule).update, jnp.ones(3), state)
    with pytest.raises(TraceError, match=r"test_faults\.py, line \d+: optax\.adam\(0\.1\)\.update"), faults_of("it"):
        optax.adam(0.1).update(jnp.ones(3), optax.EmptyState())


def test_the_line_of_a_call_and_of_an_equation() -> None:
    assert f"{HERE}{sys._getframe().f_lineno}: assert f" in calling_place()
    closed = jax.make_jaxpr(lambda x: x + jnp.sin(x))(1.0)  # sin is made here
    assert place_of_equation(closed.jaxpr.eqns[0]).endswith("# sin is made here)")
