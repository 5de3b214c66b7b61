"""What the rows of outside models are made of: a case, its size, batches, and the usual training step."""

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


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the models of the table are.

    vocab, length:  of token models, and the length of sequences of vectors
    hidden, heads:  of attention, and of the state of a recurrent net
    width, wide:    of vectors in a sequence; of layers that are nothing but one product
    image, channels: side of an image; channels of the first group of convolutions
    """

    vocab: int
    length: int
    hidden: int
    heads: int
    width: int
    wide: int
    image: int
    channels: int


SMALL = Size(vocab=64, length=16, hidden=32, heads=4, width=8, wide=32, image=16, channels=8)  # quick to run, and most dims divide by 8
LARGE = Size(vocab=8192, length=64, hidden=1024, heads=16, width=512, wide=8192, image=64, channels=128)  # tens of megabytes of weights


@dataclass(frozen=True)
class Case:
    """`step(state, batch)`; `batch(rows)` are the arrays of so many rows."""

    step: Step
    state: Any
    batch: Callable[[int], Any]


def installed(name: str) -> Any:
    """A library; of no type, since types are checked where it is absent too."""
    return import_module(name)


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


def tokens(size: Size) -> Callable[[int], Any]:
    """Tokens, labels, and the key of the batch's dropout."""

    def batch(rows: int) -> dict[str, Any]:
        ids = draw(rows).integers(3, size.vocab, (rows, size.length + 1)).astype(np.int32)
        return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "key": jax.random.key(rows)}

    return batch


def images(size: Size) -> Callable[[int], Any]:
    def batch(rows: int) -> dict[str, Any]:
        pixels = draw(rows).standard_normal((rows, size.image, size.image, 3)).astype(np.float32)
        return {"images": pixels, "labels": draw(rows).integers(0, 8, rows).astype(np.int32), "key": jax.random.key(rows)}

    return batch


def sequences(size: Size, length: int = 0) -> Callable[[int], Any]:
    """Sequences of vectors (`length` of them if given), and one vector for each."""

    def batch(rows: int) -> dict[str, Any]:
        x = draw(rows).standard_normal((rows, length or size.length, size.width)).astype(np.float32)
        return {"x": x, "y": x.mean(1) ** 2, "key": jax.random.key(rows)}

    return batch


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
