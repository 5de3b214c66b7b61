"""The update split by parameter = the update whole; what cannot be split is refused with the equation."""

import jax
import jax.numpy as jnp
import optax
import pytest

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.grad import value_and_grad
from alpa_hpc.ir.reference import reference_step
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.ir.work import ReductionKind
from alpa_hpc.layers.evaluate import run_layered_step
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.layers.update import MOST_ROUNDS

PARAMS = {name: 0.3 * jax.random.normal(jax.random.key(i), (4, 4)) for i, name in enumerate(("a", "b", "c", "d"))}
BATCH = {"x": jax.random.normal(jax.random.key(9), (8, 4))}


def loss(params, batch):
    x = batch["x"]
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def check(step, state):
    """Layered = reference for two steps; gives the update."""
    traced = trace_step(step, state, BATCH, num_microbatches=2)
    layered = cut_layers(traced, num_layers=2, imbalance=1.0)
    for _ in range(2):
        expected, expected_metrics = reference_step(traced, state, BATCH)
        state, metrics = run_layered_step(layered, traced, state, BATCH)
        jax.tree.map(lambda a, b: None if jnp.allclose(a, b, rtol=2e-5, atol=1e-6) else pytest.fail(f"{a} != {b}"), state, expected)
        assert metrics.keys() == expected_metrics.keys()
        for name in metrics:
            assert jnp.allclose(metrics[name], expected_metrics[name], rtol=2e-5)
    return layered


def optax_step(optimiser, metrics=lambda gradients, updates: {}):
    def step(state, batch):
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, opt = optimiser.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value, **metrics(gradients, updates)}

    return step, {"params": PARAMS, "opt": optimiser.init(PARAMS)}


OPTIMISERS = {
    "clip-adamw": optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2)),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam-schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "masked-decay": optax.adamw(1e-2, mask={"a": True, "b": False, "c": True, "d": False}),
    "apply-if-finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "multi-steps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "ema": optax.chain(optax.adafactor(1e-2), optax.ema(0.9)),
    "lamb": optax.lamb(1e-2),
    "noise": optax.noisy_sgd(1e-2, key=jax.random.key(0)),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(name):
    layered = check(*optax_step(OPTIMISERS[name]))
    keys = {param.key for param in layered.update.params}
    assert len(keys) == (2 if name == "masked-decay" else 1)


def test_adamw_with_clipping_has_one_reduction_and_owned_moments():
    layered = check(*optax_step(OPTIMISERS["clip-adamw"]))
    update = layered.update
    assert [one.kinds for one in update.rounds] == [(ReductionKind.SUM,)]
    assert all(len(param.leaves) == 3 and param.leaves[0] == param.param for param in update.params)
    assert [layered.state_names[leaf] for leaf in update.shared_leaves] == ["opt/1/0/count"]


def test_plain_sgd_has_no_reduction():
    update = check(*optax_step(OPTIMISERS["momentum"])).update
    assert update.rounds == () and update.shared_leaves == ()
    assert all(param.partials == () for param in update.params)


def test_dynamic_loss_scale():
    def step(state, batch):
        scale = state["scale"]
        value, scaled = value_and_grad(lambda params: loss(params, batch) * scale)(state["params"])
        gradients = jax.tree.map(lambda g: g / scale, scaled)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
        chained = jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda g: jnp.all(jnp.isfinite(g)), gradients))
        params = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), state["params"], gradients)
        largest = jax.tree.reduce(jnp.maximum, jax.tree.map(lambda g: jnp.max(jnp.abs(g)), gradients))
        metrics = {"loss": value / scale, "finite": chained, "largest": largest, "norm_a": jnp.sum(gradients["a"] ** 2)}
        return {"params": params, "scale": jnp.where(finite, scale * 2, scale / 2)}, metrics

    layered = check(step, {"params": PARAMS, "scale": jnp.asarray(8.0)})
    assert {ReductionKind.AND, ReductionKind.MAX, ReductionKind.SUM} <= set(layered.update.rounds[0].kinds)


