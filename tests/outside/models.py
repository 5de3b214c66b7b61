"""The table of outside models: a row is a function that gives a train step as its library's users write it, its state, and batches.

To try another model, write one more function of this kind and put `@row` on it. Sizes are tiny, and most dims divide by 8. A parameter
without influence (a bias before a norm) has rounding errors for a gradient, which Adam makes large: hence its large `eps` here, and no such
bias where the optimiser has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_hpc
from tests.random_plans import Step

VOCAB, LENGTH, HIDDEN = 64, 16, 32


@dataclass(frozen=True)
class Case:
    """`step(state, batch)`; `batch(rows)` are the arrays of so many rows."""

    step: Step
    state: Any
    batch: Callable[[int], Any]


ROWS: dict[str, Callable[[], Case]] = {}


def installed(name: str) -> Any:
    """A library; of no type, since types are checked where it is absent too."""
    return import_module(name)


def row(make: Callable[[], Case]) -> Callable[[], Case]:
    """Put a model into the table, by the name of its function."""
    ROWS[make.__name__] = make
    return make


def trained(
    loss: Callable[[Any, Any], jax.Array], params: Any, batch: Callable[[int], Any], optimiser: optax.GradientTransformation | None = None
) -> Case:
    """A loss of parameters and a batch, in a training step of optax."""
    optimiser = optax.adamw(1e-2, eps=1e-3) if optimiser is None else optimiser

    def step(state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        value, gradients = alpa_hpc.value_and_grad(loss)(state["params"], batch)
        updates, moments = optimiser.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": value}

    return Case(step, {"params": params, "moments": optimiser.init(params)}, batch)


def draw(rows: int) -> np.random.Generator:
    return np.random.default_rng(rows)


def tokens(rows: int) -> dict[str, Any]:
    """Tokens, labels, and the key of the batch's dropout."""
    ids = draw(rows).integers(3, VOCAB, (rows, LENGTH + 1)).astype(np.int32)
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "key": jax.random.key(rows)}


def images(rows: int, size: int = 16, channels: int = 3) -> dict[str, Any]:
    pixels = draw(rows).standard_normal((rows, size, size, channels)).astype(np.float32)
    return {"images": pixels, "labels": draw(rows).integers(0, 8, rows).astype(np.int32), "key": jax.random.key(rows)}


def sequences(rows: int, length: int = LENGTH, width: int = 8) -> dict[str, Any]:
    """Sequences of vectors, and one vector for each."""
    x = draw(rows).standard_normal((rows, length, width)).astype(np.float32)
    return {"x": x, "y": x.mean(1) ** 2, "key": jax.random.key(rows)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


# Flax models of transformers


@row
def flax_gpt2() -> Case:
    """With dropout; its key comes with the batch."""
    transformers = installed("transformers")

    model = transformers.FlaxGPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=2, n_head=4), input_shape=(1, 8)
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model(batch["tokens"], params=params, dropout_rng=batch["key"], train=True).logits
        return cross_entropy(logits, batch["labels"])

    return trained(loss, model.params, tokens)


@row
def flax_bert() -> Case:
    transformers = installed("transformers")

    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=LENGTH,
    )
    model = transformers.FlaxBertForMaskedLM(config, input_shape=(1, 8))

    def loss(params: Any, batch: Any) -> jax.Array:
        mask = (batch["tokens"] > 5).astype(jnp.int32)
        logits = model(batch["tokens"], attention_mask=mask, params=params, dropout_rng=batch["key"], train=True).logits
        return cross_entropy(logits, batch["labels"])

    return trained(loss, model.params, tokens, optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3)))


@row
def flax_bart() -> Case:
    transformers = installed("transformers")

    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * HIDDEN,
        decoder_ffn_dim=4 * HIDDEN,
        max_position_embeddings=2 * LENGTH,
    )
    model = transformers.FlaxBartForConditionalGeneration(config, input_shape=(1, 8))

    def loss(params: Any, batch: Any) -> jax.Array:
        reply = model(batch["tokens"], decoder_input_ids=batch["tokens"], params=params, dropout_rng=batch["key"], train=True)
        return cross_entropy(reply.logits, batch["labels"])

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return trained(loss, model.params, tokens, optax.adamw(schedule, eps=1e-3))


