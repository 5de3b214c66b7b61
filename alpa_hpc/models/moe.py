"""A GShard mixture-of-experts language model (Lepikhin et al., 2021) in plain JAX on one device: parameters and tokens -> mean loss.

Layers come in pairs: a dense one as GPT's, and one whose feed-forward network is a choice of two out of E experts for each token. Tokens
are routed in groups, and in each group an expert has C = capacity_factor * group_size / E slots. Dispatch and combine are products with
one-hot masks [group, token, expert, slot]: all shapes are fixed, and splitting experts over devices turns the products into all-to-alls.

A group lies within a microbatch, so the same tokens compete for slots however the batch is cut, as long as a microbatch holds whole groups.
GShard's random dropping of weak second choices is left out: routing is a function of parameters and tokens alone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_hpc.models.sizes import check_counts, check_dtype, check_positive, check_share
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
    softmax,
    token_shapes,
    vocabulary_logits,
)

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens of each group go.

    dispatch:  1 where a token takes an expert's slot, else 0: [group, token, expert, slot], a constant for the gradient
    combine:   the same with the token's share of that expert in place of 1
    imbalance: E * sum over experts of (share of first choices) * (mean gate), mean over groups: 1 where all experts are equally busy.
               GShard's l_aux times E^2, so that its weight means the same for any E
    """

    dispatch: jax.Array
    combine: jax.Array
    imbalance: jax.Array


