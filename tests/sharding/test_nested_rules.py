"""scan, while and cond are split where dims stay split all the way through; tiles put together = the loop on one device."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.assignment import own_plans
from alpa_hpc.sharding.equation_work import Leaving, equation_work
from alpa_hpc.sharding.strategies.registry import rule_of
from alpa_hpc.sharding.strategies.rule import UNSPLIT, Combine, OpRule, Reduction
from tests.sharding.operators import Trial, all_plans, check

SHAPES = [(2, 2), (8, 1)]
B, H, L = 8, 16, 3
Numbers = Callable[..., np.ndarray]


def equation(function: Callable[..., object], *operands: Any, name: str) -> tuple[JaxprEqn, list[Any]]:
    """The first equation called `name` in `function(*operands)`; all that stands before it is evaluated."""
    closed = jax.make_jaxpr(function)(*operands)
    known = dict(zip(closed.jaxpr.invars, operands, strict=True)) | dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        values = [np.asarray(atom.val) if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
        if eqn.primitive.name == name:
            return eqn, values
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        known.update(zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True))
    raise AssertionError(f"no {name} in {closed}")


def rule(function: Callable[..., object], *operands: Any, name: str) -> OpRule:
    eqn, _ = equation(function, *operands, name=name)
    found = rule_of(eqn)
    assert found is not None
    return found


def rnn(w: jax.Array, h: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w + x)
        return h, h * 2

    return lax.scan(cell, h, xs)


def rnn_gradient(w: jax.Array, h: jax.Array, xs: jax.Array) -> object:
    _, back = jax.vjp(rnn, w, h, xs)
    return back((h, xs))


W, STATE, ROWS = np.ones((H, H), np.float32) / H, np.ones((B, H), np.float32), np.ones((L, B, H), np.float32)


def test_the_batch_of_a_recurrent_net_is_a_factor() -> None:
    found = rule(rnn, W, STATE, ROWS, name="scan")
    assert found == OpRule((B,), ((UNSPLIT, UNSPLIT), (0, UNSPLIT), (UNSPLIT, 0, UNSPLIT)), ((0, UNSPLIT), (UNSPLIT, 0, UNSPLIT))), (
        "the hidden dim is a row of the weights and a column, so it is whole"
    )


def test_the_gradient_of_a_weight_is_a_partial_sum_over_the_batch() -> None:
    _, backward = (eqn for eqn in jax.make_jaxpr(rnn_gradient)(W, STATE, ROWS).jaxpr.eqns if eqn.primitive.name == "scan")
    found = rule_of(backward)
    assert found is not None
    (batch,) = {one.factor for one in found.reduced}
    gradients = [i for i, var in enumerate(backward.outvars) if var.aval.shape == (H, H)]  # pyright: ignore[reportAttributeAccessIssue]
    assert found.reduced == (Reduction(batch, Combine.SUM, tuple(gradients)),)
    assert found.sizes[batch] == B
    assert all(batch in dims for i, dims in enumerate(found.results) if i not in gradients)


def test_a_sum_that_is_needed_in_the_loop_keeps_the_dim_whole() -> None:
    def normalised(h: jax.Array, xs: jax.Array) -> object:
        return lax.scan(lambda h, x: (h - h.mean(0) + x, None), h, xs)

    assert rule(normalised, STATE, ROWS, name="scan").sizes == (H,), "the batch is averaged, the columns are not"


def test_two_dims_that_become_one_are_not_split() -> None:
    def outer(x: jax.Array, n: jax.Array) -> object:
        return lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0].T + s[0], s[1] + 1), (x, n))

    found = rule(outer, np.ones((8, 8), np.float32), np.int32(0), name="while")
    assert found.sizes == (), "both dims of a matrix that is transposed around the loop are one class"


def test_rows_that_look_up_rows_are_whole() -> None:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x[x[:, 0].astype(jnp.int32) % 8], None

    found = rule(lambda x: lax.scan(step, x, None, length=2), np.ones((8, 16), np.float32), name="scan")
    assert found.sizes == (), "rows are looked up by their own first column"


def test_the_condition_sees_what_every_device_has() -> None:
    def until(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x)

    def counted(x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.while_loop(lambda s: s[1] < 4, lambda s: (s[0] * 2, s[1] + 1), (x, n))[0]

    x = np.ones((4, 8), np.float32)
    assert rule(until, x, name="while").sizes == ()
    assert rule(counted, x, np.int32(0), name="while").sizes == (4, 8)


def test_the_work_of_a_nest_is_divided_by_what_each_part_has() -> None:
    def two(w: jax.Array, h: jax.Array, g: jax.Array) -> object:
        return lax.scan(lambda s, _: ((jnp.tanh(s[0] @ w), jnp.tanh(s[1] @ w)), None), (h, g), None, length=5)

    closed = jax.make_jaxpr(two)(W, STATE, np.ones((2 * B, H), np.float32))
    (how,) = equation_work(closed.jaxpr, Leaving(frozenset(), frozenset()))
    by_factor = {part.factors: part.flop for part in how.work if part.flop}
    assert by_factor == {frozenset({0}): 5 * 2 * B * H * H, frozenset({1}): 5 * 2 * 2 * B * H * H}


class Body:
    """A random loop body on a carry of `rows` x `columns`, a matrix, a row of numbers, and a counter."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        self.steps = [draw.choice(STEPS) for _ in range(draw.choice((2, 3, 4)))]
        self.length = draw.choice((1, 3))
        self.reverse = draw.random() < 0.5

    def __call__(self, x: jax.Array, w: jax.Array, row: jax.Array) -> jax.Array:
        for step in self.steps:
            x = step(x, w, row)
        return x / 4


