"""A layered step = the one-device reference = jax.value_and_grad over microbatches written by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_hpc.layers.layered
from alpa_hpc.ir.grad import AuxKind, SumCount, value_and_grad
from alpa_hpc.ir.graph import reached
from alpa_hpc.ir.reference import reference_step
from alpa_hpc.ir.trace import Step, TracedStep, trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.differentiate import differentiate
from alpa_hpc.layers.evaluate import run_layered_step
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.layers.options import Clustering
from alpa_hpc.models.gpt import GPT

OPTIMISER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(optax.linear_schedule(0.1, 0.2, 10), momentum=0.9))
ROWS, WIDTH = 8, 6


def tiny_gpt(**options: Any) -> GPT:
    return GPT(num_layers=2, hidden=16, num_heads=2, vocab=32, sequence=6, **options)


def mlp_params(depth: int = 4) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(7), depth)
    return {f"w{i}": 0.5 * jax.random.normal(key, (WIDTH, WIDTH)) for i, key in enumerate(keys)}


def mlp_batch() -> dict[str, jax.Array]:
    return {"x": jax.random.normal(jax.random.key(1), (ROWS, WIDTH)), "y": jax.random.normal(jax.random.key(2), (ROWS, WIDTH))}


def sgd_step(loss: Callable[..., object], optimiser: optax.GradientTransformation = OPTIMISER, **options: Any) -> Step:
    def step(state, batch):
        value, gradients = value_and_grad(loss, **options)(state["params"], batch)
        metrics = {"loss": value}
        if options.get("has_aux"):
            metrics = {"loss": value[0], **value[1]}
        updates, opt = optimiser.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, metrics

    return step


def sgd_state(params: Any, optimiser: optax.GradientTransformation = OPTIMISER) -> dict[str, Any]:
    return {"params": params, "opt": optimiser.init(params)}


def comparable(x: jax.Array) -> np.ndarray:
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x, dtype=np.float64)


def assert_trees_close(found: object, expected: object, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(comparable(a), comparable(b), rtol=tolerance, atol=tolerance)


def check_step(step, state, batch, *, num_microbatches: int, num_layers: int, tolerance: float = 2e-5) -> tuple[TracedStep, LayeredStep]:
    """Layered = reference; gives the step and its layers for further checks."""
    traced = trace_step(step, state, batch, num_microbatches=num_microbatches)
    layered = cut_layers(traced, num_layers=num_layers, imbalance=1.0)
    assert len(layered.layers) == num_layers
    expected = jax.jit(partial(reference_step, traced))(state, batch)
    found = jax.jit(partial(run_layered_step, layered, traced))(state, batch)
    assert_trees_close(found, expected, tolerance)
    check_residuals(layered)
    return traced, layered


def check_residuals(layered: LayeredStep) -> None:
    for layer in layered.layers:
        jaxpr = layer.forward.jaxpr
        from_rows = reached(jaxpr.eqns, jaxpr.invars[len(layer.params) :])
        residuals = jaxpr.outvars[len(layer.outputs) :]
        assert all(var in from_rows for var in residuals), "a residual depends on weights alone (a bf16 copy, say)"
        assert not set(residuals) & set(jaxpr.invars)


def check_equals_plain(step, state, batch) -> None:
    """The reference = the step as it stands (a step whose gradients do not depend on how rows are split)."""
    for num_microbatches in (1, 2):
        traced = trace_step(step, state, batch, num_microbatches=num_microbatches)
        assert_trees_close(jax.jit(partial(reference_step, traced))(state, batch), jax.jit(step)(state, batch))


def gpt_case(model: GPT):
    def step(state, batch):
        key = jax.random.fold_in(state["key"], state["count"])
        loss, gradients = value_and_grad(model.loss)(state["params"], batch, key)
        updates, opt = OPTIMISER.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return dict(state, params=params, opt=opt, count=state["count"] + 1), {"loss": loss, "norm": optax.tree.norm(gradients)}

    params = model.init(jax.random.key(0))
    state = {**sgd_state(params), "key": jax.random.key(3), "count": jnp.zeros((), jnp.int32)}
    batch = {"tokens": jax.random.randint(jax.random.key(1), (ROWS, model.sequence + 1), 0, model.vocab)}
    return step, state, batch


@pytest.mark.parametrize(
    ("model", "num_layers", "num_microbatches"),
    [(tiny_gpt(), 1, 2), (tiny_gpt(), 4, 1), (tiny_gpt(dtype="bfloat16", dropout=0.1), 3, 2)],
    ids=["f32-1", "f32-4", "bf16-dropout-3"],
)
def test_gpt_equals_reference(model, num_layers, num_microbatches):
    step, state, batch = gpt_case(model)
    tolerance = 2e-5 if model.dtype == "float32" else 2e-2
    check_step(step, state, batch, num_microbatches=num_microbatches, num_layers=num_layers, tolerance=tolerance)


def test_gpt_equals_jax_microbatched_by_hand():
    model = tiny_gpt(dropout=0.2)
    step, state, batch = gpt_case(model)
    num_microbatches = 2
    traced = trace_step(step, state, batch, num_microbatches=num_microbatches)
    layered = cut_layers(traced, num_layers=1, imbalance=1.0)
    new_state, metrics = jax.jit(partial(run_layered_step, layered, traced))(state, batch)
    key = jax.random.fold_in(state["key"], state["count"])
    losses, sums = [], None
    for number in range(num_microbatches):
        part = {"tokens": batch["tokens"][number * 4 : number * 4 + 4]}
        loss, gradients = jax.jit(jax.value_and_grad(model.loss))(state["params"], part, jax.random.fold_in(key, number))
        losses.append(loss)
        sums = gradients if sums is None else jax.tree.map(jnp.add, sums, gradients)
    means = jax.tree.map(lambda x: x / num_microbatches, sums)
    updates, opt = OPTIMISER.update(means, state["opt"], state["params"])
    assert_trees_close(new_state["params"], optax.apply_updates(state["params"], updates))
    assert_trees_close(new_state["opt"], opt)
    assert_trees_close(metrics, {"loss": sum(losses) / num_microbatches, "norm": optax.tree.norm(means)})


def shapes_of_gpt(num_blocks: int, **options: Any) -> TracedStep:
    """A traced step of SGD, from shapes alone."""
    model = GPT(num_layers=num_blocks, hidden=16, num_heads=2, vocab=64, sequence=8, dtype="bfloat16", **options)

    def step(state, batch):
        loss, gradients = value_and_grad(model.loss)(state["params"], batch, state["key"])
        return dict(state, params=jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)), {"loss": loss}

    state = jax.eval_shape(lambda key: {"params": model.init(key), "key": key}, jax.random.key(0))
    return trace_step(step, state, model.batch(8), num_microbatches=2)


@pytest.mark.parametrize(("num_blocks", "num_layers"), [(8, 4), (12, 6)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_middle_layers_of_a_gpt_are_equal(num_blocks, num_layers, dropout):
    layered = cut_layers(shapes_of_gpt(num_blocks, dropout=dropout), num_layers=num_layers, imbalance=0.5)
    assert len({layer.key for layer in layered.layers[1:-1]}) == 1
    assert len({layer.key for layer in layered.layers}) == 3
    assert len({update.key for update in layered.update.params}) < 12
    again = cut_layers(shapes_of_gpt(num_blocks, dropout=dropout), num_layers=num_layers, imbalance=0.5)
    assert again.key == layered.key


def test_equal_layers_are_differentiated_once(monkeypatch):
    made = []

    def counted(layer):
        made.append(layer)
        return differentiate(layer)

    monkeypatch.setattr(alpa_hpc.layers.layered, "differentiate", counted)
    layered = cut_layers(shapes_of_gpt(8), num_layers=8, imbalance=0.5)
    assert len(layered.layers) == 8 and len(made) == 3, "the first, the last, and all between"


@pytest.mark.parametrize(("num_blocks", "num_layers"), [(8, 4), (16, 8)])
def test_a_gpt_one_block_deeper_has_the_same_middle_layers(num_blocks, num_layers):
    depths = (num_blocks, num_blocks + 1)
    cut = [cut_layers(shapes_of_gpt(depth), num_layers=num_layers, imbalance=0.5) for depth in depths]
    assert len({layer.key for one in cut for layer in one.layers[1:-1]}) == 1


@pytest.mark.parametrize("num_layers", [2, 5])
def test_layers_of_equally_many_operators_compute_the_same(num_layers):
    step, state, batch = gpt_case(tiny_gpt())
    traced = trace_step(step, state, batch, num_microbatches=2)
    layered = cut_layers(traced, num_layers=num_layers, imbalance=0.0, clustering=Clustering.EQUAL_OPERATORS)
    assert len(layered.layers) == num_layers
    assert layered.key != cut_layers(traced, num_layers=num_layers, imbalance=1.0).key
    expected = jax.jit(partial(reference_step, traced))(state, batch)
    assert_trees_close(jax.jit(partial(run_layered_step, layered, traced))(state, batch), expected)


def mlp_loss(params, batch, *, block=lambda x, w: jnp.tanh(x @ w)):
    x = batch["x"]
    for name in sorted(params):
        x = block(x, params[name])
    return jnp.mean((x - batch["y"]) ** 2)


@jax.custom_vjp
def clip_gradient(x):
    return x


clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))

BLOCKS = {
    "custom_vjp": lambda x, w: clip_gradient(jnp.tanh(x @ w)),
    "relu": lambda x, w: jax.nn.relu(x @ w),
    "remat": jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w))),
    "jit": jax.jit(lambda x, w: jax.nn.silu(x @ w)),
    "remat-dots": jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w)), policy=jax.checkpoint_policies.dots_saveable),
    "function of weights": lambda x, w: jnp.tanh(x @ jnp.exp(-(w @ w))),
    "cond": lambda x, w: jax.lax.cond(x.sum() > 0, lambda a: jnp.tanh(a @ w), lambda a: a @ w, x),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("num_layers", "num_microbatches"), [(2, 4), (3, 1)])
def test_blocks(name, num_layers, num_microbatches):
    params, batch = mlp_params(), mlp_batch()
    loss = partial(mlp_loss, block=BLOCKS[name])
    _, layered = check_step(sgd_step(loss), sgd_state(params), batch, num_microbatches=num_microbatches, num_layers=num_layers)
    if num_layers == 2 and name != "custom_vjp":
        check_equals_plain(sgd_step(loss), sgd_state(params), batch)
    if name == "remat" and num_layers == 2:
        sines = [eqn for layer in layered.layers for eqn in layer.forward.jaxpr.eqns if eqn.primitive.name == "cos"]
        assert not sines, "a remat block keeps nothing for its derivative"


def test_custom_vjp_equals_jax():
    params, batch = mlp_params(), mlp_batch()
    loss = partial(mlp_loss, block=BLOCKS["custom_vjp"])
    step = sgd_step(loss, optax.sgd(1.0))
    state = sgd_state(params, optax.sgd(1.0))
    traced = trace_step(step, state, batch, num_microbatches=1)
    new_state, _ = jax.jit(partial(run_layered_step, cut_layers(traced, num_layers=3, imbalance=1.0), traced))(state, batch)
    assert_trees_close(new_state["params"], jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, batch)))


def penalised_loss(params, batch):
    """A derivative of jax's own inside the loss: how fast the error grows with each row, and with the parameters."""
    value, slopes = jax.value_and_grad(mlp_loss)(params, batch)
    per_row = jax.vmap(jax.grad(lambda x, y: mlp_loss(params, {"x": x, "y": y})))(batch["x"], batch["y"])
    return value + 0.1 * jnp.mean(jnp.sum(per_row**2, axis=1)) + 0.1 * sum(jnp.sum(slope**2) for slope in slopes.values())


