"""The models' parts written another way, to compare with: one row, one head, one token, one pixel offset at a time.

Arrays are numpy's or jax's: functions ask their arguments which library they belong to (`__array_namespace__`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def relative_error(found: Any, expected: Any) -> float:
    """Largest difference of any leaf, over the largest value of that leaf; no leaf may be all zeros."""

    def error(a: Any, b: Any) -> float:
        assert np.abs(b).max() > 0, "nothing is compared"
        return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max())

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)))


def drawn(model: Any, size: float = 0.3) -> Any:
    """Parameters of the shapes that `model.init` gives: noise of a standard deviation of `size`, around 1 for scales and 0 for the rest."""
    draw = np.random.default_rng(99)

    def leaf(path: Any, shape: Any) -> np.ndarray:
        name = str(path[-1])
        around = 1 if "norm" in name and "bias" not in name or "scale" in name else 0
        return around + size * draw.standard_normal(shape.shape, dtype=np.float32)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(model.init, jax.random.key(0)))


def library(x: Any) -> Any:
    """numpy or jax.numpy, whichever `x` is of."""
    return x.__array_namespace__()


def softmax(x: Any) -> Any:
    powers = library(x).exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / library(x).sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def one_head(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of one head of one row: [sequence, size] each."""
    scores = q @ k.T / np.sqrt(q.shape[-1])
    return softmax(library(q).where(np.tri(len(scores), dtype=bool), scores, -np.inf)) @ v


def attention(block: Mapping[str, Any], x: Any) -> Any:
    """GPT's attention of one row [sequence, hidden]."""
    total = block["out_bias"]
    for head in range(block["qkv"].shape[2]):
        q, k, v = (x @ block["qkv"][:, part, head] + block["qkv_bias"][part, head] for part in range(3))
        total = total + one_head(q, k, v) @ block["out"][head]
    return total


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + library(x).tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sinusoids(sequence: int, hidden: int) -> np.ndarray:
    table = np.zeros((sequence, hidden))
    for position in range(sequence):
        for column in range(hidden):
            angle = position / 10000 ** ((column - column % 2) / hidden)
            table[position, column] = 0.02 * (np.cos(angle) if column % 2 else np.sin(angle))
    return table.astype(np.float32)


def mean_nll(logits: Any, labels: Any) -> Any:
    flat = logits.reshape(-1, logits.shape[-1])
    return -library(flat).log(softmax(flat)[np.arange(len(flat)), np.ravel(labels)]).mean()


Choices = list[list[tuple[int, bool]]]  # for each token its first and its second expert, and whether it found a slot there


def choose(gates: np.ndarray, capacity: int) -> tuple[Choices, np.ndarray]:
    """GShard's Algorithm 1 for one group [token, expert], token by token; also how many first choices each expert had."""
    order = np.argsort(-gates, axis=1, kind="stable")
    counts = np.zeros(gates.shape[1], int)
    choices: Choices = [[] for _ in gates]
    for rank in (0, 1):
        for token, expert in enumerate(order[:, rank].tolist()):
            choices[token].append((expert, bool(counts[expert] < capacity)))
            counts[expert] += 1
    return choices, np.bincount(order[:, 0], minlength=gates.shape[1])


def moe_loss(model: Any, params: Any, tokens: np.ndarray, choose_group: Callable[[Any, int], tuple[Choices, np.ndarray]]) -> Any:
    """The loss of a MoE whose groups are of `model.group_size` tokens; `choose_group` decides from a group's gates and the capacity."""
    inputs = tokens[:, :-1]
    rows = [params["embedding"][row] + sinusoids(*params["embedding"][row].shape) for row in inputs]
    aux: Any = 0.0
    for pair in params["pairs"]:
        dense, mixture = pair["dense"], pair["mixture"]
        rows = [x + attention(dense, layer_norm(x, dense["norm1_scale"], dense["norm1_bias"])) for x in rows]
        rows = [x + _mlp(dense, layer_norm(x, dense["norm2_scale"], dense["norm2_bias"])) for x in rows]
        rows = [x + attention(mixture, layer_norm(x, mixture["norm1_scale"], mixture["norm1_bias"])) for x in rows]
        flat = library(rows[0]).concat([layer_norm(x, mixture["norm2_scale"], mixture["norm2_bias"]) for x in rows])
        fed, imbalance = _experts(model, mixture, flat, choose_group)
        rows = [x + part for x, part in zip(rows, library(fed).split(fed, len(rows)), strict=True)]
        aux = aux + imbalance
    logits = library(rows[0]).stack(rows) @ params["embedding"].T + params["output_bias"]
    return mean_nll(logits, tokens[:, 1:]) + model.aux_weight * aux


def _mlp(block: Mapping[str, Any], x: Any) -> Any:
    return gelu(x @ block["up"] + block["up_bias"]) @ block["down"] + block["down_bias"]