# Models of haiku


@row
def haiku_resnet() -> Case:
    """Batch norm's averages are state of the model, updated outside the gradient."""
    hk = installed("haiku")

    def forward(pixels: Any) -> Any:
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=8,
            bottleneck=False,
            channels_per_group=(8, 16, 16, 32),
            use_projection=(True, True, True, True),
        )
        return net(pixels, is_training=True)

    net = hk.transform_with_state(forward)
    params, averages = net.init(jax.random.key(0), jnp.zeros((2, 16, 16, 3)))
    optimiser = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def loss(params: Any, averages: Any, batch: Any) -> Any:
        logits, averages = net.apply(params, averages, None, batch["images"])
        return cross_entropy(logits, batch["labels"]), averages

    def step(state: Any, batch: Any) -> Any:
        graded = alpa_hpc.value_and_grad(loss, has_aux=True, aux=alpa_hpc.AuxKind.LAST)
        (value, averages), gradients = graded(state["params"], state["averages"], batch)
        updates, momentum = optimiser.update(gradients, state["momentum"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "averages": averages, "momentum": momentum}, {"loss": value}

    return Case(step, {"params": params, "averages": averages, "momentum": optimiser.init(params)}, images)


# Models of equinox


@row
def equinox_attention() -> Case:
    """A whole equinox module in the state, functions and all; a dropout key in the state."""
    eqx = installed("equinox")

    class Block(eqx.Module):
        attention: Any
        norm: Any
        mlp: Any

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(4, HIDDEN, key=first)
            self.norm = eqx.nn.LayerNorm(HIDDEN)
            self.mlp = eqx.nn.MLP(HIDDEN, HIDDEN, 2 * HIDDEN, 1, jax.nn.gelu, key=second)

        def __call__(self, x: jax.Array) -> jax.Array:
            normed = jax.vmap(self.norm)(x)
            mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
            x = x + self.attention(normed, normed, normed, mask=mask)
            return x + jax.vmap(self.mlp)(x)

    keys = jax.random.split(jax.random.key(0), 4)
    model = (eqx.nn.Embedding(VOCAB, HIDDEN, key=keys[0]), [Block(keys[1]), Block(keys[2])], eqx.nn.Linear(HIDDEN, VOCAB, key=keys[3]))
    optimiser = optax.adam(1e-2, eps=1e-3)

    def logits(model: Any, ids: jax.Array) -> jax.Array:
        embedding, blocks, last = model
        x = jax.vmap(embedding)(ids)
        for block in blocks:
            x = block(x)
        return jax.vmap(last)(x)

    def loss(model: Any, batch: Any, key: jax.Array) -> jax.Array:
        weights = jax.random.bernoulli(key, 0.9, batch["tokens"].shape)
        losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(logits, (None, 0))(model, batch["tokens"]), batch["labels"])
        return jnp.mean(losses * weights)

    def step(state: Any, batch: Any) -> Any:
        model, moments, key = state
        key, now = jax.random.split(key)
        value, gradients = alpa_hpc.value_and_grad(loss)(model, batch, now)
        updates, moments = optimiser.update(gradients, moments, eqx.filter(model, eqx.is_inexact_array))
        return (eqx.apply_updates(model, updates), moments, key), {"loss": value}

    return Case(step, (model, optimiser.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(1)), tokens)


# Models of flax


