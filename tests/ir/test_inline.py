"""Inlining keeps the meaning, leaves no call, and leaves derivative rules alone before differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.check import check_effects, check_flat
from alpa_hpc.ir.flops import equation_bytes, equation_flops, jaxpr_flops
from alpa_hpc.ir.inline import inline_all, inline_calls, inline_update
from alpa_hpc.ir.key import content_key

X = jnp.linspace(-1, 1, 12).reshape(3, 4)
TABLE = np.arange(16.0, dtype=np.float32).reshape(4, 4)


def names(closed):
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


def run(closed, *args):
    return eval_jaxpr(closed.jaxpr, closed.consts, *args)


def program(x):
    silu = jax.jit(lambda y: jax.nn.silu(y @ TABLE))
    return silu(silu(x)) + jax.nn.relu(x) + jax.checkpoint(jnp.sin)(x)


def test_only_jit_goes_before_differentiation():
    flat = inline_calls(jax.make_jaxpr(program)(X))
    assert "jit" not in names(flat) and {"custom_jvp_call", "remat2"} <= set(names(flat))
    np.testing.assert_allclose(run(flat, X)[0], program(X), rtol=1e-6)


def test_everything_goes_afterwards():
    flat = inline_all(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(program(x))))(X), unguarded=frozenset())
    check_flat(flat, where="test")
    assert "optimization_barrier" in names(flat)
    np.testing.assert_allclose(run(flat, X)[0], jax.grad(lambda x: jnp.sum(program(x)))(X), rtol=1e-5)


def test_inner_constants_are_lifted_once():
    flat = inline_calls(jax.make_jaxpr(program)(X))
    assert sum(const.size for const in flat.consts) == TABLE.size


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 5])
def test_cond_becomes_select(index):
    def switch(i, x):
        return jax.lax.switch(i, [jnp.sin, jnp.cos, lambda y: y * 3], x)

    flat = inline_update(jax.make_jaxpr(switch)(0, X))
    assert "cond" not in names(flat)
    np.testing.assert_allclose(run(flat, jnp.asarray(index), X)[0], switch(index, X))
    flag = inline_update(jax.make_jaxpr(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x))(True, X))
    np.testing.assert_allclose(run(flag, jnp.asarray(index > 0), X)[0], jnp.sin(X) if index > 0 else jnp.cos(X))


def test_long_or_light_scans_stay():
    def scan(body, length):
        return names(inline_calls(jax.make_jaxpr(lambda x: jax.lax.scan(body, x, None, length=length)[0])(X)))

    heavy = lambda x, _: (x @ TABLE, None)  # noqa: E731
    assert "scan" not in scan(heavy, 5)
    assert "scan" in scan(heavy, 257)
    assert "scan" in scan(lambda x, _: (x * 2, None), 5)


def test_what_is_for_differentiation_goes_afterwards():
    def solved(x):
        square = x[:, :3] @ x[:, :3].T + 4 * jnp.eye(3)
        return jnp.sum(jnp.linalg.solve(square, x) * jax.scipy.sparse.linalg.cg(lambda y: square @ y, x, maxiter=3)[0])

    gradient = jax.jit(jax.grad(solved))
    flat = inline_all(jax.make_jaxpr(gradient)(X), unguarded=frozenset())
    assert "custom_linear_solve" not in names(flat), "neither the solver nor that of the transposed system, which the gradient asks for"
    np.testing.assert_allclose(run(flat, X)[0], gradient(X), rtol=1e-4, atol=1e-6)


def test_a_choice_among_the_same_is_none():
    one = inline_all(jax.make_jaxpr(lambda p, x: jax.lax.select_n(p, x, x))(X > 0, X), unguarded=frozenset())
    assert names(one) == [] and run(one, X > 0, X)[0] is X
    other = inline_all(jax.make_jaxpr(jax.lax.select_n)(X > 0, X, X), unguarded=frozenset())
    assert names(other) == ["select_n"]


def test_heavy_loops_of_an_update_are_unrolled():
    orthogonal = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: 1.5 * y - 0.5 * y @ y.T @ y, x))(X)
    assert names(orthogonal) == ["scan"]
    flat = inline_update(orthogonal)
    assert "scan" not in names(flat) and names(flat).count("dot_general") == 6
    np.testing.assert_allclose(run(flat, X)[0], run(orthogonal, X)[0], rtol=1e-6)


def test_keys_are_of_content():
    def flat(function):
        return inline_all(jax.make_jaxpr(function)(X), unguarded=frozenset())

    assert content_key(flat(program)) == content_key(flat(program))
    assert content_key(flat(lambda x: x @ TABLE)) != content_key(flat(lambda x: x @ (TABLE + 1)))
    assert content_key(flat(lambda x: x * 2)) != content_key(flat(lambda x: x * 3))
    assert content_key(flat(lambda x: jnp.sum(x, 0))) != content_key(flat(lambda x: jnp.sum(x, 1)))
    assert content_key(flat(lambda x: (x - 1.0) - x)) != content_key(flat(lambda x: x - (x - 1.0)))


def test_flops():
    def flops(function, *shapes):
        return jaxpr_flops(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr)

    assert flops(lambda a, b: jnp.einsum("bik,bkj->bij", a, b), (2, 3, 4), (2, 4, 5)) == 2 * 2 * 3 * 4 * 5
    assert flops(jnp.tanh, (3, 4)) == 12
    assert flops(jnp.sum, (3, 4)) == 12
    assert flops(lambda a: a.reshape(12), (3, 4)) == 0
    assert flops(lambda a, w: jax.lax.scan(lambda x, _: (x @ w, None), a, None, length=7)[0], (3, 4), (4, 4)) == 7 * 2 * 3 * 4 * 4
    conv = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=2)  # noqa: E731
    assert flops(conv, (2, 4, 8, 8), (6, 2, 3, 3)) == 2 * (2 * 6 * 8 * 8) * (2 * 3 * 3)
    closed = jax.make_jaxpr(lambda a, b: a @ b)(X, TABLE)
    assert equation_bytes(closed.jaxpr.eqns[0]) == 4 * (12 + 16 + 12)
    assert equation_flops(closed.jaxpr.eqns[0]) == 2 * 3 * 4 * 4


def test_check_names_the_fault():
    closed = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(X)
    broken = ClosedJaxpr(closed.jaxpr.replace(eqns=closed.jaxpr.eqns[::-1]), closed.consts)
    with pytest.raises(AssertionError, match="operand without definition\n-> 0: .*sin"):
        check_flat(broken, where="test")
    with pytest.raises(AssertionError, match="a call remains"):
        check_flat(jax.make_jaxpr(jax.jit(jnp.sin))(X), where="test")
    with pytest.raises(TraceError, match="debug_print|debug_callback"):
        check_effects(jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(X), where="test")


def over_rows(x):
    def row(y):
        fixed = jax.lax.stop_gradient(y)
        return (y - jax.lax.pmean(jnp.sin(y), "rows")) * (jax.lax.pmax(fixed, "rows") - jax.lax.pmin(fixed, "rows"))

    return jnp.mean(jax.vmap(row, axis_name="rows")(x) ** 2)


@pytest.mark.parametrize("function", [over_rows, jax.grad(over_rows)], ids=["value", "gradient"])
def test_collectives_over_an_axis_of_vmap_are_reductions(function):
    closed = jax.make_jaxpr(function)(X)
    assert {"psum", "pmax", "pmin"} <= set(names(closed)), "else nothing is replaced"
    for inline in (inline_calls, inline_update):
        flat = inline(closed)
        assert {"psum", "pmax", "pmin"}.isdisjoint(names(flat))
        np.testing.assert_allclose(run(flat, X)[0], function(X), rtol=1e-5, atol=1e-6)