def test_array_of_several_parameters_is_refused():
    def step(state, batch):
        value, gradients = value_and_grad(loss)(state, batch)
        mixed = gradients["a"] + gradients["b"]
        return {name: state[name] - mixed for name in state}, {"loss": value}

    traced = trace_step(step, PARAMS, BATCH, num_microbatches=2)
    with pytest.raises(TraceError, match=r"mixes parameters 'a', 'b' in one array: .*add"):
        cut_layers(traced, num_layers=2, imbalance=1.0)


def rounds(layered):
    return [[kind.value for kind in one.kinds] for one in layered.update.rounds]


def test_what_depends_on_a_reduction_is_reduced_in_a_later_round():
    def step(state, batch):
        value, gradients = value_and_grad(loss)(state, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients.values()))
        clipped = {name: g / norm for name, g in gradients.items()}
        largest = jax.tree.reduce(jnp.maximum, jax.tree.map(jnp.max, clipped))
        scaled = {name: g / largest for name, g in clipped.items()}
        metrics = {"loss": value, "least": jax.tree.reduce(jnp.minimum, jax.tree.map(jnp.min, scaled)), "one": jnp.sum(scaled["a"])}
        return {name: state[name] - scaled[name] for name in state}, metrics

    assert rounds(check(step, PARAMS)) == [["sum"], ["max"], ["min", "sum"]]


LATER_ROUNDS = {
    "clip-twice": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2), optax.clip_by_global_norm(0.01)),
    "clip-apply-if-finite": optax.chain(optax.clip_by_global_norm(0.1), optax.apply_if_finite(optax.adam(1e-2), 3)),
    "clip-normalise": optax.chain(optax.clip_by_global_norm(0.1), optax.normalize_by_update_norm(), optax.sgd(1e-2)),
    "mechanise": optax.contrib.mechanize(optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", LATER_ROUNDS)
def test_optimisers_with_two_rounds_of_reductions(name):
    assert len(rounds(check(*optax_step(LATER_ROUNDS[name])))) == 2


def test_norms_of_gradients_and_of_clipped_updates_are_metrics():
    optimiser = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2))
    step, state = optax_step(optimiser, lambda gradients, updates: {"g": optax.tree.norm(gradients), "u": optax.tree.norm(updates)})
    assert rounds(check(step, state)) == [["sum", "sum"], ["sum"]]


@pytest.mark.parametrize("join", [jnp.multiply, jnp.minimum, jnp.logical_or])
def test_a_row_of_scalars_is_joined_in_one_round(join):
    def step(state, batch):
        value, gradients = value_and_grad(loss)(state, batch)
        return {name: state[name] - g for name, g in gradients.items()}, {"loss": value, "joined": joined(gradients)}

    def joined(gradients):
        norms = jax.tree.map(jnp.linalg.norm, gradients)
        return jax.tree.reduce(join, jax.tree.map(lambda norm: norm > 1.0, norms) if join is jnp.logical_or else norms)

    assert len(rounds(check(step, PARAMS))) == 1


def test_too_many_rounds_are_refused():
    params = {f"p{number}": jnp.ones(2) for number in range(4 * MOST_ROUNDS)}

    def step(state, batch):
        value, gradients = value_and_grad(lambda params: sum(jnp.sum(p**2) for p in params.values()) * jnp.mean(batch["x"]))(state)
        longest = jax.tree.reduce(lambda a, b: jnp.sqrt(a * a + b * b), jax.tree.map(jnp.linalg.norm, gradients))
        return {name: state[name] - g for name, g in gradients.items()}, {"loss": value, "longest": longest}

    traced = trace_step(step, params, BATCH, num_microbatches=2)
    with pytest.raises(TraceError, match=rf"rounds of reductions .* at most {MOST_ROUNDS}"):
        cut_layers(traced, num_layers=1, imbalance=1.0)


def test_array_metric_is_refused():
    def step(state, batch):
        value, gradients = value_and_grad(loss)(state, batch)
        return {name: state[name] - gradients[name] for name in state}, {"loss": value, "gradient": gradients["a"]}

    traced = trace_step(step, PARAMS, BATCH, num_microbatches=2)
    with pytest.raises(TraceError, match="a metric gets an array"):
        cut_layers(traced, num_layers=2, imbalance=1.0)
