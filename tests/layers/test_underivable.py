"""A loss that cannot be differentiated is refused with the operator and the user's line; one that can be is let pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.grad import value_and_grad
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.layers.layered import cut_layers

PARAMS = {name: jnp.eye(4) + 0.1 * number for number, name in enumerate("ab")}
BATCH = {"x": jnp.arange(32.0).reshape(8, 4) / 32}


def halved(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda y: jnp.sum(y**2) > 1.0, lambda y: 0.5 * y, x)  # a loop of unknown length


def counted(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, jnp.argmax(lax.stop_gradient(x[0])), lambda _, y: jnp.tanh(y), x)  # to a bound that is data


def called_back(x: jax.Array) -> jax.Array:
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # out of jax


def stepped(x: jax.Array) -> jax.Array:
    return jnp.nextafter(x, 2.0)  # without a rule


@jax.custom_vjp
def crooked(x: jax.Array) -> jax.Array:
    return 2.0 * x


crooked.defvjp(lambda x: (2.0 * x, x), lambda x, g: (g @ x[:2],))  # a rule with wrong shapes

LOOP = "through 'while' .*: a loop of unknown length keeps nothing for its backward pass. Use jax.lax.scan, or jax.lax.fori_loop"
REFUSED: dict[str, tuple[Callable[[jax.Array], jax.Array], str, str]] = {
    "while": (halved, LOOP, "a loop of unknown length"),
    "fori": (counted, LOOP, "to a bound that is data"),
    "callback": (called_back, "through 'pure_callback' .*: ValueError: Pure callbacks do not support JVP.* jax.custom_vjp", "out of jax"),
    "no rule": (stepped, "through 'nextafter' .*: NotImplementedError: Differentiation rule for 'nextafter'", "without a rule"),
    "bad rule": (crooked, "through 'custom_vjp_call' .*: ", "a rule with wrong shapes"),
}
AROUND: dict[str, Callable[[Callable[[jax.Array], jax.Array]], Callable[[jax.Array], jax.Array]]] = {
    "plain": lambda function: function,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda function: lambda x: lax.scan(lambda carry, _: (function(carry), None), x, None, length=300)[0],
    "cond": lambda function: lambda x: lax.cond(jnp.sum(x) > 0, function, jnp.sin, x),
}


def cut(loss: Callable[[Any, Any], jax.Array], num_layers: int = 1) -> None:
    def step(state: Any, batch: Any) -> Any:
        value, gradients = value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda x, g: x - 0.1 * g, state, gradients), {"loss": value}

    cut_layers(trace_step(step, PARAMS, BATCH, num_microbatches=2), num_layers=num_layers, imbalance=5.0)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_differentiated_is_named_with_its_line(name: str, around: str) -> None:
    function, message, line = REFUSED[name]

    def loss(params: Any, batch: Any) -> jax.Array:
        legal = lax.while_loop(lambda n: n < 5.0, lambda n: 2.0 * n, 1.0 + lax.stop_gradient(jnp.sum(params["a"])) ** 2)
        return legal * jnp.mean(AROUND[around](function)(batch["x"] @ params["a"]) @ params["b"])

    for num_layers in (1, 2):
        with pytest.raises(TraceError, match=message) as caught:
            cut(loss, num_layers)
        assert line in str(caught.value) and "test_underivable.py, line " in str(caught.value)
        assert caught.value.__context__ is not None, "the whole traceback is kept"


def test_loops_through_which_no_gradient_flows_pass() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        scale = jnp.sum(halved(lax.stop_gradient(params["a"]))) + jnp.sum(halved(batch["x"]))
        repeated = lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ params["b"]), batch["x"] @ params["a"])
        return jnp.mean(repeated) * scale

    cut(loss, 2)


def test_a_fault_of_ours_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[int]:
        raise AssertionError("ours")

    monkeypatch.setattr("alpa_hpc.layers.differentiate.eval_jaxpr", broken)
    with pytest.raises(AssertionError, match="ours"):
        cut(lambda params, batch: jnp.mean(batch["x"] @ params["a"]))