CONSTANT = np.arange(8 * 16, dtype=np.float32).reshape(8, 16) / 64
STEPS: list[Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = [
    lambda x, w, row: jnp.tanh(x @ w),
    lambda x, w, row: x + row,
    lambda x, w, row: x - x.mean(0),
    lambda x, w, row: x - x.max(1, keepdims=True),
    lambda x, w, row: x[:, ::-1] + x,
    lambda x, w, row: jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) > 3, x, -x),
    lambda x, w, row: x + CONSTANT,
    lambda x, w, row: x.reshape(2, 4, 16).reshape(8, 16) * 2,
    lambda x, w, row: jax.checkpoint(jnp.sin)(x),
    lambda x, w, row: lax.cond(row[0] > 0, lambda y: y * 2, lambda y: y + CONSTANT, x),
    lambda x, w, row: lax.scan(lambda y, r: (y + r, y.sum()), x, jnp.stack([row, row]))[0],
    lambda x, w, row: jnp.sort(x, axis=1),
    lambda x, w, row: jax.nn.relu(x),
]


def loop(body: Body) -> Callable[..., object]:
    """The body as a scan, a while or a cond, with sums and counters beside it."""

    def as_scan(x: jax.Array, w: jax.Array, rows: jax.Array, _: jax.Array) -> object:
        def step(carry: Any, row: jax.Array) -> Any:
            x, total, products, count = carry
            y = body(x, w, row)
            return (y, total + y.sum(0), products + x.T @ y, count + 1), (y, y.sum(1))

        start = (x, jnp.ones(16), jnp.zeros((16, 16)), jnp.int32(0))
        return lax.scan(step, start, rows, reverse=body.reverse)

    def as_while(x: jax.Array, w: jax.Array, rows: jax.Array, _: jax.Array) -> object:
        def step(carry: Any) -> Any:
            x, total, count = carry
            return body(x, w, rows[0]), total + x.sum(0), count + 1

        return lax.while_loop(lambda carry: carry[2] < body.length, step, (x, jnp.ones(16), jnp.int32(0)))

    def as_cond(x: jax.Array, w: jax.Array, rows: jax.Array, which: jax.Array) -> object:
        branches = [lambda x: (body(x, w, rows[0]), x.sum(0)), lambda x: (x * 2, jnp.ones(16)), lambda x: (x * 3, w[0])]
        return lax.switch(which, branches, x)

    return [as_scan, as_while, as_cond][body.seed % 3]


NUM_BODIES = 30


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_put_together_are_the_whole_loop(shape: tuple[int, int]) -> None:
    mesh = MeshShape(*shape)
    numbers = np.random.default_rng(0)
    trials: list[Trial] = []
    for seed in range(NUM_BODIES):
        operands = [numbers.uniform(-1, 1, size).astype(np.float32) for size in ((8, 16), (16, 16), (3, 16))]
        name = ("scan", "while", "cond")[seed % 3]
        eqn, values = equation(loop(Body(seed)), *operands, np.int32(seed % 4), name=name)
        plans = all_plans(eqn, mesh)
        chosen = random.Random(seed).sample(plans, min(3, len(plans)))
        trials.append(Trial(eqn, values, [max(plans, key=lambda plan: plan.split), *chosen]))
    check(trials, mesh)
    assert_covered(trials)


def assert_covered(trials: Sequence[Trial]) -> None:
    for name in ("scan", "while", "cond"):
        mine = [trial for trial in trials if trial.eqn.primitive.name == name]
        assert any(plan.split > 1 for trial in mine for plan in trial.plans), f"some {name} is split"
        assert any(spec.partial for trial in mine for plan in trial.plans for spec in plan.raw), f"some {name} leaves sums"


def test_gradients_of_a_scan_are_split_right() -> None:
    shape = MeshShape(2, 4)
    numbers = np.random.default_rng(1)
    operands = [numbers.uniform(-1, 1, x.shape).astype(np.float32) for x in (W, STATE, ROWS)]
    closed = jax.make_jaxpr(rnn_gradient)(*operands)
    scans = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]
    trials = [
        Trial(eqn, [numbers.uniform(-1, 1, atom.aval.shape).astype(atom.aval.dtype) for atom in eqn.invars], all_plans(eqn, shape))  # pyright: ignore[reportAttributeAccessIssue]
        for eqn in scans
    ]
    check(trials, shape)
    assert any(plan.split == 8 for trial in trials for plan in trial.plans)


def test_a_nest_in_a_nest_keeps_the_batch() -> None:
    def deep(w: jax.Array, h: jax.Array) -> object:
        def middle(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=2)[0], None

        return lax.scan(middle, h, None, length=3)

    eqn, _ = equation(deep, W, STATE, name="scan")
    found = rule_of(eqn)
    assert found is not None
    assert found.sizes == (B,)
    assert {plan.split for plan in own_plans(found, MeshShape(2, 4)).plans} == {1, 2, 4, 8}