def _experts(model: Any, block: Mapping[str, Any], flat: Any, choose_group: Any) -> tuple[Any, Any]:
    results: list[Any] = []
    imbalances: list[Any] = []
    experts = block["gate"].shape[1]
    capacity = max(1, int(model.capacity_factor * model.group_size / experts))
    for start in range(0, len(flat), model.group_size):
        group = flat[start : start + model.group_size]
        gates = softmax(group @ block["gate"])
        choices, firsts = choose_group(gates, capacity)
        for token, pair in enumerate(choices):
            total = sum(gates[token, expert] for expert, _ in pair)
            result = 0 * group[token]
            for expert, has_slot in pair:
                if has_slot:
                    wide = library(group).maximum(group[token] @ block["up"][expert] + block["up_bias"][expert], 0)
                    result = result + gates[token, expert] / total * (wide @ block["down"][expert] + block["down_bias"][expert])
            results.append(result)
        imbalances.append(experts * (firsts / len(group) * gates.mean(0)).sum())
    return library(flat).stack(results), sum(imbalances) / len(imbalances)


def llama_loss(model: Any, params: Any, tokens: np.ndarray) -> Any:
    """The loss of a Llama; rotation is a product of complex numbers."""
    logits = jax.vmap(lambda row: _llama_row(model, params, row))(tokens[:, :-1])
    return mean_nll(logits, tokens[:, 1:])


def _llama_row(model: Any, params: Any, row: np.ndarray) -> Any:
    x = params["embedding"][row]
    for block in params["blocks"]:
        normed = _rms(x, block["norm1"])
        heads = [_llama_head(model, block, normed, head) for head in range(model.num_heads)]
        x = x + sum(heads)
        normed = _rms(x, block["norm2"])
        gate = normed @ block["gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (normed @ block["up"])) @ block["down"]
    return _rms(x, params["norm"]) @ params["output"].T


def _llama_head(model: Any, block: Mapping[str, Any], x: Any, head: int) -> Any:
    shared, member = divmod(head, model.num_heads // model.num_kv_heads)
    q = _turned(x @ block["query"][:, shared, member], model.rotary_base)
    k = _turned(x @ block["key"][:, shared], model.rotary_base)
    return one_head(q, k, x @ block["value"][:, shared]) @ block["out"][shared, member]


def _turned(x: Any, base: float) -> Any:
    sequence, size = x.shape
    turns = np.exp(1j * np.outer(np.arange(sequence), base ** (-np.arange(size // 2) * 2 / size))).astype(np.complex64)
    pairs = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * turns
    return jnp.concatenate([pairs.real, pairs.imag], axis=1)


def _rms(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def wide_resnet_loss(blocks: tuple[int, ...], params: Any, images: np.ndarray, labels: np.ndarray) -> Any:
    """The loss of a Wide-ResNet with so many blocks a stage; a convolution is a sum of products over the offsets of its kernel."""
    x = _conv(jnp.asarray(images), params["stem"], 2)
    x = _pool(jnp.maximum(_batch_norm(x, params["stem_norm"]), 0))
    remaining = iter(params["blocks"])
    for stage, number in enumerate(blocks):
        for index in range(number):
            x = _bottleneck(next(remaining), x, 2 if stage and not index else 1)
    return mean_nll(x.mean((1, 2)) @ params["head"] + params["head_bias"], labels)


def _bottleneck(block: Any, x: Any, stride: int) -> Any:
    y = jnp.maximum(_batch_norm(_conv(x, block["narrow"], 1), block["narrow_norm"]), 0)
    y = jnp.maximum(_batch_norm(_conv(y, block["wide"], stride), block["wide_norm"]), 0)
    y = _batch_norm(_conv(y, block["leave"], 1), block["leave_norm"])
    if x.shape != y.shape:
        x = _batch_norm(_conv(x, block["shortcut"], stride), block["shortcut_norm"])
    return jnp.maximum(x + y, 0)


def _conv(x: Any, kernel: Any, stride: int) -> Any:
    size, (_, height, width, _) = kernel.shape[0], x.shape
    border = size // 2
    padded = jnp.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))
    return sum(  # pyright: ignore[reportReturnType]  # never empty
        padded[:, dy : dy + height : stride, dx : dx + width : stride] @ kernel[dy, dx] for dy in range(size) for dx in range(size)
    )


def _pool(x: Any) -> Any:
    _, height, width, _ = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    offsets = [padded[:, dy : dy + height : 2, dx : dx + width : 2] for dy in range(3) for dx in range(3)]
    return jnp.max(jnp.stack(offsets), axis=0)


def _batch_norm(x: Any, norm: Any) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    return (x - flat.mean(0)) / jnp.sqrt(flat.var(0) + 1e-5) * norm["scale"] + norm["bias"]
