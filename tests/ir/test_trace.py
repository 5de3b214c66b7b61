"""Bad steps are refused with their reason; what is computed before the loss is split as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.grad import AuxKind, SumCount, value_and_grad
from alpa_hpc.ir.reference import microbatch_inputs, reference_step
from alpa_hpc.ir.trace import Split, trace_step

STATE = {"w": jnp.ones((3, 3)), "scale": jnp.asarray(2.0), "key": jax.random.key(5)}
BATCH = {"x": jnp.arange(12.0).reshape(4, 3)}


def loss(w, batch):
    return jnp.mean(jnp.tanh(batch["x"] @ w))


def simple(grad):
    """A step whose loss part is `grad(state, batch) -> (value, gradient of w)`."""

    def step(state, batch):
        value, gradient = grad(state, batch)
        return dict(state, w=state["w"] - gradient), {"loss": value}

    return step


def trace(step, state=None, batch=None, num_microbatches=2):
    return trace_step(step, STATE if state is None else state, BATCH if batch is None else batch, num_microbatches=num_microbatches)


def scan_once(function, w):
    return jax.lax.scan(lambda carry, _: (carry, function(carry)), w, None, length=1)[1]


GOOD = simple(lambda state, batch: value_and_grad(loss)(state["w"], batch))


def wide_loss(w, batch):
    with jax.enable_x64():
        return loss(w, batch) + jnp.mean(w.astype(jnp.float64)).astype(jnp.float32)


BAD_GRADIENTS = {
    "needs one alpa_hpc.value_and_grad .* found 0": lambda s, b: jax.value_and_grad(loss)(s["w"], b),
    "cast inside the loss instead": lambda s, b: value_and_grad(loss)(s["w"] * 1.5, b),
    "must return one scalar, found float32.4.. Reduce": lambda s, b: value_and_grad(lambda w: b["x"][:, 0] * w[0, 0])(s["w"]),
    "auxiliary outputs, and it is not said how": lambda s, b: value_and_grad(lambda w: (loss(w, b), w[0, 0]), has_aux=True)(s["w"]),
    "is under vmap": lambda s, b: jax.tree.map(lambda x: x[0], jax.vmap(value_and_grad(loss), (None, 0))(s["w"], {"x": b["x"][:, None]})),
    "is under 'scan'": lambda s, b: jax.tree.map(lambda x: x[0], scan_once(lambda w: value_and_grad(loss)(w, b), s["w"])),
    "is under 'cond'": lambda s, b: jax.lax.cond(s["scale"] > 0, lambda: value_and_grad(loss)(s["w"], b), lambda: (jnp.zeros(()), s["w"])),
    "is differentiated again": lambda s, b: jax.value_and_grad(lambda w: value_and_grad(loss)(w, b)[0])(s["w"]),
    "reads parameter 'w'": lambda s, b: value_and_grad(lambda w, v: loss(w, b) * v)(s["w"], jnp.sum(s["w"])),
    "cannot be split by rows into 2": lambda s, b: value_and_grad(lambda w, mean: loss(w, b) * mean)(s["w"], jnp.mean(b["x"])),
    "differentiates the first argument": lambda s, b: value_and_grad(loss, argnums=1)(s["w"], b),
    "must return one scalar, found float32.. in a dict": lambda s, b: value_and_grad(lambda w: {"loss": jnp.mean(b["x"] @ w)})(s["w"]),
    "must return one scalar, found float32.., float32.. in a tuple": lambda s, b: value_and_grad(lambda w: (w[0, 0], w[0, 0]))(s["w"]),
    "loss: 'convert_element_type' makes float64.* under jax.enable_x64": lambda s, b: value_and_grad(wide_loss)(s["w"], b),
    "must return a pair of scalars": lambda s, b: value_and_grad(loss, reduction=SumCount())(s["w"], b),
    "must be of a floating dtype": lambda s, b: value_and_grad(lambda w: jnp.sum(w > 0))(s["w"]),
}


@pytest.mark.parametrize("message", BAD_GRADIENTS)
def test_bad_gradients_are_refused(message):
    place = r".*test_trace\.py, line \d+: " if message.startswith("is ") else ""
    with pytest.raises(TraceError, match=message + place):
        trace(simple(lambda s, b: jax.tree.map(lambda x: x if x.ndim == 0 else x.reshape(3, 3), BAD_GRADIENTS[message](s, b))))


def nested(params, batch):
    value, gradient = value_and_grad(loss)(params, batch)  # one within another
    return value + jnp.sum(gradient**2)


NESTED = {
    "plain": nested,
    "unused": lambda w, b: (nested(w, b), loss(w, b))[1],
    "jit": jax.jit(nested),
    "remat": jax.checkpoint(nested),
    "scan": lambda w, b: jnp.mean(scan_once(lambda v: nested(v, b), w)),
    "cond": lambda w, b: jax.lax.cond(jnp.sum(b["x"]) > 0, nested, loss, w, b),
    "vmap": lambda w, b: jnp.mean(jax.vmap(lambda x: nested(w, {"x": x[None]}))(b["x"])),
    "jax.grad": lambda w, b: jnp.mean(jax.grad(nested)(w, b)),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_value_and_grad_inside_the_loss_is_refused_by_name(name):
    with pytest.raises(TraceError, match="value_and_grad is called inside the loss of another, .* use jax.value_and_grad") as caught:
        trace(simple(lambda s, b: value_and_grad(NESTED[name])(s["w"], b)))
    assert "test_trace.py, line " in str(caught.value) and "# one within another)" in str(caught.value)


def test_one_that_jit_knows_from_outside_the_loss_is_refused_inside_it():
    gradient = jax.jit(value_and_grad(loss))

    def step(state, batch):
        value, update = gradient(state["w"], batch)
        other, _ = value_and_grad(lambda w: gradient(w, batch)[0])(state["w"])
        return dict(state, w=state["w"] - update), {"loss": value + other}

    jax.jit(step)(STATE, BATCH)
    with pytest.raises(TraceError, match="inside the loss of another"):
        trace(step)


def test_what_the_users_own_functions_raise_is_told_with_its_line():
    with pytest.raises(TraceError, match=r"^the loss raises KeyError: 'y' \(.*test_trace\.py, line \d+: "):
        trace(simple(lambda s, b: value_and_grad(lambda w: jnp.mean(b["y"] @ w))(s["w"])))
    with pytest.raises(TraceError, match=r"^the train step raises KeyError: 'v' \(.*test_trace\.py, line \d+: "):
        trace(simple(lambda s, b: value_and_grad(loss)(s["v"], b)))


def test_a_loss_that_reads_no_parameter_is_refused():
    with pytest.raises(TraceError, match="depends on none of the parameters"):
        trace(simple(lambda s, b: value_and_grad(lambda w: jnp.mean(b["x"]))(s["w"])))
    with pytest.raises(TraceError, match="depends on none of the parameters"):
        trace(simple(lambda s, b: value_and_grad(lambda w: jnp.float32(1.0))(s["w"])))


def test_second_value_and_grad_is_refused():
    def step(state, batch):
        first, a = value_and_grad(loss)(state["w"], batch)
        second, b = value_and_grad(loss)(state["w"], batch)
        return dict(state, w=state["w"] - a - b), {"loss": first + second}

    with pytest.raises(
        TraceError, match=r"found 2. Join several losses .*test_trace\.py, line \d+: first, a = .*test_trace\.py, line \d+: second, b = "
    ):
        trace(step)


def test_per_example_aux_is_refused():
    def step(state, batch):
        def loss_aux(w):
            y = jnp.tanh(batch["x"] @ w)
            return jnp.mean(y), y[:, 0]

        (value, aux), gradient = value_and_grad(loss_aux, has_aux=True, aux=AuxKind.LAST)(state["w"])
        return dict(state, w=state["w"] - gradient), {"loss": value, "aux": jnp.sum(aux)}

    with pytest.raises(TraceError, match="must not have a dim of the batch"):
        trace(step)


def returning(result):
    def step(state, batch):
        value, gradient = value_and_grad(loss)(state["w"], batch)
        return result(dict(state, w=state["w"] - gradient), value, batch)

    return step


BAD_RESULTS = {
    "changes from float32.3, 3. to bfloat16.3, 3.": lambda s, v, b: (dict(s, w=s["w"].astype(jnp.bfloat16)), {"loss": v}),
    "must have the structure of the state": lambda s, v, b: ({"w": s["w"]}, {"loss": v}),
    "metrics a dict": lambda s, v, b: (s, v),
    "flat dict of arrays": lambda s, v, b: (s, {"a": {"b": v, "c": v}}),
    "reads the batch": lambda s, v, b: (s, {"loss": v + jnp.sum(b["x"])}),
    "returns a part of its batch": lambda s, v, b: (s, {"loss": b["x"]}),
}


@pytest.mark.parametrize("message", BAD_RESULTS)
def test_bad_results_are_refused(message):
    with pytest.raises(TraceError, match=message):
        trace(returning(BAD_RESULTS[message]))


def test_bad_batches_are_refused():
    with pytest.raises(TraceError, match="4 rows do not divide into 3 microbatches"):
        trace(GOOD, num_microbatches=3)
    with pytest.raises(TraceError, match="same number of rows"):
        trace(GOOD, batch={"x": jnp.ones((4, 3)), "y": jnp.ones((5,))})
    with pytest.raises(TraceError, match="no array with rows"):
        trace(GOOD, batch={"x": jnp.ones(())})


def test_side_effects_are_refused():
    def noisy(w, batch):
        jax.debug.print("{}", w[0, 0])
        return loss(w, batch)

    with pytest.raises(TraceError, match="side effects"):
        trace(simple(lambda s, b: value_and_grad(noisy)(s["w"], b)))


def test_inputs_are_split_by_their_kind():
    def step(state, batch):
        key = jax.random.fold_in(state["key"], 3)
        doubled = batch["x"] * 2

        def noisy(w):
            return loss(w, {"x": doubled}) * state["scale"] + 0.0 * jax.random.uniform(key)

        value, gradient = jax.jit(value_and_grad(noisy))(state["w"])
        new_key, _ = jax.random.split(state["key"])
        return dict(state, w=state["w"] - gradient, key=new_key), {"loss": value}

    traced = trace(step)
    assert sorted(split.value for split in traced.splits) == ["key", "rows", "same"]
    assert [traced.state_names[leaf] for leaf in traced.params] == ["w"]
    first, second = microbatch_inputs(traced, dict(enumerate(traced.layout.arrays(STATE))), BATCH)
    rows, key, same = (traced.splits.index(split) for split in (Split.ROWS, Split.KEY, Split.SAME))
    np.testing.assert_array_equal(first[rows], BATCH["x"][:2] * 2)
    np.testing.assert_array_equal(second[rows], BATCH["x"][2:] * 2)
    assert second[same] == 2.0
    np.testing.assert_array_equal(second[key], jax.random.key_data(jax.random.fold_in(jax.random.fold_in(STATE["key"], 3), 1)))
    assert [(a.shape, a.dtype) for a in traced.batch_avals] == [(x.shape, x.dtype) for x in first]
    new_state, metrics = reference_step(traced, STATE, BATCH)
    value, gradient = jax.value_and_grad(lambda w: loss(w, {"x": BATCH["x"] * 2}) * 2)(STATE["w"])
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(new_state["w"], STATE["w"] - gradient, rtol=1e-6)
    assert jnp.all(jax.random.key_data(new_state["key"]) == jax.random.key_data(jax.random.split(STATE["key"])[0]))


def test_tracing_shapes_needs_no_arrays():
    state, batch = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree) for tree in (STATE, BATCH))
    traced = trace(GOOD, state, batch)
    assert traced.loss.in_avals[1].shape == (2, 3) and traced.num_rows == 4


def test_a_jitted_step_may_have_run_before_and_may_run_after():
    step = jax.jit(GOOD)
    before, _ = step(STATE, BATCH)
    traced = trace(step)
    after, metrics = step(STATE, BATCH)
    expected, _ = reference_step(traced, STATE, BATCH)
    np.testing.assert_allclose(before["w"], after["w"], rtol=1e-6)
    np.testing.assert_allclose(expected["w"], after["w"], rtol=1e-6)
    assert metrics["loss"].shape == ()


def test_what_follows_the_loss_is_traced_once_and_the_loss_at_both_sizes():
    rows, updates = [], []

    def counted(w, batch):
        rows.append(batch["x"].shape[0])
        return loss(w, batch)

    def step(state, batch):
        value, gradient = value_and_grad(counted)(state["w"], batch)
        updates.append(value.shape)
        return dict(state, w=state["w"] - gradient), {"loss": value}

    traced = trace(step)
    assert rows == [4, 2] and len(updates) == 1
    assert traced.loss.in_avals[1].shape == (2, 3)


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["plain", "jit"])
def test_the_loss_is_the_one_whose_result_is_used(wrap):
    def step(state, batch):
        value_and_grad(lambda w, b: 7 * loss(w, b))(state["w"], batch)
        value, gradient = value_and_grad(loss)(state["w"], batch)
        return dict(state, w=state["w"] - gradient), {"loss": value}

    for num_microbatches in (2, 1, 2):  # the jit has then seen both sizes
        _, metrics = reference_step(trace(wrap(step), num_microbatches=num_microbatches), STATE, BATCH)
        np.testing.assert_allclose(metrics["loss"], loss(STATE["w"], BATCH), rtol=1e-6)
