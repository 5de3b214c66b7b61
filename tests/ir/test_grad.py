"""Outside a trace `value_and_grad` is jax's own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from alpa_hpc.ir.grad import AuxKind, SumCount, loss_gradient_p, tracing, value_and_grad

PARAMS = {"a": jnp.arange(3.0), "b": jnp.asarray(2.0)}


def loss(params, x):
    return jnp.sum(jnp.sin(params["a"] * x) * params["b"])


def test_equals_jax_outside_a_trace():
    found, expected = value_and_grad(loss)(PARAMS, 3.0), jax.value_and_grad(loss)(PARAMS, 3.0)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    found = jax.jit(jax.vmap(value_and_grad(lambda p, x: (loss(p, x), x), has_aux=True), (None, 0)))(PARAMS, jnp.ones(2))
    assert found[0][0].shape == (2,) and found[1]["a"].shape == (2, 3)


def test_count_is_constant():
    def sum_count(p):
        return jnp.sum(p**2), jnp.sum(p)

    value, gradient = value_and_grad(sum_count, reduction=SumCount())(jnp.asarray([1.0, 2.0]))
    np.testing.assert_allclose(value, 5 / 3)
    np.testing.assert_allclose(gradient, [2 / 3, 4 / 3])


def test_the_equation_means_the_gradient():
    def grad(params, x):
        return value_and_grad(lambda p: (loss(p, x), {"double": 2 * x}), has_aux=True, aux=AuxKind.LAST)(params)

    with tracing():
        closed = jax.make_jaxpr(grad)(PARAMS, 3.0)
    assert [eqn.primitive for eqn in closed.jaxpr.eqns] == [loss_gradient_p]
    found = jax.jit(jaxpr_as_fun(closed))(PARAMS["a"], PARAMS["b"], 3.0)
    jax.tree.map(np.testing.assert_allclose, found, jax.tree.leaves(grad(PARAMS, 3.0)))