@pytest.mark.parametrize(("num_layers", "num_microbatches"), [(1, 1), (3, 2)])
def test_a_derivative_inside_the_loss_is_differentiated_again(num_layers, num_microbatches):
    params, batch = mlp_params(), mlp_batch()
    step = sgd_step(penalised_loss)
    check_step(step, sgd_state(params), batch, num_microbatches=num_microbatches, num_layers=num_layers)
    traced = trace_step(step, sgd_state(params), batch, num_microbatches=1)
    new_state, _ = jax.jit(partial(run_layered_step, cut_layers(traced, num_layers=num_layers, imbalance=1.0), traced))(
        sgd_state(params), batch
    )
    updates, _ = OPTIMISER.update(jax.grad(penalised_loss)(params, batch), OPTIMISER.init(params), params)
    assert_trees_close(new_state["params"], optax.apply_updates(params, updates))


def test_shared_parameter_and_skipping_values():
    def loss(params, batch):
        first = jnp.tanh(batch["x"] @ params["w0"])
        x = first
        for name in ("w1", "w0", "w2", "w0", "w3"):
            x = jnp.tanh(x @ params[name]) + first
        return jnp.mean((x - batch["y"] + first) ** 2)

    _, layered = check_step(sgd_step(loss), sgd_state(mlp_params()), mlp_batch(), num_microbatches=2, num_layers=4)
    check_equals_plain(sgd_step(loss), sgd_state(mlp_params()), mlp_batch())
    shared = [layer.index for layer in layered.layers if layered.state_names.index("params/w0") in layer.params]
    assert len(shared) >= 3
    assert any(value in layered.layers[0].outputs for value in layered.layers[-1].inputs)