@dataclass(frozen=True, slots=True)
class MoE:
    """Sizes of the model.

    num_layers:      dense and mixture layers together, an even number
    num_experts:     at least 2, as each token goes to two
    group_size:      tokens that are routed together; a microbatch with fewer is one group
    mlp_factor:      width of all feed-forward networks, over `hidden`
    capacity_factor: slots of all experts over the tokens of a group; 2 gives each of a token's two choices a slot, if they are balanced
    aux_weight:      of each mixture layer's imbalance in the loss
    dtype:           of the computation; parameters are float32, and so is routing
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_experts: int
    vocab: int
    sequence: int
    group_size: int = 2048
    mlp_factor: int = 8
    capacity_factor: float = 2.0
    aux_weight: float = 0.01
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_counts(self, num_layers=2, hidden=1, num_heads=1, num_experts=2, vocab=2, sequence=1, group_size=1, mlp_factor=1)
        if self.num_layers % 2:
            raise ValueError(f"num_layers is {self.num_layers}, expected an even number: every second layer is a mixture of experts")
        check_heads(self.hidden, self.num_heads)
        check_positive(self, "capacity_factor")
        check_share(self, "aux_weight")
        check_dtype(self.dtype)

    def init(self, key: jax.Array) -> Tree:
        """Random float32 parameters: {"pairs": [{"dense": {...}, "mixture": {...}}, ...], "embedding", "output_bias"}."""
        embedding_key, *pair_keys = jax.random.split(key, self.num_layers // 2 + 1)
        return {
            "pairs": [self._init_pair(pair_key) for pair_key in pair_keys],
            "embedding": fresh(embedding_key, (self.vocab, self.hidden)),
            "output_bias": jnp.zeros((self.vocab,)),
        }

    def _init_pair(self, key: jax.Array) -> dict[str, Params]:
        hidden, experts, width, out_scale = self.hidden, self.num_experts, self.mlp_factor * self.hidden, depth_scale(self.num_layers)
        qkv1, out1, up1, down1, qkv2, out2, gate, up2, down2 = jax.random.split(key, 9)
        dense = {
            **fresh_attention(qkv1, out1, hidden, self.num_heads, out_scale),
            **fresh_mlp(up1, down1, hidden, width, out_scale),
        }
        mixture = {
            **fresh_attention(qkv2, out2, hidden, self.num_heads, out_scale),
            "norm2_scale": jnp.ones((hidden,)),
            "norm2_bias": jnp.zeros((hidden,)),
            "gate": fresh(gate, (hidden, experts)),
            "up": fresh(up2, (experts, hidden, width)),
            "up_bias": jnp.zeros((experts, width)),
            "down": fresh(down2, (experts, width, hidden), out_scale),
            "down_bias": jnp.zeros((experts, hidden)),
        }
        return {"dense": dense, "mixture": mixture}

    def batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch: {"tokens": int32 [batch_size, sequence + 1]}."""
        return token_shapes(batch_size, self.sequence)

    def loss(self, params: Tree, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        """Mean cross-entropy, float32, of each next token, plus `aux_weight` times the imbalance of each mixture layer; no key is read."""
        del key
        tokens = batch["tokens"]
        embedding = params["embedding"].astype(self.dtype)
        x = embedded(embedding, tokens) + positions(self.sequence, self.hidden).astype(self.dtype)
        imbalance = jnp.zeros(())
        for pair in params["pairs"]:
            x = self._dense(pair["dense"], x)
            x, more = self._mixture(pair["mixture"], x)
            imbalance = imbalance + more
        return cross_entropy(vocabulary_logits(x, embedding) + params["output_bias"], tokens[:, 1:]) + self.aux_weight * imbalance

    def _dense(self, block: Params, x: jax.Array) -> jax.Array:
        x = x + attention(block, layer_norm(x, block["norm1_scale"], block["norm1_bias"]))
        return x + mlp(block, layer_norm(x, block["norm2_scale"], block["norm2_bias"]))

    def _mixture(self, block: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + attention(block, layer_norm(x, block["norm1_scale"], block["norm1_bias"]))
        fed, imbalance = self.experts(block, layer_norm(x, block["norm2_scale"], block["norm2_bias"]))
        return x + fed, imbalance

    def experts(self, block: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normed activations [rows, sequence, hidden] through each token's two experts, and the imbalance of the routing."""
        groups = self._grouped(x)
        # in float32: a choice must not turn on the rounding of a product that another plan adds up in another order
        gates = softmax(jnp.einsum("gsh,he->gse", groups.astype(jnp.float32), block["gate"]))
        routing = top_two(gates, self.capacity(groups.shape[1]), x.dtype)
        up, down = block["up"].astype(x.dtype), block["down"].astype(x.dtype)
        up_bias, down_bias = block["up_bias"].astype(x.dtype), block["down_bias"].astype(x.dtype)
        sent = jnp.einsum("gsec,gsh->egch", routing.dispatch, groups)
        wide = jax.nn.relu(jnp.einsum("egch,ehf->egcf", sent, up) + up_bias[:, None, None, :])
        back = jnp.einsum("egcf,efh->egch", wide, down) + down_bias[:, None, None, :]
        return jnp.einsum("gsec,egch->gsh", routing.combine, back).reshape(x.shape), routing.imbalance

    def capacity(self, group_tokens: int) -> int:
        """Slots that an expert has in a group."""
        return max(1, int(self.capacity_factor * group_tokens / self.num_experts))

    def _grouped(self, x: jax.Array) -> jax.Array:
        rows, sequence, hidden = x.shape
        tokens = rows * sequence
        group = min(self.group_size, tokens)
        if tokens % group:
            raise ValueError(
                f"{rows} rows of {sequence} tokens do not divide into groups of group_size={group} tokens. "
                f"Choose rows of a microbatch whose tokens are a multiple of {group}, or another group_size."
            )
        return x.reshape(tokens // group, group, hidden)

    def num_params(self) -> int:
        """By the paper's formula, which has biases in the experts, and the gates' L/2 * H * E that it leaves out."""
        hidden, factor, experts = self.hidden, self.mlp_factor, self.num_experts
        network = 2 * factor * hidden**2 + (factor + 1) * hidden
        attended = 4 * hidden**2 + 8 * hidden  # with the biases and both norms
        pair = 2 * attended + (1 + experts) * network + hidden * experts
        return self.num_layers // 2 * pair + self.vocab * (hidden + 1)

    def iteration_flops(self, batch_size: int, remat: bool) -> float:  # noqa: FBT001 - the formula's own switch
        """FLOP of one iteration by the paper's formula, with r = 4 with recomputation, else 3, and T = B S tokens in groups of G.

        F = r L/2 (dense + mixture) + 6 T H V,  dense = T H^2 (8 + 4 m) + 4 T S H,
        mixture = 8 T H^2 + 4 T S H + 8 T H^2 m + 2 T H E + 4 T G + 8 T H G: attention, two experts, gate, choice, dispatch and combine.
        """
        tokens, hidden, factor, group = batch_size * self.sequence, self.hidden, self.mlp_factor, self.group_size
        attended = 8 * tokens * hidden**2 + 4 * tokens * self.sequence * hidden
        dense = attended + 4 * tokens * hidden**2 * factor
        two_experts = 8 * tokens * hidden**2 * factor
        routed = 2 * tokens * hidden * self.num_experts + 4 * tokens * group + 8 * tokens * hidden * group
        repeats = 4 if remat else 3
        return repeats * self.num_layers / 2 * (dense + attended + two_experts + routed) + 6 * tokens * hidden * self.vocab


def top_two(gates: jax.Array, capacity: int, dtype: Any) -> Routing:
    """Route each token to its two largest gates (float32 [group, token, expert], rows of sum 1), GShard's Algorithm 1.

    In each group all first choices are placed before all second ones, both in the order of tokens; who finds an expert full is dropped
    there. A token's two shares are its gates over their sum, dropped or not.
    """
    choosable = lax.stop_gradient(gates)
    first = _is_largest(choosable)
    second = _is_largest(jnp.where(first, -1.0, choosable))
    num_first = jnp.sum(first, axis=1, keepdims=True, dtype=jnp.int32)
    first_slots = _slots(first, _earlier(first), capacity, dtype)
    second_slots = _slots(second, _earlier(second) + num_first, capacity, dtype)
    first_gate, second_gate = (jnp.sum(jnp.where(chosen, gates, 0.0), axis=-1) for chosen in (first, second))
    first_share = (first_gate / (first_gate + second_gate)).astype(dtype)
    second_share = (second_gate / (first_gate + second_gate)).astype(dtype)
    busy = jnp.mean(first.astype(jnp.float32), axis=1) * jnp.mean(gates, axis=1)
    return Routing(
        dispatch=first_slots + second_slots,
        combine=first_share[..., None, None] * first_slots + second_share[..., None, None] * second_slots,
        imbalance=gates.shape[-1] * jnp.mean(jnp.sum(busy, axis=-1)),
    )


def _is_largest(gates: jax.Array) -> jax.Array:
    """Bool [group, token, expert]: the first of each token's largest gates."""
    experts = lax.broadcasted_iota(jnp.int32, gates.shape, 2)
    return experts == jnp.argmax(gates, axis=-1)[..., None]


def _earlier(chosen: jax.Array) -> jax.Array:
    """How many tokens of the group before each one chose each expert: int32 [group, token, expert]."""
    counted = chosen.astype(jnp.int32)
    return jnp.cumsum(counted, axis=1) - counted


def _slots(chosen: jax.Array, taken: jax.Array, capacity: int, dtype: Any) -> jax.Array:
    """1 at the slot that each token takes, [group, token, expert, slot]; a slot beyond the capacity is none."""
    slot = jnp.sum(jnp.where(chosen, taken, 0), axis=-1)
    is_slot = slot[..., None] == lax.broadcasted_iota(jnp.int32, (*slot.shape, capacity), 2)
    return chosen[..., None].astype(dtype) * is_slot[..., None, :].astype(dtype)
