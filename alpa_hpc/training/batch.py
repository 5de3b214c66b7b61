"""(Model, size) -> the shapes of its batch, checked: the only place that asks a model for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.faults import faults_of
from alpa_hpc.training.model import Model


def batch_shapes(model: Model, batch_size: int) -> Any:
    """What `model.batch(batch_size)` gives.

    Raises TraceError where the method fails, or gives anything but shapes of numbers whose first dim is the argument.
    """
    with faults_of("the model's batch"):
        batch = model.batch(batch_size)
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise TraceError(f"the model's batch gives {batch!r}, expected a pytree of jax.ShapeDtypeStruct: at least one.")
    for leaf in leaves:
        _check_leaf(leaf)
    rows = sorted({leaf.shape[0] for leaf in leaves if leaf.shape})
    if rows != [batch_size]:
        raise TraceError(
            f"the model's batch({batch_size}) has {' and '.join(map(str, rows)) or 'no'} rows, expected {batch_size}: "
            "the first dim of each of its arrays must be the argument"
        )
    return batch


def _check_leaf(leaf: object) -> None:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        raise TraceError(f"the model's batch gives {leaf!r}, expected a pytree of jax.ShapeDtypeStruct.")
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in leaf.shape):
        raise TraceError(f"the model's batch gives the shape {leaf.shape}, expected whole numbers >= 0.")
    if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_):
        raise TraceError(
            f"the model's batch gives an array of {leaf.dtype}, expected numbers: data has no others, and a PRNG key is the third "
            "argument of the loss."
        )
