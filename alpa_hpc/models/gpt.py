"""A GPT-2 like language model in plain JAX on one device: parameters and tokens -> mean loss.

Parameters number L * (12 H^2 + 13 H) + V * (H + 1): tied embedding, output bias, no final LayerNorm, sinusoids as positions.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from alpa_hpc.models.sizes import check_counts, check_dtype, check_share
from alpa_hpc.models.transformer import (
    Params,
    attention,
    check_heads,
    cross_entropy,
    depth_scale,
    embedded,
    fresh,
    fresh_attention,
    fresh_mlp,
    layer_norm,
    mlp,
    positions,
    token_shapes,
    vocabulary_logits,
)

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

    def __post_init__(self) -> None:
        check_counts(self, num_layers=1, hidden=1, num_heads=1, vocab=2, sequence=1)
        check_heads(self.hidden, self.num_heads)
        check_share(self, "dropout", below=1)
        check_dtype(self.dtype)

    def init(self, key: jax.Array) -> Tree:
        """Random float32 parameters: {"blocks": [{...}, ...], "embedding", "output_bias"}."""
        embedding_key, *block_keys = jax.random.split(key, self.num_layers + 1)
        return {
            "blocks": [self._init_block(block_key) for block_key in block_keys],
            "embedding": fresh(embedding_key, (self.vocab, self.hidden)),
            "output_bias": jnp.zeros((self.vocab,)),
        }

    def _init_block(self, key: jax.Array) -> Params:
        qkv_key, out_key, up_key, down_key = jax.random.split(key, 4)
        out_scale = depth_scale(self.num_layers)
        return {
            **fresh_attention(qkv_key, out_key, self.hidden, self.num_heads, out_scale),
            **fresh_mlp(up_key, down_key, self.hidden, 4 * self.hidden, out_scale),
        }

    def batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch: {"tokens": int32 [batch_size, sequence + 1]}."""
        return token_shapes(batch_size, self.sequence)

    def loss(self, params: Tree, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        """Mean cross-entropy, float32, of each next token; `key` draws the dropout masks (unread if the rate is 0)."""
        tokens = batch["tokens"]
        embedding = params["embedding"].astype(self.dtype)
        x = embedded(embedding, tokens) + positions(self.sequence, self.hidden).astype(self.dtype)
        seed = jax.random.key_data(key) if self.dropout > 0 else key
        for block in params["blocks"]:
            x, seed = self._block(block, x, seed)
        return cross_entropy(vocabulary_logits(x, embedding) + params["output_bias"], tokens[:, 1:])

    def _block(self, block: Params, x: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys: list[jax.Array] = []
        if self.dropout > 0:  # the chain makes every block the same program; fold_in(key, number) would not
            next_key, *keys = jax.random.split(jax.random.wrap_key_data(seed), 3)
            seed = jax.random.key_data(next_key)
        attended = attention(block, layer_norm(x, block["norm1_scale"], block["norm1_bias"]))
        x = x + self._dropped(attended, keys[:1])
        fed = mlp(block, layer_norm(x, block["norm2_scale"], block["norm2_bias"]))
        return x + self._dropped(fed, keys[1:]), seed

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
