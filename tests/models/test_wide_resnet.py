"""The Wide-ResNet equals one whose convolutions are sums over pixel offsets, and has the parameters and FLOP of its shapes."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_hpc.ir.flops import equation_flops
from alpa_hpc.models.wide_resnet import BLOCKS, WideResNet
from tests.models import plain

TINY = WideResNet(depth=14, channels=4, width=2, num_classes=10, image=64)
PAPER = [  # name in billions, depth, channels, width, weights of convolutions over channels^2 (by hand, without stem)
    (0.25, 50, 160, 2, 9715),
    (1.0, 50, 320, 2, 9715),
    (2.0, 50, 448, 2, 9715),
    (4.0, 50, 640, 2, 9715),
    (6.8, 50, 320, 16, 65589),
    (13.0, 101, 320, 16, 123253),
]


@functools.cache
def fresh(model: WideResNet) -> Any:
    return jax.jit(model.init)(jax.random.key(0))


def images(model: WideResNet, rows: int = 4, seed: int = 1) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    shape = (rows, model.image, model.image, 3)
    return {
        "images": draw.standard_normal(shape, dtype=np.float32),
        "labels": draw.integers(0, model.num_classes, rows).astype(np.int32),
    }


@pytest.mark.parametrize(("billions", "depth", "channels", "width", "weights"), PAPER)
def test_paper_sizes(billions: float, depth: int, channels: int, width: int, weights: int) -> None:
    model = WideResNet(depth=depth, channels=channels, width=width, num_classes=1024, image=224)
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == model.num_params()
    kernels = sum(math.prod(leaf.shape) for leaf in leaves if len(leaf.shape) == 4)
    assert kernels == weights * channels**2 + 7 * 7 * 3 * channels
    assert model.num_params() / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.parametrize(("depth", "width", "image"), [(50, 2, 224), (26, 3, 64)])
def test_flop_are_those_of_the_traced_convolutions_and_dots(depth: int, width: int, image: int) -> None:
    model = WideResNet(depth=depth, channels=16, width=width, num_classes=1000, image=image)
    params, batch = jax.eval_shape(model.init, jax.random.key(0)), model.batch(2)
    equations = jax.make_jaxpr(model.loss)(params, batch, jax.random.key(0)).jaxpr.eqns
    counted = {
        name: [equation_flops(eqn) for eqn in equations if eqn.primitive.name == name] for name in ("conv_general_dilated", "dot_general")
    }
    assert len(counted["conv_general_dilated"]) == 1 + 3 * sum(BLOCKS[depth]) + 4
    assert len(counted["dot_general"]) == 1
    forward, stem = sum(map(sum, counted.values())), counted["conv_general_dilated"][0]
    assert model.iteration_flops(2, remat=False) == 3 * forward - stem
    assert model.iteration_flops(2, remat=True) == 4 * forward - stem


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_loss_is_the_logarithm_of_the_classes(dtype: str) -> None:
    model = WideResNet(depth=14, channels=4, width=2, num_classes=10, image=32, dtype=dtype)
    loss = jax.jit(model.loss)(fresh(model), images(model), jax.random.key(0))
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(math.log(10), abs=0.1)


def test_loss_and_gradient_are_those_of_sums_over_offsets() -> None:
    params, batch = plain.drawn(TINY, 0.1), images(TINY)

    def loss(params: Any) -> jax.Array:
        return plain.wide_resnet_loss(BLOCKS[TINY.depth], params, batch["images"], batch["labels"])

    found = jax.jit(jax.value_and_grad(TINY.loss))(params, batch, jax.random.key(0))
    expected = jax.jit(jax.value_and_grad(loss))(params)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    assert plain.relative_error(found[1], expected[1]) < 1e-3


def test_statistics_are_those_of_the_batch_that_the_loss_is_given() -> None:
    params, batch = plain.drawn(TINY, 0.1), images(TINY, rows=8)
    loss = jax.jit(TINY.loss)
    whole = float(loss(params, batch, jax.random.key(0)))
    tripled = float(loss(params, {**batch, "images": 3 * batch["images"]}, jax.random.key(0)))
    assert tripled == pytest.approx(whole, rel=1e-3), "the first norm undoes it"
    halves = [loss(params, jax.tree.map(lambda x, part=part: x[part], batch), jax.random.key(0)) for part in (slice(4), slice(4, 8))]
    assert abs(whole - float(np.mean(halves))) > 1e-3, "a microbatch has statistics of its own"


@pytest.mark.parametrize(
    ("change", "message"), [({"depth": 18}, "depth is 18, expected one of 14, 26, 50"), ({"image": 60}, "image is 60")]
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    sizes = {"depth": 50, "channels": 4, "width": 2, "num_classes": 10, "image": 64}
    with pytest.raises(ValueError, match=message):
        WideResNet(**{**sizes, **change})  # pyright: ignore[reportArgumentType]


def test_training_lowers_the_loss() -> None:
    model = WideResNet(depth=14, channels=4, width=2, num_classes=10, image=32)
    params, batch = fresh(model), images(model, rows=16)
    value_and_grad = jax.jit(jax.value_and_grad(model.loss))
    losses: list[float] = []
    for _ in range(30):
        loss, gradients = value_and_grad(params, batch, jax.random.key(0))
        params = jax.tree.map(lambda a, g: np.asarray(a) - 0.1 * np.asarray(g), params, gradients)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
