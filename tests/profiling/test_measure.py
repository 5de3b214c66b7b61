"""Timing gives one positive number a repeat, and more for more work."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_hpc.profiling.measure import WARM_UP_RUNS, time_function


@pytest.mark.parametrize("repeats", [1, 5])
def test_each_repeat_has_positive_seconds(repeats: int):
    timing = time_function(lambda x: jnp.tanh(x) @ x, (jnp.ones((32, 32)),), repeats)
    assert len(timing.seconds) == repeats
    assert min(timing.seconds) > 0 and timing.compile_seconds > 0


def test_a_repeat_ends_when_its_results_are_there():
    def products(x: jax.Array, count: int) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ x), x)

    few, many = (time_function(partial(products, count=count), (jnp.ones((256, 256)),), 3) for count in (1, 200))
    assert min(many.seconds) > 10 * min(few.seconds)


def test_the_function_is_compiled_once_and_warmed_up():
    traced: list[int] = []
    ran: list[int] = []

    def counted(x: jax.Array) -> jax.Array:
        traced.append(1)
        return jax.pure_callback(lambda y: (ran.append(1), y)[1], jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    time_function(counted, (jnp.ones(4),), 3)
    assert len(traced) == 1
    assert len(ran) == 3 + WARM_UP_RUNS