def test_sum_count():
    def loss(params, batch):
        x = jnp.tanh(jnp.tanh(batch["x"] @ params["w0"]) @ params["w1"])
        mask = batch["y"][:, 0] > 0
        return jnp.sum(jnp.where(mask[:, None], x**2, 0)), jnp.sum(mask)

    params, batch = mlp_params(2), mlp_batch()
    state = sgd_state(params, optax.sgd(1.0))
    traced, layered = check_step(sgd_step(loss, optax.sgd(1.0), reduction=SumCount()), state, batch, num_microbatches=4, num_layers=2)
    new_state, metrics = jax.jit(partial(run_layered_step, layered, traced))(state, batch)
    value, gradients = jax.value_and_grad(lambda p: loss(p, batch)[0] / loss(p, batch)[1])(params)
    assert_trees_close(metrics["loss"], value)
    assert_trees_close(new_state["params"], jax.tree.map(lambda p, g: p - g, params, gradients))
    outside = value_and_grad(loss, reduction=SumCount())(params, batch)
    assert_trees_close(outside, (value, gradients))


def test_aux_outputs():
    def loss(params, batch):
        x = batch["x"]
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        aux = {"mean": jnp.mean(x), "positive": jnp.sum(x > 0), "last": x[0, 0], "three": jnp.asarray(3.0)}
        return jnp.mean((x - batch["y"]) ** 2), aux

    kinds = {"mean": AuxKind.MEAN, "positive": AuxKind.SUM, "last": AuxKind.LAST, "three": AuxKind.MEAN}
    params, batch = mlp_params(), mlp_batch()
    step = sgd_step(loss, has_aux=True, aux=kinds)
    traced, layered = check_step(step, sgd_state(params), batch, num_microbatches=2, num_layers=2)
    _, metrics = jax.jit(partial(run_layered_step, layered, traced))(sgd_state(params), batch)
    x = mlp_forward(params, batch)
    assert_trees_close(metrics["mean"], jnp.mean(x))
    assert int(metrics["positive"]) == int(jnp.sum(x > 0))
    assert_trees_close(metrics["last"], x[ROWS // 2, 0])
    assert float(metrics["three"]) == 3.0


def mlp_forward(params, batch):
    x = batch["x"]
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return x


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_over_layers_is_unrolled(reverse):
    def loss(params, batch):
        def body(x, w):
            x = jnp.tanh(x @ w)
            return x, jnp.mean(x)

        x, sums = jax.lax.scan(body, batch["x"], params["stacked"], reverse=reverse)
        return jnp.mean((x - batch["y"]) ** 2) + 0.01 * jnp.mean(sums * jnp.arange(4.0))

    params = {"stacked": 0.5 * jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH))}
    traced, _ = check_step(sgd_step(loss), sgd_state(params), mlp_batch(), num_microbatches=2, num_layers=4)
    check_equals_plain(sgd_step(loss), sgd_state(params), mlp_batch())
    assert "scan" not in {eqn.primitive.name for eqn in traced.loss.jaxpr.eqns}


