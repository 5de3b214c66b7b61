"""What crosses the cuts is counted as layers really receive it: values that skip layers, parameters that several share."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr

from alpa_hpc.ir.flops import aval_bytes, equation_flops
from alpa_hpc.ir.inline import inline_calls
from alpa_hpc.layers.cluster import cluster_equations
from alpa_hpc.layers.forward import ForwardLayers, _by_role, _connect, _crossings, _with_distinct_outputs, cut_forward
from alpa_hpc.layers.received import Crossing
from alpa_hpc.models.gpt import GPT
from alpa_hpc.models.wide_resnet import WideResNet

ROWS = 4


def traced(loss: Callable[..., jax.Array], params: object, *batch: jax.ShapeDtypeStruct) -> tuple[ClosedJaxpr, int]:
    leaves, tree = jax.tree.flatten(params)

    def flat(*arguments: jax.Array) -> list[jax.Array]:
        return [loss(jax.tree.unflatten(tree, arguments[: len(leaves)]), *arguments[len(leaves) :])]

    return jax.make_jaxpr(flat)(*leaves, *batch), len(leaves)


def received(layers: ForwardLayers) -> list[int]:
    """Bytes that each layer reads of what earlier ones made."""
    return [sum(aval_bytes(layers.values[value]) for value in layer.inputs) for layer in layers.layers]


def matrices(*shapes: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]


def u_net(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Down, down, middle, up, up; what goes down is added on the same level on the way up, and the first output once more at the end."""
    first = jnp.tanh(x @ params[0])
    second = jnp.tanh(first @ params[1])
    middle = jnp.tanh(second @ params[2])
    up = jnp.tanh((middle + second) @ params[3])
    return jnp.sum(jnp.tanh((up + first) @ params[4]) * first)


def test_skips_of_a_u_net_are_received_once_by_each_layer_that_reads_them() -> None:
    closed, num_params = traced(u_net, matrices((8, 8), (8, 6), (6, 6), (6, 8), (8, 8)), *matrices((ROWS, 8)))
    layers = cut_forward(closed, num_params=num_params, num_layers=5, imbalance=0.5)
    wide, narrow = ROWS * 8 * 4, ROWS * 6 * 4
    # the third layer ends with the sum, so that it is the only reader of `second`; the last one reads `first` twice, besides what comes up
    assert received(layers) == [0, wide, narrow, narrow, 2 * wide]
    assert [layer.params for layer in layers.layers] == [(0,), (1,), (2,), (3,), (4,)]


def tied(params: Sequence[jax.Array], tokens: jax.Array) -> jax.Array:
    """Embedding, two matrices, and the embedding again, cast where it is used."""
    embedding = params[0].astype(jnp.bfloat16).astype(jnp.float32)
    x = embedding[tokens]
    for weight in params[1:]:
        x = jnp.tanh(x @ weight)
    return jnp.sum(jax.nn.log_softmax(x @ embedding.T))


def test_a_parameter_of_two_layers_is_read_by_both_and_never_crosses() -> None:
    closed, num_params = traced(tied, matrices((50, 8), (8, 8), (8, 8)), jax.ShapeDtypeStruct((ROWS,), jnp.int32))
    layers = cut_forward(closed, num_params=num_params, num_layers=2, imbalance=9.0)
    assert [0 in layer.params for layer in layers.layers] == [True, True]
    assert received(layers) == [0, ROWS * 8 * 4], "the activations; neither the embedding nor a cast of it"


def crossing_bytes(crossings: Sequence[Crossing], first: int, last: int) -> int:
    return sum(v.size for v in crossings if v.producer < first and any(first <= reader < last for reader in v.readers))


KEY = jax.random.key(0)
MODELS = {
    "gpt": GPT(num_layers=4, hidden=16, num_heads=2, vocab=32, sequence=8, dtype="bfloat16", dropout=0.1),
    "wide_resnet": WideResNet(depth=14, channels=8, width=2, num_classes=10, image=32, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_layers", [2, 5])
def test_what_eq_6_counts_is_what_layers_read(name: str, num_layers: int) -> None:
    model = MODELS[name]
    batch, tree = jax.tree.flatten(model.batch(ROWS))
    params = jax.eval_shape(model.init, KEY)
    closed, num_params = traced(lambda params, *leaves: model.loss(params, jax.tree.unflatten(tree, leaves), KEY), params, *batch)
    parts = _by_role(_with_distinct_outputs(inline_calls(closed)), num_params)
    counted = _crossings(parts)
    flops = [float(equation_flops(equation)) for equation in parts.body]
    cuts = cluster_equations(flops, counted, range(len(flops)), num_layers=num_layers, imbalance=1.0)
    bounds = [0, *cuts, len(flops)]
    layers = _connect(parts, [parts.body[first:last] for first, last in itertools.pairwise(bounds)])
    assert received(layers) == [crossing_bytes(counted, first, last) for first, last in itertools.pairwise(bounds)]
