"""Parameters in 16 bits with float32 originals: what is read, what is updated, and that a plan does it as one device does."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_hpc.errors import TraceError
from alpa_hpc.models.gpt import GPT
from alpa_hpc.training.masters import narrowed, originals_of, with_masters
from alpa_hpc.training.options import ParamDtype
from alpa_hpc.training.step import build_train_step
from tests.random_plans import Family, Plan, Variant, assert_equal, run_plan, tokens

MODEL = GPT(num_layers=2, hidden=16, num_heads=2, vocab=32, sequence=8, dtype="bfloat16")
NARROW = (ParamDtype.BFLOAT16, ParamDtype.FLOAT16)
ADAM = optax.adamw(1e-2)


class Fixed(GPT):
    """A model that insists on the dtype of its matrices."""

    def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
        if params["embedding"].dtype != jnp.float32:
            raise TypeError("float32 is wanted")
        return super().loss(params, batch, key)


def dtypes(tree: Any) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("dtype", NARROW)
def test_matrices_are_read_in_16_bits_and_everything_else_in_32(dtype: ParamDtype) -> None:
    state = build_train_step(MODEL, ADAM, dtype).init(jax.random.key(0))
    assert all((leaf.dtype == dtype.value) == (leaf.ndim > 1) for leaf in jax.tree.leaves(state["params"]))
    assert dtypes(state["masters"]) == {"float32"} == dtypes(originals_of(state))
    assert sum(leaf.size for leaf in jax.tree.leaves(state["masters"])) < MODEL.num_params(), "vectors have one copy"
    moments = [leaf for leaf in jax.tree.leaves(state["optimiser"]) if leaf.ndim]
    assert dtypes(moments) == {"float32"}


def test_a_model_in_32_bits_or_16_of_its_own_accord_has_no_masters() -> None:
    assert "masters" not in build_train_step(MODEL, ADAM).init(jax.random.key(0))
    own = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), MODEL.init(jax.random.key(0)))
    assert all(with_masters(own, dtype) == {"params": own} for dtype in ParamDtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_step_is_the_optimisers_on_the_originals(dtype: ParamDtype) -> None:
    train, batch = build_train_step(MODEL, ADAM, dtype), tokens(4, MODEL.vocab, MODEL.sequence + 1)
    state, originals, moments = train.init(jax.random.key(0)), MODEL.init(jax.random.key(0)), ADAM.init(MODEL.init(jax.random.key(0)))
    for _ in range(3):
        sums = jax.grad(MODEL.loss)(narrowed(originals, dtype), batch, jax.random.key(0))
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), sums)
        changes, moments = ADAM.update(gradients, moments, originals)
        originals = optax.apply_updates(originals, changes)
        state, metrics = train.step(state, batch)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradients), rtol=1e-6)
    jax.tree.map(lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7), originals_of(state), originals)
    jax.tree.map(np.testing.assert_array_equal, state["params"], narrowed(originals_of(state), dtype))


@given(st.integers(1, 400))
def test_steps_too_small_for_16_bits_are_not_lost(num_steps: int) -> None:
    change, held = 1e-5, with_masters({"w": jnp.ones((1, 1))}, ParamDtype.BFLOAT16)
    for _ in range(num_steps):
        held = with_masters(jax.tree.map(lambda leaf: leaf + change, originals_of(held)), ParamDtype.BFLOAT16)
    np.testing.assert_allclose(originals_of(held)["w"], 1 + num_steps * change, rtol=1e-5)


def test_a_model_that_cannot_read_its_matrices_in_16_bits_is_named_with_the_knob() -> None:
    sizes = {name: getattr(MODEL, name) for name in ("num_layers", "hidden", "num_heads", "vocab", "sequence")}
    with pytest.raises(TraceError, match=r"with training\.param_dtype=float16.* the model's loss raises TypeError: float32 is wanted"):
        build_train_step(Fixed(**sizes), ADAM, ParamDtype.FLOAT16)


PLANS = (Plan((Variant(0, 2, (2, 1), False, 1), Variant(2, 4, (1, 2), True, 2)), 2), Plan((Variant(0, 4, (2, 2), True, 3),), 4))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=["two stages", "one stage"])
def test_a_plan_equals_one_device(plan: Plan) -> None:
    train = build_train_step(
        replace(MODEL, dtype="float32"), optax.sgd(64.0), ParamDtype.FLOAT16
    )  # changes far larger than steps of 16 bits
    state = jax.jit(train.init)(jax.random.key(0))
    family = Family(train.step, state, lambda rows: tokens(rows, MODEL.vocab, MODEL.sequence + 1))
    assert_equal(family, plan, run_plan(family, plan), tolerance=5e-3)  # sums of 16 bits, in another order
