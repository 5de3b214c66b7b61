"""Property: `parallelize` trains as one device does, by a plan found or given, and says in its errors what to change."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_hpc
from alpa_hpc.api import DEFAULT_LAYERS, DEFAULT_SEARCH, ParallelStep, ParallelTraining, shapes_of
from alpa_hpc.errors import InfeasibleError, LaunchError, PlanError, TraceError
from alpa_hpc.ir.reference import reference_step
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.models.gpt import GPT
from alpa_hpc.stages.options import Partitions, RematChoice

DEVICE = alpa_hpc.DeviceSpec("cpu", 64_000_000, 4e9, 4e9, 4e9, 0.8)
SLOW_BETWEEN = alpa_hpc.ClusterSpec("slow", 2, 4, DEVICE, alpa_hpc.Link(2e9, 2e-5), alpa_hpc.Link(1e6, 5e-4))
ONE_NODE = replace(SLOW_BETWEEN, name="one node", num_nodes=1)
TIGHT = replace(SLOW_BETWEEN, name="tight", device=replace(DEVICE, memory=40_000))  # the MLP's state is 50 KB: it must be divided
WIDTH, ROWS = 32, 16
OPTIMISER = optax.adam(1e-2)

Loss = Callable[..., Any]


def activations(params: Any, batch: Any) -> jax.Array:
    """The tied parameter `in` is read by the first and by the last layer."""
    x = jnp.tanh(batch["x"] @ params["in"])
    for weights in params["hidden"]:
        x = jnp.tanh(x @ weights)
    return x @ params["in"].T


def mean_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((activations(params, batch) - batch["x"]) ** 2)


def masked_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    rows = jnp.sum((activations(params, batch) - batch["x"]) ** 2, axis=1)
    return jnp.sum(rows * batch["mask"]), jnp.sum(batch["mask"])


def loss_with_aux(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    found = activations(params, batch)
    return jnp.mean((found - batch["x"]) ** 2), {"largest_sum": jnp.sum(jnp.abs(found)), "mean": jnp.mean(found)}


def updated(state: Any, gradients: Any) -> Any:
    updates, optimiser = OPTIMISER.update(gradients, state["optimiser"])
    return {"params": optax.apply_updates(state["params"], updates), "optimiser": optimiser, "steps": state["steps"] + 1}


def mean_step(state: Any, batch: Any, loss: Loss = mean_loss) -> Any:
    value, gradients = alpa_hpc.value_and_grad(loss)(state["params"], batch)
    return updated(state, gradients), {"loss": value, "norm": optax.tree.norm(gradients)}


def masked_step(state: Any, batch: Any) -> Any:
    value, gradients = alpa_hpc.value_and_grad(masked_loss, reduction=alpa_hpc.SumCount())(state["params"], batch)
    return updated(state, gradients), {"loss": value}


def aux_step(state: Any, batch: Any, aux: Any) -> Any:
    (value, extra), gradients = alpa_hpc.value_and_grad(loss_with_aux, has_aux=True, aux=aux)(state["params"], batch)
    return updated(state, gradients), {"loss": value, **extra}


def make_state(width: int = WIDTH) -> Any:
    random = np.random.default_rng(0)
    matrices = [np.asarray(random.normal(size=(width, width)) / np.sqrt(width), np.float32) for _ in range(3)]
    params = {"in": matrices[0], "hidden": matrices[1:]}
    return {"params": params, "optimiser": OPTIMISER.init(params), "steps": 0}


def make_batch(seed: int, rows: int = ROWS) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"x": random.normal(size=(rows, WIDTH)), "mask": (np.arange(rows) < rows - 5).astype(np.float32)}


parallelize = partial(alpa_hpc.parallelize, cluster=SLOW_BETWEEN, num_microbatches=4)


def train_like_one_device(parallel: ParallelStep, state: Any, batches: list[Any]) -> ParallelTraining:
    """Train on the batches and compare every metric, and the state in the end, with the one-device reference."""
    training = parallel.start(state, batches[0])
    traced = trace_step(parallel.step, state, shapes_of(batches[0]), num_microbatches=parallel.num_microbatches)
    reference = jax.jit(partial(reference_step, traced))
    expected_state = jax.tree.map(jnp.asarray, state)
    for batch in batches:
        expected_state, expected = reference(expected_state, batch)
        assert training.step(batch) == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)
    found_state = training.state()
    assert jax.tree.structure(found_state) == jax.tree.structure(expected_state)
    for found, leaf in zip(jax.tree.leaves(found_state), jax.tree.leaves(expected_state), strict=True):
        assert found.dtype == leaf.dtype
        np.testing.assert_allclose(found, leaf, rtol=1e-3, atol=1e-4)
    return training


BATCHES = [make_batch(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def mlp() -> ParallelTraining:
    """Three steps of the MLP; later tests read what is left of it."""
    return train_like_one_device(parallelize(mean_step, cluster=TIGHT), make_state(), BATCHES)


def test_the_tied_parameter_is_read_by_several_stages(mlp: ParallelTraining) -> None:
    assert len(mlp.plan.stages) > 1
    assert mlp.plan.num_devices == 8


def test_gpt_trains_like_one_device() -> None:
    model = GPT(num_layers=1, hidden=16, num_heads=4, vocab=32, sequence=8)

    def step(state: Any, batch: Any) -> Any:
        value, gradients = alpa_hpc.value_and_grad(model.loss)(state["params"], batch, jax.random.key(0))
        return updated(state, gradients), {"loss": value}

    params = jax.jit(model.init)(jax.random.key(0))
    tokens = [np.asarray(jax.random.randint(jax.random.key(seed), (16, 9), 0, 32), np.int64) for seed in range(3)]
    state = {"params": params, "optimiser": OPTIMISER.init(params), "steps": 0}
    search = replace(DEFAULT_SEARCH, remat=RematChoice.NEVER, num_best=1)
    layers = replace(DEFAULT_LAYERS, num_layers=2)
    train_like_one_device(parallelize(step, search=search, layers=layers), state, [{"tokens": one} for one in tokens])


def test_the_number_of_microbatches_that_none_gives_is_the_best() -> None:
    numbers, searched = (1, 2, 4), replace(DEFAULT_SEARCH, remat=RematChoice.NEVER)
    quick = partial(parallelize, mean_step, cluster=ONE_NODE, search=searched)
    plans = [quick(num_microbatches=number).find_plan(make_state(), make_batch(0, rows=4)) for number in numbers]
    best = min(plans, key=lambda plan: plan.prediction.iteration_seconds)
    asked = alpa_hpc.parallelize(mean_step, cluster=ONE_NODE, search=searched)
    assert asked.find_plan(make_state(), make_batch(0, rows=4)) == best
    given = alpa_hpc.parallelize(mean_step, cluster=ONE_NODE, search=searched, plan=best)
    assert given.find_plan(make_state(), make_batch(0, rows=4)) is best


def penalised_loss(params: Any, batch: Any) -> jax.Array:
    slopes = jax.grad(lambda x: jnp.sum(activations(params, {"x": x})))(batch["x"])
    return mean_loss(params, batch) + 0.01 * jnp.mean(jnp.sum(slopes**2, axis=1))


def test_a_derivative_of_jax_inside_the_loss_trains_like_one_device() -> None:
    train_like_one_device(parallelize(partial(mean_step, loss=penalised_loss), cluster=ONE_NODE), make_state(), BATCHES)


def towers_loss(params: Any, batch: Any) -> jax.Array:
    """Two towers, a layer of each in turns, that meet in the end."""
    left, right = batch["x"], batch["x"][:, ::-1]
    for first, second in zip(*params["towers"], strict=True):
        left, right = jnp.tanh(left @ first), jnp.tanh(right @ second)
    return jnp.mean((left - right) ** 2)


def test_towers_on_meshes_of_their_own_train_like_one_device() -> None:
    random = np.random.default_rng(0)
    towers = [[np.asarray(random.normal(size=(WIDTH, WIDTH)) / 6, np.float32) for _ in range(4)] for _ in range(2)]
    state = {"params": {"towers": towers}, "optimiser": OPTIMISER.init({"towers": towers}), "steps": 0}
    given = ("layers 0-1 on 1x4 as 4x1", "layers 2-3 on 1x4 as 2x2")
    search = replace(DEFAULT_SEARCH, partitions=Partitions.MANUAL, manual=given)
    step = partial(mean_step, loss=towers_loss)
    train_like_one_device(parallelize(step, search=search), state, BATCHES)


def recurrent_loss(params: Any, batch: Any) -> jax.Array:
    """A recurrence whose last state and outputs are both used: a loop with two results, of two and of three dims."""
    rows = batch["x"].reshape(-1, 4, WIDTH // 4)

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.tanh(h @ params["w"] + x)
        return new, new

    last, outputs = jax.lax.scan(cell, jnp.zeros_like(rows[:, 0]), jnp.tile(jnp.swapaxes(rows, 0, 1), (75, 1, 1)))
    return jnp.mean(last**2) + jnp.mean(outputs**2)


def test_a_loop_with_two_results_trains_like_one_device() -> None:
    params = {"w": np.asarray(np.random.default_rng(0).normal(size=(WIDTH // 4, WIDTH // 4)) / 6, np.float32)}
    state = {"params": params, "optimiser": OPTIMISER.init(params), "steps": 0}
    batches = [{"x": batch["x"]} for batch in BATCHES]
    train_like_one_device(parallelize(partial(mean_step, loss=recurrent_loss), cluster=ONE_NODE), state, batches)


def test_sum_and_count_are_joined_over_microbatches() -> None:
    training = train_like_one_device(parallelize(masked_step, cluster=ONE_NODE), make_state(), BATCHES)
    _, metrics = masked_step(training.state(), jax.tree.map(jnp.asarray, BATCHES[0]))
    assert training.score(BATCHES[0]) == pytest.approx(float(metrics["loss"]), rel=1e-4)


def test_declared_aux_is_joined_as_declared() -> None:
    aux = {"largest_sum": alpa_hpc.AuxKind.SUM, "mean": alpa_hpc.AuxKind.MEAN}
    train_like_one_device(parallelize(partial(aux_step, aux=aux), cluster=ONE_NODE), make_state(), BATCHES)


def test_score_is_the_loss_and_changes_nothing(mlp: ParallelTraining) -> None:
    before = mlp.state()
    _, metrics = mean_step(before, jax.tree.map(jnp.asarray, BATCHES[1]))
    assert mlp.score(BATCHES[1]) == pytest.approx(float(metrics["loss"]), rel=1e-4)
    after = mlp.state()
    assert all(np.array_equal(one, other) for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_the_state_is_a_copy(mlp: ParallelTraining) -> None:
    state = mlp.state()
    kept = jax.tree.map(np.copy, state)
    mlp.step(BATCHES[0])
    assert all(np.array_equal(one, other) for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True))
    state["params"]["in"][:] = 0.0
    assert np.any(mlp.state()["params"]["in"])


def test_explain_names_every_stage(mlp: ParallelTraining) -> None:
    text = mlp.explain()
    assert f"tight: 2 x 4 cpu; number of stages: {len(mlp.plan.stages)}, of microbatches: 4; schedule: one_f_one_b\n" in text
    for index, stage in enumerate(mlp.plan.stages):
        assert f"stage {index}: layers {stage.start} to {stage.stop - 1} of 4; {stage.shape.rows} x {stage.shape.cols} mesh" in text
    assert f"{mlp.plan.prediction.iteration_seconds:.3g} seconds" in text


def test_a_plan_from_a_file_is_used(mlp: ParallelTraining, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    alpa_hpc.save_plan(mlp.plan, path)
    plan = alpa_hpc.load_plan(path)
    assert plan == mlp.plan
    turned = tuple(replace(stage, devices=stage.devices[::-1]) for stage in plan.stages)  # no search would give this plan
    swapped = replace(plan, stages=turned)
    assert swapped != plan
    training = train_like_one_device(parallelize(mean_step, plan=swapped, cluster=TIGHT), make_state(), BATCHES[:1])
    assert training.plan is swapped


def test_a_plan_needs_shapes_alone() -> None:
    huge = replace(SLOW_BETWEEN, num_nodes=4)
    plan = parallelize(mean_step, cluster=huge).find_plan(shapes_of(make_state()), shapes_of(BATCHES[0]))
    assert plan.num_devices == 16


def two_losses(state: Any, batch: Any) -> Any:
    other, _ = alpa_hpc.value_and_grad(mean_loss)(state["params"], batch)
    new_state, metrics = mean_step(state, batch)
    return new_state, {**metrics, "other": other}


def complex_metric(state: Any, batch: Any) -> Any:
    new_state, metrics = mean_step(state, batch)
    return new_state, {**metrics, "phase": metrics["loss"] + 1j}


def vector_metric(state: Any, batch: Any) -> Any:
    new_state, _ = mean_step(state, batch)
    return new_state, {"steps": jnp.stack([state["steps"], state["steps"]])}


def with_key(state: Any, batch: Any) -> Any:
    inner, metrics = mean_step(state["inner"], batch)
    assert isinstance(state["rate"], float), "the step hands it on, so it is a number while the step is traced"
    key = jax.random.fold_in(state["key"], 1)
    return {**state, "inner": inner, "key": key}, {**metrics, "drawn": state["rate"] * jax.random.uniform(key)}


def endless(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: 0.5 * x, activations(params, batch)))


REFUSED = {
    "undeclared aux": (partial(aux_step, aux=None), TraceError, "2 auxiliary outputs.*aux="),
    "loss of rows": (partial(mean_step, loss=lambda params, batch: activations(params, batch)[:, 0]), TraceError, "one scalar"),
    "second value_and_grad": (two_losses, TraceError, "one alpa_hpc.value_and_grad whose result it uses, found 2"),
    "value_and_grad in a loss": (
        partial(mean_step, loss=lambda *args: alpa_hpc.value_and_grad(mean_loss)(*args)[0]),
        TraceError,
        "use jax.v",
    ),
    "endless loop": (partial(mean_step, loss=endless), TraceError, "through 'while' .*test_api.py, line .*Use jax.lax.scan"),
    "fault of the loss": (partial(mean_step, loss=lambda params, batch: batch["no"]), TraceError, "KeyError: 'no' .*test_api.py"),
    "vector metric": (vector_metric, TraceError, "metric 'steps' must be a scalar"),
    "complex metric": (complex_metric, TraceError, "metric 'phase' must be a real number, found complex64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_cannot_be_cut_are_refused(name: str) -> None:
    step, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        parallelize(step).start(make_state(), BATCHES[0])


def test_keys_and_what_is_no_array_live_in_the_state() -> None:
    state = {"inner": make_state(), "key": jax.random.key(0), "name": "mine", "rate": 0.5}
    training = parallelize(with_key).start(state, BATCHES[0])
    key = jax.random.key(0)
    for _ in range(2):
        metrics = training.step(BATCHES[0])
        key = jax.random.fold_in(key, 1)
        assert metrics["drawn"] == pytest.approx(0.5 * float(jax.random.uniform(key)))
    found = training.state()
    assert jax.random.key_impl(found["key"]) == jax.random.key_impl(key)
    assert np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(key))
    assert (found["name"], found["rate"], int(found["inner"]["steps"])) == ("mine", 0.5, 2)


def test_rows_must_divide_into_microbatches() -> None:
    with pytest.raises(TraceError, match="18 rows do not divide into 4 microbatches"):
        parallelize(mean_step).start(make_state(), make_batch(0, rows=18))


@pytest.mark.parametrize("strange", ["text", np.asarray(["text"]), object()])
def test_a_batch_holds_arrays(strange: Any) -> None:
    with pytest.raises(TraceError, match="leaf 'y' of the batch is .*expected an array of numbers"):
        parallelize(never_traced).find_plan(make_state(), {**BATCHES[0], "y": strange})


@pytest.mark.parametrize(("name", "found"), [("absent/plan.json", "no folder .*absent: make it first"), (".", "a folder of that name")])
def test_a_plan_is_written_only_where_a_file_can_be(mlp: ParallelTraining, tmp_path: Path, name: str, found: str) -> None:
    with pytest.raises(PlanError, match=f"cannot be written, expected the name of a file .*found {found}"):
        alpa_hpc.save_plan(mlp.plan, tmp_path / name)


def never_traced(state: Any, batch: Any) -> Any:
    raise AssertionError("traced, though it cannot run")


def test_too_few_devices_are_told_before_planning() -> None:
    with pytest.raises(LaunchError, match=r'16 devices, this process has 8 .*jax.config.update\("jax_num_cpu_devices", 16\)'):
        parallelize(never_traced, cluster=replace(SLOW_BETWEEN, num_nodes=4)).start(make_state(), BATCHES[0])


def test_a_state_of_shapes_cannot_start() -> None:
    with pytest.raises(TraceError, match="must hold arrays"):
        parallelize(mean_step).start(shapes_of(make_state()), BATCHES[0])


def test_a_model_that_fits_nowhere_is_refused() -> None:
    small = replace(SLOW_BETWEEN, device=replace(DEVICE, memory=2_000))
    with pytest.raises(InfeasibleError, match="missing"):
        parallelize(mean_step, cluster=small).start(make_state(), BATCHES[0])


@pytest.mark.parametrize("changed", [{"step": masked_step}, {"num_microbatches": 2}, {"layers": replace(DEFAULT_LAYERS, num_layers=2)}])
def test_a_plan_of_another_step_is_refused(mlp: ParallelTraining, changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"step": mean_step, "plan": mlp.plan, "cluster": TIGHT, **changed}
    with pytest.raises(PlanError, match="another training step"):
        parallelize(**arguments).start(make_state(), BATCHES[0])


def test_a_given_plan_is_checked_without_starting(mlp: ParallelTraining) -> None:
    state, batch = shapes_of(make_state()), shapes_of(BATCHES[0])
    assert parallelize(mean_step, plan=mlp.plan, cluster=TIGHT).find_plan(state, batch) is mlp.plan
    with pytest.raises(PlanError, match="another training step"):
        parallelize(masked_step, plan=mlp.plan, cluster=TIGHT).find_plan(state, batch)
    with pytest.raises(PlanError, match="the schedule 'none', expected one of one_f_one_b"):
        parallelize(mean_step, plan=replace(mlp.plan, schedule="none"), cluster=TIGHT).start(make_state(), BATCHES[0])


def test_a_plan_of_another_cluster_is_refused(mlp: ParallelTraining) -> None:
    with pytest.raises(PlanError, match="for a cluster of 2 x 4 devices, one node has 1 x 4 devices"):
        parallelize(mean_step, plan=mlp.plan, cluster=ONE_NODE).start(make_state(), BATCHES[0])


@pytest.mark.parametrize(
    ("text", "message"), [(None, "is not a file"), ('{"kind": "alpa', "not complete JSON"), ("{}", "no plan of alpa_hpc")]
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=message):
        alpa_hpc.load_plan(path)


def test_batches_of_other_shapes_are_refused(mlp: ParallelTraining) -> None:
    kept = mlp.state()
    for call in (mlp.step, mlp.score):
        with pytest.raises(TraceError, match=r"batch leaf 'mask' is float32\[20\], expected float32\[16\]"):
            call(make_batch(0, rows=20))
        with pytest.raises(TraceError, match="structure"):
            call({"x": BATCHES[0]["x"]})
        with pytest.raises(TraceError, match=r"batch leaf 'x' is int32\[16,32\]|batch leaf 'x' is int32\[16, 32\]"):
            call({**BATCHES[0], "x": np.zeros((ROWS, WIDTH), np.int32)})
    assert all(np.array_equal(one, other) for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(mlp.state()), strict=True))