@row
def flax_lstm() -> Case:
    """An LSTM over time."""
    nn = installed("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(HIDDEN)(x)
            x = nn.RNN(nn.OptimizedLSTMCell(HIDDEN))(x)
            return nn.Dense(8)(jnp.tanh(x[:, -1]))

    net = Net()
    params = net.init(jax.random.key(0), sequences(2)["x"])
    return trained(lambda params, batch: jnp.mean((net.apply(params, batch["x"]) - batch["y"]) ** 2), params, sequences)


@row
def flax_train_state() -> Case:
    """The state is flax's own; decay of matrices alone, a schedule, attention with a mask, and widths that 8 does not divide."""
    nn, training = installed("flax.linen"), installed("flax.training.train_state")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(36)(x)
            mask = nn.combine_masks(nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(x[..., 0] > -1, x[..., 0] > -1))
            attention = nn.MultiHeadDotProductAttention(3, dropout_rate=0.1, deterministic=False)
            x = x + attention(nn.RMSNorm()(x), mask=mask)
            return nn.Dense(8)(nn.Dropout(0.1, deterministic=False)(x).mean(1))

    net = Net()
    params = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, sequences(2)["x"])["params"]
    schedule = optax.cosine_decay_schedule(1e-2, 10)
    optimiser = optax.adamw(schedule, eps=1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            found = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": batch["key"]})
            return jnp.mean((found - batch["y"]) ** 2)

        value, gradients = alpa_hpc.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, "norm": optax.tree.norm(gradients)}

    return Case(step, training.TrainState.create(apply_fn=net.apply, params=params, tx=optimiser), sequences)


@row
def flax_nnx() -> Case:
    """Modules that count: averages of a batch norm, and keys of a dropout, which the loss draws from and hands back."""
    nnx = installed("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(8, HIDDEN, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(HIDDEN, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))).mean(1))

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-2, min_dim_size_to_factor=8))

    def loss(params: Any, rest: Any, batch: Any) -> Any:
        net = nnx.merge(graph, params, rest)
        value = jnp.mean((net(batch["x"]) - batch["y"]) ** 2)
        return value, nnx.split(net, nnx.Param, ...)[2]

    def step(state: Any, batch: Any) -> Any:
        graded = alpa_hpc.value_and_grad(loss, has_aux=True, aux=alpa_hpc.AuxKind.LAST)
        (value, rest), gradients = graded(state["params"], state["rest"], batch)
        updates, moments = optimiser.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "rest": rest, "moments": moments}, {"loss": value}

    return Case(step, {"params": params, "rest": rest, "moments": optimiser.init(params)}, sequences)


@row
def equinox_batch_norm() -> Case:
    """A sum over the rows of a vmap, numbers and flags in a module (dropout), a key for each row, and an average of the parameters."""
    eqx = installed("equinox")

    class Net(eqx.Module):
        first: Any
        norm: Any
        dropout: Any
        last: Any

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(8, HIDDEN, use_bias=False, key=keys[0])
            self.norm = eqx.nn.BatchNorm(HIDDEN, "rows", mode="batch")
            self.dropout = eqx.nn.Dropout(0.1)
            self.last = eqx.nn.Linear(HIDDEN, 8, key=keys[1])

        def __call__(self, x: jax.Array, averages: Any, key: jax.Array) -> Any:
            x, averages = self.norm(jnp.tanh(jax.vmap(self.first)(x)).mean(0), averages)
            return self.last(self.dropout(jax.nn.relu(x), key=key)), averages

    model, averages = eqx.nn.make_with_state(Net)(jax.random.key(0))
    optimiser = optax.lamb(1e-2, eps=1e-3)

    def loss(model: Any, averages: Any, batch: Any) -> Any:
        over_rows = jax.vmap(model, axis_name="rows", in_axes=(0, None, 0), out_axes=(0, None))
        found, averages = over_rows(batch["x"], averages, batch["keys"])
        return jnp.mean((found - batch["y"]) ** 2), averages

    def step(state: Any, batch: Any) -> Any:
        model, averages, moments, slow = state
        graded = alpa_hpc.value_and_grad(loss, has_aux=True, aux=alpa_hpc.AuxKind.LAST)
        (value, averages), gradients = graded(model, averages, batch)
        updates, moments = optimiser.update(gradients, moments, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        slow = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, slow, eqx.filter(model, eqx.is_inexact_array))
        return (model, averages, moments, slow), {"loss": value}

    def batch(rows: int) -> dict[str, Any]:
        return {"x": sequences(rows)["x"], "y": sequences(rows)["y"], "keys": jax.random.split(jax.random.key(rows), rows)}

    params = eqx.filter(model, eqx.is_inexact_array)
    return Case(step, (model, averages, optimiser.init(params), params), batch)