def test_unused_parameter_gets_a_zero_gradient_in_layer_0():
    params = {**mlp_params(), "unused": jnp.ones((3,))}

    def loss(p, batch):
        return mlp_loss({name: value for name, value in p.items() if name != "unused"}, batch)

    _, layered = check_step(sgd_step(loss), sgd_state(params), mlp_batch(), num_microbatches=2, num_layers=2)
    assert layered.state_names.index("params/unused") in layered.layers[0].params


def test_array_constants_stay_in_the_loss():
    table = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) / 40

    def loss(params, batch):
        return mlp_loss(params, {"x": batch["x"] @ table, "y": batch["y"] * jnp.asarray(table)[0]})

    check_step(sgd_step(loss), sgd_state(mlp_params()), mlp_batch(), num_microbatches=2, num_layers=2)


def test_work_before_the_loss_is_split_by_rows():
    def step(state, batch):
        scaled = {"x": batch["x"] * state["scale"], "y": jnp.flip(batch["y"], 1)}
        value, gradients = jax.jit(value_and_grad(lambda params: mlp_loss(params, scaled)))(state["params"])
        return dict(state, params=jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)), {"loss": value}

    state = {"params": mlp_params(), "scale": jnp.asarray(0.5)}
    traced, _ = check_step(step, state, mlp_batch(), num_microbatches=4, num_layers=2)
    assert [traced.state_names[leaf] for leaf in traced.before_leaves] == ["scale"]
