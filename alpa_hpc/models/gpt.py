"""A GPT-2 like language model in plain JAX on one device: parameters and tokens -> mean loss.

Parameters number L * (12 H^2 + 13 H) + V * (H + 1): tied embedding, output bias, no final LayerNorm, sinusoids as positions.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, jax.Array]
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GPT:
    """Sizes of the model; `dtype` is the dtype of the computation (parameters are float32), `dropout` the rate behind attention and MLP."""

    num_layers: int
    hidden: int
    num_heads: int
    vocab: int
    sequence: int
    dtype: str = "float32"
    dropout: float = 0.0

    def init(self, key: jax.Array) -> Tree:
        """Random float32 parameters: {"blocks": [{...}, ...], "embedding", "output_bias"}."""
        embedding_key, *block_keys = jax.random.split(key, self.num_layers + 1)
        return {
            "blocks": [self._init_block(block_key) for block_key in block_keys],
            "embedding": 0.02 * jax.random.normal(embedding_key, (self.vocab, self.hidden)),
            "output_bias": jnp.zeros((self.vocab,)),
        }

    def _init_block(self, key: jax.Array) -> Params:
        hidden, heads, size = self.hidden, self.num_heads, self.hidden // self.num_heads
        qkv_key, out_key, up_key, down_key = jax.random.split(key, 4)
        depth_scale = 0.02 / math.sqrt(2 * self.num_layers)
        return {
            "norm1_scale": jnp.ones((hidden,)),
            "norm1_bias": jnp.zeros((hidden,)),
            "qkv": 0.02 * jax.random.normal(qkv_key, (hidden, 3, heads, size)),
            "qkv_bias": jnp.zeros((3, heads, size)),
            "out": depth_scale * jax.random.normal(out_key, (heads, size, hidden)),
            "out_bias": jnp.zeros((hidden,)),
            "norm2_scale": jnp.ones((hidden,)),
            "norm2_bias": jnp.zeros((hidden,)),
            "up": 0.02 * jax.random.normal(up_key, (hidden, 4 * hidden)),
            "up_bias": jnp.zeros((4 * hidden,)),
            "down": depth_scale * jax.random.normal(down_key, (4 * hidden, hidden)),
            "down_bias": jnp.zeros((hidden,)),
        }

    def batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch: {"tokens": int32 [batch_size, sequence + 1]}."""
        return {"tokens": jax.ShapeDtypeStruct((batch_size, self.sequence + 1), jnp.int32)}

    def loss(self, params: Tree, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        """Mean cross-entropy, float32, of each next token; `key` draws the dropout masks (unread if the rate is 0)."""
        tokens = batch["tokens"]
        embedding = params["embedding"].astype(self.dtype)
        x = jnp.take(embedding, tokens[:, :-1], axis=0, mode="clip") + _positions(self.sequence, self.hidden).astype(self.dtype)
        seed = jax.random.key_data(key) if self.dropout > 0 else key
        for block in params["blocks"]:
            x, seed = self._block(block, x, seed)
        # converted after the product, so that its gradient is a product in `dtype` again
        logits = lax.dot_general(x, embedding, (((2,), (1,)), ((), ()))).astype(jnp.float32)
        return _cross_entropy(logits + params["output_bias"], tokens[:, 1:])

    def _block(self, block: Params, x: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys: list[jax.Array] = []
        if self.dropout > 0:  # the chain makes every block the same program; fold_in(key, number) would not
            next_key, *keys = jax.random.split(jax.random.wrap_key_data(seed), 3)
            seed = jax.random.key_data(next_key)
        attended = self._attention(block, _layer_norm(x, block["norm1_scale"], block["norm1_bias"]))
        x = x + self._dropped(attended, keys[:1])
        fed = self._mlp(block, _layer_norm(x, block["norm2_scale"], block["norm2_bias"]))
        return x + self._dropped(fed, keys[1:]), seed

    def _attention(self, block: Params, x: jax.Array) -> jax.Array:
        weight, bias = block["qkv"].astype(x.dtype), block["qkv_bias"].astype(x.dtype)
        qkv = lax.dot_general(x, weight, (((2,), (0,)), ((), ()))) + bias
        q, k, v = (lax.index_in_dim(qkv, part, axis=2, keepdims=False) for part in range(3))
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        shape = (self.sequence, self.sequence)
        visible = lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(jnp.int32, shape, 1)
        weights = _softmax(jnp.where(visible, scores, -1e9)).astype(x.dtype)
        mixed = jnp.einsum("bhst,bthd->bshd", weights, v)
        return lax.dot_general(mixed, block["out"].astype(x.dtype), (((2, 3), (0, 1)), ((), ()))) + block["out_bias"].astype(x.dtype)

    def _mlp(self, block: Params, x: jax.Array) -> jax.Array:
        up = lax.dot_general(x, block["up"].astype(x.dtype), (((2,), (0,)), ((), ()))) + block["up_bias"].astype(x.dtype)
        return lax.dot_general(jax.nn.gelu(up), block["down"].astype(x.dtype), (((2,), (0,)), ((), ()))) + block["down_bias"].astype(
            x.dtype
        )

    def _dropped(self, x: jax.Array, keys: list[jax.Array]) -> jax.Array:
        if not keys:
            return x
        kept = jax.random.bernoulli(keys[0], 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0)

    def num_params(self) -> int:
        """L * (12 H^2 + 13 H) + V * (H + 1)."""
        return self.num_layers * (12 * self.hidden**2 + 13 * self.hidden) + self.vocab * (self.hidden + 1)

    def iteration_flops(self, batch_size: int, remat: bool) -> float:  # noqa: FBT001 - the formula's own switch
        """FLOP of one iteration by the paper's formula: f B S H^2 L (1 + S / 6H) + 6 B S H V, f = 96 with recomputation, else 72."""
        factor = 96 if remat else 72
        tokens = batch_size * self.sequence
        blocks = factor * tokens * self.hidden**2 * self.num_layers * (1 + self.sequence / (6 * self.hidden))
        return blocks + 6 * tokens * self.hidden * self.vocab


def _positions(sequence: int, hidden: int) -> jax.Array:
    """Fixed sinusoids [sequence, hidden], sine in even columns, cosine in odd ones.

    They have the size of fresh embeddings: at size 1 they drown the tokens.
    """
    position = lax.broadcasted_iota(jnp.float32, (sequence, hidden), 0)
    column = lax.broadcasted_iota(jnp.int32, (sequence, hidden), 1)
    odd = column & 1
    angle = position * jnp.exp((column - odd).astype(jnp.float32) * (-math.log(10000.0) / hidden))
    return 0.02 * jnp.sin(angle + odd.astype(jnp.float32) * (math.pi / 2))


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normal = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return (normal * scale + bias).astype(x.dtype)


def _softmax(scores: jax.Array) -> jax.Array:
    powers = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    normaliser = jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1)) + highest[..., 0]
    is_label = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == labels[..., None]
    return jnp.mean(normaliser - jnp.sum(jnp.where(is_label, logits, 0), axis=-1))
