"""The Llama equals a plain one with complex rotations and one head at a time, and has the published numbers of parameters."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_hpc.models.llama import Llama, rotated
from tests.models import plain

TINY = Llama(num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, mlp_width=24, vocab=32, sequence=8, rotary_base=100.0)


def tokens(model: Llama, rows: int = 4) -> dict[str, Any]:
    return {"tokens": np.random.default_rng(1).integers(0, model.vocab, (rows, model.sequence + 1)).astype(np.int32)}


@functools.cache
def fresh(model: Llama) -> Any:
    return jax.jit(model.init)(jax.random.key(0))


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "kv_heads", "width", "vocab", "published"),
    [
        (22, 2048, 32, 4, 5632, 32000, 1_100_048_384),  # TinyLlama-1.1B
        (32, 4096, 32, 32, 11008, 32000, 6_738_415_616),  # Llama-2-7B
        (32, 4096, 32, 8, 14336, 128256, 8_030_261_248),  # Llama-3-8B
        (80, 8192, 64, 8, 28672, 32000, 68_976_648_192),  # Llama-2-70B
    ],
)
def test_published_sizes(layers: int, hidden: int, heads: int, kv_heads: int, width: int, vocab: int, published: int) -> None:
    model = Llama(layers, hidden, heads, kv_heads, width, vocab, sequence=8)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == model.num_params() == published


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_loss_is_the_logarithm_of_the_vocabulary(dtype: str) -> None:
    model = Llama(num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, mlp_width=24, vocab=32, sequence=8, dtype=dtype)
    loss = jax.jit(model.loss)(fresh(model), tokens(model), jax.random.key(0))
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(math.log(32), abs=0.05)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_loss_and_gradient_are_those_of_a_plain_one(kv_heads: int) -> None:
    model = Llama(num_layers=2, hidden=16, num_heads=4, num_kv_heads=kv_heads, mlp_width=24, vocab=32, sequence=8, rotary_base=100.0)
    params, batch = plain.drawn(model), tokens(model, rows=2)
    found = jax.jit(jax.value_and_grad(model.loss))(params, batch, jax.random.key(0))
    expected = jax.jit(jax.value_and_grad(lambda p: plain.llama_loss(model, p, batch["tokens"])))(params)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    assert plain.relative_error(found[1], expected[1]) < 1e-4


def test_rotation_keeps_lengths_and_products_depend_on_distance_alone() -> None:
    draw = np.random.default_rng(0)
    drawn = np.broadcast_to(draw.standard_normal((2, 1, 6), dtype=np.float32), (2, 9, 6))
    query, key = np.asarray(jax.jit(rotated, static_argnums=1)(drawn, 100.0))
    np.testing.assert_allclose(np.linalg.norm(query, axis=-1), np.linalg.norm(query[0]), rtol=1e-5)
    products = np.asarray(query @ key.T)
    for distance in range(-8, 9):
        np.testing.assert_allclose(np.diagonal(products, distance), products.diagonal(distance)[0], rtol=1e-3, atol=1e-5)
    assert np.ptp([products.diagonal(distance)[0] for distance in range(-8, 9)]) > 0.1


def test_later_tokens_do_not_matter() -> None:
    params, batch = plain.drawn(TINY), tokens(TINY, rows=1)["tokens"]
    x = params["embedding"][batch[:, :-1]]
    gradient = jax.jit(jax.grad(lambda x: TINY._attention(params["blocks"][0], x)[0, 3].sum()))(x)
    seen = np.abs(gradient[0]).max(axis=-1)
    assert (seen[:4] > 1e-6).all() and (seen[4:] == 0).all()


@pytest.mark.parametrize(("change", "message"), [({"num_kv_heads": 3}, "multiple of num_kv_heads=3"), ({"hidden": 12}, "hidden is 12")])
def test_sizes_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    sizes = {"num_layers": 1, "hidden": 16, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 8, "vocab": 8, "sequence": 8}
    with pytest.raises(ValueError, match=message):
        Llama(**{**sizes, **change})  # pyright: ignore[reportArgumentType]


def test_training_lowers_the_loss() -> None:
    params, batch = fresh(TINY), tokens(TINY)
    value_and_grad = jax.jit(jax.value_and_grad(TINY.loss))
    losses: list[float] = []
    for _ in range(60):
        loss, gradients = value_and_grad(params, batch, jax.random.key(0))
        params = jax.tree.map(lambda a, g: np.asarray(a) - 0.5 * np.asarray(g), params, gradients)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
