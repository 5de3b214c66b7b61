"""What the language models share: attention, feed-forward network, norms, positions and the loss, as plain functions.

Weights are float32 and are cast to the dtype of the activations where they are used; norms, softmax and the loss are computed in float32.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, jax.Array]

FRESH_SCALE = 0.02  # standard deviation of fresh weights, as GPT-2's


def token_shapes(batch_size: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of text: {"tokens": int32 [batch_size, sequence + 1]}."""
    return {"tokens": jax.ShapeDtypeStruct((batch_size, sequence + 1), jnp.int32)}


def fresh(key: jax.Array, shape: tuple[int, ...], scale: float = FRESH_SCALE) -> jax.Array:
    """Float32 weights drawn from a normal distribution."""
    return scale * jax.random.normal(key, shape)


def depth_scale(num_layers: int) -> float:
    """Standard deviation of the weights that write into the residual stream, of which there are two a layer."""
    return FRESH_SCALE / math.sqrt(2 * num_layers)


def check_heads(hidden: int, num_heads: int) -> None:
    """Raise ValueError where heads do not share out the hidden dims."""
    if hidden % num_heads:
        raise ValueError(f"hidden is {hidden} and num_heads {num_heads}, expected a multiple of num_heads: heads share it out evenly")


def fresh_attention(qkv_key: jax.Array, out_key: jax.Array, hidden: int, num_heads: int, out_scale: float) -> Params:
    """Norm and multi-head attention with biases: 4 H^2 + 6 H parameters."""
    size = hidden // num_heads
    return {
        "norm1_scale": jnp.ones((hidden,)),
        "norm1_bias": jnp.zeros((hidden,)),
        "qkv": fresh(qkv_key, (hidden, 3, num_heads, size)),
        "qkv_bias": jnp.zeros((3, num_heads, size)),
        "out": fresh(out_key, (num_heads, size, hidden), out_scale),
        "out_bias": jnp.zeros((hidden,)),
    }


def fresh_mlp(up_key: jax.Array, down_key: jax.Array, hidden: int, width: int, out_scale: float) -> Params:
    """Norm and two matrices with biases: 2 H W + 3 H + W parameters."""
    return {
        "norm2_scale": jnp.ones((hidden,)),
        "norm2_bias": jnp.zeros((hidden,)),
        "up": fresh(up_key, (hidden, width)),
        "up_bias": jnp.zeros((width,)),
        "down": fresh(down_key, (width, hidden), out_scale),
        "down_bias": jnp.zeros((hidden,)),
    }


def attention(block: Params, x: jax.Array) -> jax.Array:
    """Causal attention of normed activations [batch, sequence, hidden]."""
    weight, bias = block["qkv"].astype(x.dtype), block["qkv_bias"].astype(x.dtype)
    qkv = lax.dot_general(x, weight, (((2,), (0,)), ((), ()))) + bias
    q, k, v = (lax.index_in_dim(qkv, part, axis=2, keepdims=False) for part in range(3))
    scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    mixed = jnp.einsum("bhst,bthd->bshd", causal_softmax(scores).astype(x.dtype), v)
    return lax.dot_general(mixed, block["out"].astype(x.dtype), (((2, 3), (0, 1)), ((), ()))) + block["out_bias"].astype(x.dtype)


def mlp(block: Params, x: jax.Array) -> jax.Array:
    """The feed-forward network of normed activations [batch, sequence, hidden]."""
    up = lax.dot_general(x, block["up"].astype(x.dtype), (((2,), (0,)), ((), ()))) + block["up_bias"].astype(x.dtype)
    return lax.dot_general(jax.nn.gelu(up), block["down"].astype(x.dtype), (((2,), (0,)), ((), ()))) + block["down_bias"].astype(x.dtype)


def causal_softmax(scores: jax.Array, queries: int = -2) -> jax.Array:
    """Softmax over the last dim, keys; each query (along dim `queries`) sees the keys up to its own position."""
    shape = (scores.shape[queries], *(1,) * (-queries - 2), scores.shape[-1])
    visible = lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return softmax(jnp.where(visible, scores, -1e9))


def softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last dim."""
    powers = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Norm over the last dim to mean 0 and variance 1."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normal = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return (normal * scale + bias).astype(x.dtype)


def embedded(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `embedding` for all tokens of a batch but the last of each row."""
    return jnp.take(embedding, tokens[:, :-1], axis=0, mode="clip")


def positions(sequence: int, hidden: int) -> jax.Array:
    """Fixed sinusoids [sequence, hidden], sine in even columns, cosine in odd ones.

    They have the size of fresh embeddings: at size 1 they drown the tokens.
    """
    position = lax.broadcasted_iota(jnp.float32, (sequence, hidden), 0)
    column = lax.broadcasted_iota(jnp.int32, (sequence, hidden), 1)
    odd = column & 1
    angle = position * jnp.exp((column - odd).astype(jnp.float32) * (-math.log(10000.0) / hidden))
    return FRESH_SCALE * jnp.sin(angle + odd.astype(jnp.float32) * (math.pi / 2))


def vocabulary_logits(x: jax.Array, embedding: jax.Array) -> jax.Array:
    """Activations [batch, sequence, hidden] times a vocabulary's rows [vocab, hidden], float32."""
    # converted after the product, so that its gradient is a product in the dtype of x again
    return lax.dot_general(x, embedding, (((2,), (1,)), ((), ()))).astype(jnp.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels of -log softmax(logits)[label]; logits [..., classes], labels [...]."""
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    normaliser = jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1)) + highest[..., 0]
    is_label = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    return jnp.mean(normaliser - jnp.sum(jnp.where(is_label, logits, 0), axis=-1))
