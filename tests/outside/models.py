"""The table of outside models: a row is a function that gives a train step as its library's users write it, its state, and batches.

To try another model, write one more function of this kind and put `@row` on it. It is asked for in two sizes (`cases`): small ones run, of
large ones the code for GPUs is read. A parameter without influence (a bias before a norm) has rounding errors for a gradient, which Adam
makes large: hence its large `eps` here, and no such bias where the optimiser has none.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import alpa_hpc
from tests.outside.cases import Case, Size, cross_entropy, images, installed, sequences, tokens, trained

Row = Callable[[Size], Case]
ROWS: dict[str, Row] = {}


def row(make: Row) -> Row:
    """Put a model into the table, by the name of its function."""
    ROWS[make.__name__] = make
    return make


# Flax models of transformers


@row
def flax_gpt2(size: Size) -> Case:
    """With dropout; its key comes with the batch."""
    transformers = installed("transformers")

    model = transformers.FlaxGPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=size.vocab, n_positions=size.length, n_embd=size.hidden, n_layer=2, n_head=size.heads),
        input_shape=(1, 8),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model(batch["tokens"], params=params, dropout_rng=batch["key"], train=True).logits
        return cross_entropy(logits, batch["labels"])

    return trained(loss, model.params, tokens(size))


@row
def flax_bert(size: Size) -> Case:
    transformers = installed("transformers")

    config = transformers.BertConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=2,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=size.length,
    )
    model = transformers.FlaxBertForMaskedLM(config, input_shape=(1, 8))

    def loss(params: Any, batch: Any) -> jax.Array:
        mask = (batch["tokens"] > 5).astype(jnp.int32)
        logits = model(batch["tokens"], attention_mask=mask, params=params, dropout_rng=batch["key"], train=True).logits
        return cross_entropy(logits, batch["labels"])

    return trained(loss, model.params, tokens(size), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3)))


@row
def flax_bart(size: Size) -> Case:
    transformers = installed("transformers")

    config = transformers.BartConfig(
        vocab_size=size.vocab,
        d_model=size.hidden,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.hidden,
        decoder_ffn_dim=4 * size.hidden,
        max_position_embeddings=2 * size.length,
    )
    model = transformers.FlaxBartForConditionalGeneration(config, input_shape=(1, 8))

    def loss(params: Any, batch: Any) -> jax.Array:
        reply = model(batch["tokens"], decoder_input_ids=batch["tokens"], params=params, dropout_rng=batch["key"], train=True)
        return cross_entropy(reply.logits, batch["labels"])

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return trained(loss, model.params, tokens(size), optax.adamw(schedule, eps=1e-3))


# Models of haiku


@row
def haiku_resnet(size: Size) -> Case:
    """Batch norm's averages are state of the model, updated outside the gradient."""
    hk = installed("haiku")

    def forward(pixels: Any) -> Any:
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=8,
            bottleneck=False,
            channels_per_group=tuple(times * size.channels for times in (1, 2, 2, 4)),
            use_projection=(True, True, True, True),
        )
        return net(pixels, is_training=True)

    net = hk.transform_with_state(forward)
    params, averages = net.init(jax.random.key(0), jnp.zeros((2, size.image, size.image, 3)))
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

    return Case(step, {"params": params, "averages": averages, "momentum": optimiser.init(params)}, images(size))


# Models of equinox


@row
def equinox_attention(size: Size) -> Case:
    """A whole equinox module in the state, functions and all; a dropout key in the state."""
    eqx = installed("equinox")

    class Block(eqx.Module):
        attention: Any
        norm: Any
        mlp: Any

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(size.heads, size.hidden, key=first)
            self.norm = eqx.nn.LayerNorm(size.hidden)
            self.mlp = eqx.nn.MLP(size.hidden, size.hidden, 2 * size.hidden, 1, jax.nn.gelu, key=second)

        def __call__(self, x: jax.Array) -> jax.Array:
            normed = jax.vmap(self.norm)(x)
            mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
            x = x + self.attention(normed, normed, normed, mask=mask)
            return x + jax.vmap(self.mlp)(x)

    keys = jax.random.split(jax.random.key(0), 4)
    model = (
        eqx.nn.Embedding(size.vocab, size.hidden, key=keys[0]),
        [Block(keys[1]), Block(keys[2])],
        eqx.nn.Linear(size.hidden, size.vocab, key=keys[3]),
    )
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

    return Case(step, (model, optimiser.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(1)), tokens(size))


# Models of flax


@row
def flax_lstm(size: Size) -> Case:
    """An LSTM over time."""
    nn = installed("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(size.hidden)(x)
            x = nn.RNN(nn.OptimizedLSTMCell(size.hidden))(x)
            return nn.Dense(size.width)(jnp.tanh(x[:, -1]))

    net, batch = Net(), sequences(size, length=16)  # each step in time is compiled
    params = net.init(jax.random.key(0), batch(2)["x"])
    return trained(lambda params, batch: jnp.mean((net.apply(params, batch["x"]) - batch["y"]) ** 2), params, batch)


@row
def flax_train_state(size: Size) -> Case:
    """The state is flax's own; decay of matrices alone, a schedule, attention with a mask, and widths that 8 does not divide."""
    nn, training = installed("flax.linen"), installed("flax.training.train_state")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(6 * ((size.hidden + 4) // 6))(x)
            mask = nn.combine_masks(nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(x[..., 0] > -1, x[..., 0] > -1))
            attention = nn.MultiHeadDotProductAttention(3, dropout_rate=0.1, deterministic=False)
            x = x + attention(nn.RMSNorm()(x), mask=mask)
            return nn.Dense(size.width)(nn.Dropout(0.1, deterministic=False)(x).mean(1))

    net, batch = Net(), sequences(size)
    params = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch(2)["x"])["params"]
    schedule = optax.cosine_decay_schedule(1e-2, 10)
    optimiser = optax.adamw(schedule, eps=1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            found = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": batch["key"]})
            return jnp.mean((found - batch["y"]) ** 2)

        value, gradients = alpa_hpc.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, "norm": optax.tree.norm(gradients)}

    return Case(step, training.TrainState.create(apply_fn=net.apply, params=params, tx=optimiser), batch)


@row
def flax_nnx(size: Size) -> Case:
    """Modules that count: averages of a batch norm, and keys of a dropout, which the loss draws from and hands back."""
    nnx = installed("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(size.width, size.wide, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(size.wide, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(size.wide, size.width, rngs=rngs)

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

    return Case(step, {"params": params, "rest": rest, "moments": optimiser.init(params)}, sequences(size))


@row
def equinox_batch_norm(size: Size) -> Case:
    """A sum over the rows of a vmap, numbers and flags in a module (dropout), a key for each row, and an average of the parameters."""
    eqx = installed("equinox")

    class Net(eqx.Module):
        first: Any
        norm: Any
        dropout: Any
        last: Any

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(size.width, size.wide, use_bias=False, key=keys[0])
            self.norm = eqx.nn.BatchNorm(size.wide, "rows", mode="batch")
            self.dropout = eqx.nn.Dropout(0.1)
            self.last = eqx.nn.Linear(size.wide, size.width, key=keys[1])

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
        one = sequences(size)(rows)
        return {"x": one["x"], "y": one["y"], "keys": jax.random.split(one["key"], rows)}

    params = eqx.filter(model, eqx.is_inexact_array)
    return Case(step, (model, averages, optimiser.init(params), params), batch)
