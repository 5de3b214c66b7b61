"""A Llama-style decoder (Touvron et al., 2023) in plain JAX on one device: parameters and tokens -> mean loss.

RMSNorm before each part and at the end, rotary positions, queries in groups that share a key and a value (Ainslie et al., 2023), SwiGLU,
no biases, no tying of embedding and output. Attention is written out, with all its scores [batch, heads, sequence, sequence].
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_hpc.models.sizes import check_counts, check_dtype, check_positive
from alpa_hpc.models.transformer import (
    Params,
    causal_softmax,
    cross_entropy,
    depth_scale,
    embedded,
    fresh,
    token_shapes,
    vocabulary_logits,
)

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Llama:
    """Sizes of the model.

    num_kv_heads: heads of keys and values, a divisor of num_heads; equal to it, there are no groups
    mlp_width:    of the gated feed-forward network
    rotary_base:  the slowest pair of dims turns by about 1 / rotary_base a position
    dtype:        of the computation; parameters are float32, and so are norms, softmax, rotation and the loss
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    vocab: int
    sequence: int
    rotary_base: float = 10000.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_counts(self, num_layers=1, hidden=1, num_heads=1, num_kv_heads=1, mlp_width=1, vocab=2, sequence=1)
        check_positive(self, "rotary_base")
        check_dtype(self.dtype)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}, expected a multiple of num_kv_heads={self.num_kv_heads}")
        if self.hidden % (2 * self.num_heads):
            raise ValueError(f"hidden is {self.hidden}, expected a multiple of 2 * num_heads={2 * self.num_heads}: dims turn in pairs")

    @property
    def head_size(self) -> int:
        """Dims of a head."""
        return self.hidden // self.num_heads

    def init(self, key: jax.Array) -> Tree:
        """Random float32 parameters: {"blocks": [{...}, ...], "embedding", "norm", "output"}."""
        embedding_key, output_key, *block_keys = jax.random.split(key, self.num_layers + 2)
        return {
            "blocks": [self._init_block(block_key) for block_key in block_keys],
            "embedding": fresh(embedding_key, (self.vocab, self.hidden)),
            "norm": jnp.ones((self.hidden,)),
            "output": fresh(output_key, (self.vocab, self.hidden)),
        }

    def _init_block(self, key: jax.Array) -> Params:
        hidden, width, size, shared = self.hidden, self.mlp_width, self.head_size, self.num_kv_heads
        group, out_scale = self.num_heads // shared, depth_scale(self.num_layers)
        query_key, key_key, value_key, out_key, gate_key, up_key, down_key = jax.random.split(key, 7)
        return {
            "norm1": jnp.ones((hidden,)),
            "query": fresh(query_key, (hidden, shared, group, size)),
            "key": fresh(key_key, (hidden, shared, size)),
            "value": fresh(value_key, (hidden, shared, size)),
            "out": fresh(out_key, (shared, group, size, hidden), out_scale),
            "norm2": jnp.ones((hidden,)),
            "gate": fresh(gate_key, (hidden, width)),
            "up": fresh(up_key, (hidden, width)),
            "down": fresh(down_key, (width, hidden), out_scale),
        }

    def batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch: {"tokens": int32 [batch_size, sequence + 1]}."""
        return token_shapes(batch_size, self.sequence)

    def loss(self, params: Tree, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        """Mean cross-entropy, float32, of each next token; no key is read."""
        del key
        tokens = batch["tokens"]
        x = embedded(params["embedding"].astype(self.dtype), tokens)
        for block in params["blocks"]:
            x = x + self._attention(block, rms_norm(x, block["norm1"]))
            x = x + _gated_mlp(block, rms_norm(x, block["norm2"]))
        logits = vocabulary_logits(rms_norm(x, params["norm"]), params["output"].astype(self.dtype))
        return cross_entropy(logits, tokens[:, 1:])

    def _attention(self, block: Params, x: jax.Array) -> jax.Array:
        """Letters: b batch, s and t positions, k heads of keys and values, g queries that share one, d dims of a head, h hidden.

        Dims are in the order in which products leave them, so that nothing as large as the scores is ever transposed.
        """
        query, key, value, out = (block[name].astype(x.dtype) for name in ("query", "key", "value", "out"))
        queries = rotated(jnp.einsum("bsh,hkgd->bskgd", x, query), self.rotary_base)
        keys = rotated(jnp.einsum("bth,hkd->btkd", x, key), self.rotary_base)
        values = jnp.einsum("bth,hkd->btkd", x, value)
        scores = jnp.einsum("bskgd,btkd->bksgt", queries, keys).astype(jnp.float32) / math.sqrt(self.head_size)
        mixed = jnp.einsum("bksgt,btkd->bksgd", causal_softmax(scores, queries=-3).astype(x.dtype), values)
        return jnp.einsum("bksgd,kgdh->bsh", mixed, out)

    def num_params(self) -> int:
        """L * (2 H^2 + 2 H K D + 3 H W + 2 H) + 2 V H + H, K heads of keys and values of D dims, W the network's width."""
        hidden = self.hidden
        attended = 2 * hidden**2 + 2 * hidden * self.num_kv_heads * self.head_size
        return self.num_layers * (attended + 3 * hidden * self.mlp_width + 2 * hidden) + 2 * self.vocab * hidden + hidden


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Norm over the last dim to a mean square of 1."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rotated(x: jax.Array, base: float) -> jax.Array:
    """Heads [batch, position, ..., dims]: dims i and i + dims/2 are a pair, turned by position * base^(-2 i / dims) (Su et al., 2021)."""
    half = x.shape[-1] // 2
    shape = (x.shape[1], *(1,) * (x.ndim - 3), half)
    position = lax.broadcasted_iota(jnp.float32, shape, 0)
    pair = lax.broadcasted_iota(jnp.float32, shape, len(shape) - 1)
    angle = position * jnp.exp(pair * (-math.log(base) / half))
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    wide = x.astype(jnp.float32)
    left, right = wide[..., :half], wide[..., half:]
    return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1).astype(x.dtype)


def _gated_mlp(block: Params, x: jax.Array) -> jax.Array:
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x))."""
    gate, up, down = (block[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down
