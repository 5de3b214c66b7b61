"""A Wide-ResNet (Zagoruyko and Komodakis, 2016) of bottleneck blocks in plain JAX on one device: parameters and images -> mean loss.

BatchNorm normalises by the mean and variance of the batch that `loss` is given. In a microbatched step that is a microbatch: its rows on
*all* devices of a stage, since a plan does not change what a program means. So statistics depend on the number of microbatches, and not on
how tensors are split or on how many devices there are; and a held-out loss is normalised by its own batch, too. No running averages are
kept: they would be a state that is not trained, which training does not read, and which a model's three methods have no place for.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_hpc.models.sizes import check_counts, check_dtype
from alpa_hpc.models.transformer import cross_entropy

Tree = dict[str, Any]

BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each of the four stages, by the number of layers; a block has three, the stem and the head one each."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Sizes of a bottleneck block: it enters with `entering` channels, narrows to `narrow`, and leaves with `leaving`.

    `side` is the height and width of its images where it enters; `stride` cuts both.
    """

    entering: int
    narrow: int
    wide: int
    leaving: int
    stride: int
    side: int

    @property
    def projects(self) -> bool:
        """Whether the shortcut needs a convolution of its own."""
        return self.entering != self.leaving or self.stride > 1


@dataclass(frozen=True, slots=True)
class WideResNet:
    """Sizes of the model.

    depth:       layers, one of the keys of `BLOCKS`
    channels:    of the stem; stage i narrows to channels * 2^i in its blocks, and leaves with four times as many
    width:       factor of the channels of the 3 x 3 convolutions
    num_classes: labels are 0 .. num_classes - 1
    image:       height and width, a multiple of 32
    dtype:       of the computation; parameters are float32, and so are statistics and the loss
    """

    depth: int
    channels: int
    width: int
    num_classes: int
    image: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_counts(self, depth=1, channels=1, width=1, num_classes=2, image=32)
        check_dtype(self.dtype)
        if self.depth not in BLOCKS:
            raise ValueError(f"depth is {self.depth}, expected one of {', '.join(map(str, BLOCKS))}")
        if self.image % 32:
            raise ValueError(f"image is {self.image}, expected a multiple of 32: height and width are halved five times")

    def init(self, key: jax.Array) -> Tree:
        """Random float32 parameters: {"stem", "stem_norm", "blocks": [{...}, ...], "head", "head_bias"}."""
        stem_key, head_key, *keys = jax.random.split(key, sum(BLOCKS[self.depth]) + 2)
        features = self._features()
        return {
            "stem": _fresh_kernel(stem_key, 7, 3, self.channels),
            "stem_norm": _fresh_norm(self.channels, scale=1.0),
            "blocks": [_fresh_block(block_key, block) for block_key, block in zip(keys, self._blocks(), strict=True)],
            "head": 0.01 * jax.random.normal(head_key, (features, self.num_classes)),
            "head_bias": jnp.zeros((self.num_classes,)),
        }

    def batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch: {"images": float32 [batch_size, image, image, 3], "labels": int32 [batch_size]}."""
        return {
            "images": jax.ShapeDtypeStruct((batch_size, self.image, self.image, 3), jnp.float32),
            "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        }

    def loss(self, params: Tree, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        """Mean cross-entropy, float32, of each image's label; no key is read."""
        del key
        x = _convolved(batch["images"].astype(self.dtype), params["stem"], stride=2)
        x = _largest_of_neighbours(jax.nn.relu(_batch_norm(x, params["stem_norm"])))
        for block, sizes in zip(params["blocks"], self._blocks(), strict=True):
            x = _bottleneck(block, sizes, x)
        pooled = jnp.mean(x.astype(jnp.float32), axis=(1, 2)).astype(self.dtype)
        logits = (pooled @ params["head"].astype(self.dtype)).astype(jnp.float32) + params["head_bias"]
        return cross_entropy(logits, batch["labels"])

    def _blocks(self) -> Iterator[_Block]:
        entering, side = self.channels, self.image // 4
        for stage, number in enumerate(BLOCKS[self.depth]):
            narrow = self.channels * 2**stage
            for index in range(number):
                stride = 2 if stage > 0 and index == 0 else 1
                yield _Block(entering, narrow, narrow * self.width, 4 * narrow, stride, side)
                entering, side = 4 * narrow, side // stride

    def _features(self) -> int:
        return 4 * self.channels * 2 ** (len(BLOCKS[self.depth]) - 1)

    def num_params(self) -> int:
        """Kernels k^2 * in * out, two a channel for each BatchNorm, and the head with its biases."""
        stem = 7 * 7 * 3 * self.channels + 2 * self.channels
        return stem + sum(map(_block_params, self._blocks())) + (self._features() + 1) * self.num_classes

    def iteration_flops(self, batch_size: int, remat: bool) -> float:  # noqa: FBT001 - the convention's own switch
        """FLOP of one iteration as the paper counts them: those of convolutions and dots, recomputed ones included.

        Forward once, or twice with recomputation; backward twice, but for the stem, whose input has no gradient.
        """
        stem = 2 * 7 * 7 * 3 * self.channels * (self.image // 2) ** 2
        rest = sum(map(_block_flops, self._blocks())) + 2 * self._features() * self.num_classes
        repeats = 4 if remat else 3
        return float(batch_size * (repeats * rest + (repeats - 1) * stem))


def _fresh_block(key: jax.Array, sizes: _Block) -> Tree:
    first, second, third, shortcut = jax.random.split(key, 4)
    block: Tree = {
        "narrow": _fresh_kernel(first, 1, sizes.entering, sizes.narrow),
        "narrow_norm": _fresh_norm(sizes.narrow, scale=1.0),
        "wide": _fresh_kernel(second, 3, sizes.narrow, sizes.wide),
        "wide_norm": _fresh_norm(sizes.wide, scale=1.0),
        "leave": _fresh_kernel(third, 1, sizes.wide, sizes.leaving),
        "leave_norm": _fresh_norm(sizes.leaving, scale=0.0),  # a fresh block is its shortcut (Goyal et al., 2017, section 5.1)
    }
    if sizes.projects:
        block["shortcut"] = _fresh_kernel(shortcut, 1, sizes.entering, sizes.leaving)
        block["shortcut_norm"] = _fresh_norm(sizes.leaving, scale=1.0)
    return block


def _fresh_kernel(key: jax.Array, size: int, entering: int, leaving: int) -> jax.Array:
    return math.sqrt(2 / (size * size * entering)) * jax.random.normal(key, (size, size, entering, leaving))


def _fresh_norm(channels: int, scale: float) -> Tree:
    return {"scale": jnp.full((channels,), scale), "bias": jnp.zeros((channels,))}


def _bottleneck(block: Tree, sizes: _Block, x: jax.Array) -> jax.Array:
    y = jax.nn.relu(_batch_norm(_convolved(x, block["narrow"]), block["narrow_norm"]))
    y = jax.nn.relu(_batch_norm(_convolved(y, block["wide"], sizes.stride), block["wide_norm"]))
    y = _batch_norm(_convolved(y, block["leave"]), block["leave_norm"])
    if sizes.projects:
        x = _batch_norm(_convolved(x, block["shortcut"], sizes.stride), block["shortcut_norm"])
    return jax.nn.relu(x + y)


def _convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Images [batch, height, width, in] by a kernel [size, size, in, out], padded so that each output pixel has one in its middle."""
    border = kernel.shape[0] // 2
    return lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        window_strides=(stride, stride),
        padding=((border, border), (border, border)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _batch_norm(x: jax.Array, norm: Tree) -> jax.Array:
    """Norm of each channel over batch, height and width; the two means are independent, so that devices can exchange them together."""
    wide = x.astype(jnp.float32)
    mean, mean_square = jnp.mean(wide, axis=(0, 1, 2)), jnp.mean(wide * wide, axis=(0, 1, 2))
    factor = norm["scale"] * lax.rsqrt(jnp.maximum(mean_square - mean * mean, 0) + 1e-5)
    return ((wide - mean) * factor + norm["bias"]).astype(x.dtype)


def _largest_of_neighbours(x: jax.Array) -> jax.Array:
    """Maximum over 3 x 3 pixels, every second one."""
    lowest = np.array(-np.inf, x.dtype)  # a constant, or jax does not see that this is a maximum
    return lax.reduce_window(x, lowest, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


def _block_params(sizes: _Block) -> int:
    kernels = sizes.entering * sizes.narrow + 9 * sizes.narrow * sizes.wide + sizes.wide * sizes.leaving
    shortcut = sizes.entering * sizes.leaving + 2 * sizes.leaving if sizes.projects else 0
    return kernels + 2 * (sizes.narrow + sizes.wide + sizes.leaving) + shortcut


def _block_flops(sizes: _Block) -> int:
    """FLOP of one image's forward convolutions: 2 a weight and output pixel."""
    before, after = sizes.side**2, (sizes.side // sizes.stride) ** 2
    shortcut = sizes.entering * sizes.leaving * after if sizes.projects else 0
    late = 9 * sizes.narrow * sizes.wide + sizes.wide * sizes.leaving
    return 2 * (sizes.entering * sizes.narrow * before + late * after + shortcut)
