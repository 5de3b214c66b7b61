"""The GPT has the parameters and FLOP of the paper's formulas, and learns."""

import math

import jax
import jax.numpy as jnp
import pytest

from alpa_hpc.models.gpt import GPT

SMALL = GPT(num_layers=2, hidden=16, num_heads=2, vocab=32, sequence=8)


def tokens(model: GPT, rows: int = 4) -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(1), (rows, model.sequence + 1), 0, model.vocab)}


def test_number_of_parameters_is_the_formula():
    params = jax.eval_shape(SMALL.init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == SMALL.num_params() == 2 * (12 * 256 + 13 * 16) + 32 * 17


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions", "petaflop"),
    [(24, 1024, 16, None, 3.285), (32, 2560, 32, 2.6486, 23.343), (48, 8192, 64, 39.079, 333.653)],
)
def test_paper_sizes(layers, hidden, heads, billions, petaflop):
    model = GPT(num_layers=layers, hidden=hidden, num_heads=heads, vocab=51200, sequence=1024)
    assert model.iteration_flops(1024, remat=True) / 1e15 == pytest.approx(petaflop, abs=1e-3)
    if billions:
        assert model.num_params() / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_loss_is_the_logarithm_of_the_vocabulary(dtype):
    model = GPT(num_layers=2, hidden=16, num_heads=2, vocab=32, sequence=8, dtype=dtype)
    loss = jax.jit(model.loss)(model.init(jax.random.key(0)), tokens(model), jax.random.key(0))
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(math.log(32), abs=0.05)


def test_attention_is_causal():
    params, batch = SMALL.init(jax.random.key(0)), tokens(SMALL)
    later = jax.grad(lambda x: _loss_of_first(params, x, batch["tokens"]))(jnp.zeros((SMALL.sequence, SMALL.hidden)))
    assert jnp.allclose(later[1:], 0, atol=1e-8) and jnp.abs(later[0]).max() > 1e-4


def _loss_of_first(params, shift, inputs):
    """Sum of the first position's outputs of one block when its input is shifted."""
    x = params["embedding"][inputs[:, :-1]] + shift
    out, _ = SMALL._block(params["blocks"][0], x, jax.random.key(0))
    return jnp.sum(jnp.sin(out[:, 0]))


def test_training_lowers_the_loss():
    params, batch = SMALL.init(jax.random.key(0)), tokens(SMALL)
    step = jax.jit(lambda p: jax.tree.map(lambda a, g: a - 0.5 * g, p, jax.grad(SMALL.loss)(p, batch, jax.random.key(0))))
    before = SMALL.loss(params, batch, jax.random.key(0))
    for _ in range(60):
        params = step(params)
    assert SMALL.loss(params, batch, jax.random.key(0)) < before - 0.5


def test_dropout_depends_on_the_key_alone():
    model = GPT(num_layers=2, hidden=16, num_heads=2, vocab=32, sequence=8, dropout=0.5)
    params, batch = model.init(jax.random.key(0)), tokens(model)
    loss = jax.jit(model.loss)
    assert loss(params, batch, jax.random.key(1)) == loss(params, batch, jax.random.key(1))
    assert loss(params, batch, jax.random.key(1)) != loss(params, batch, jax.random.key(2))


@pytest.mark.parametrize("heads", [3, 32])
def test_heads_share_out_the_hidden_dims(heads: int):
    with pytest.raises(ValueError, match=f"hidden is 16 and num_heads {heads}, expected a multiple of num_heads"):
        GPT(num_layers=2, hidden=16, num_heads=heads, vocab=32, sequence=8)
