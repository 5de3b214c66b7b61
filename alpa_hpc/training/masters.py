"""Mixed precision: matrices that are read in 16 bits, and the float32 originals that the optimiser updates (Micikevicius et al., 2018).

A part of a train state is {"params": what the loss is given} and, only where some of it is narrower than the model made it,
"masters": a tree of the same shape with the originals of those, None elsewhere.
"""

from typing import Any

import jax
import jax.numpy as jnp

from alpa_hpc.training.options import ParamDtype


def with_masters(originals: Any, dtype: ParamDtype) -> dict[str, Any]:
    """The part of a state that holds these parameters, matrices in `dtype` where that is narrower."""
    if not any(_is_narrowed(leaf, dtype) for leaf in jax.tree.leaves(originals)):
        return {"params": originals}
    return {
        "params": narrowed(originals, dtype),
        "masters": jax.tree.map(lambda leaf: leaf if _is_narrowed(leaf, dtype) else None, originals),
    }


def originals_of(state: dict[str, Any]) -> Any:
    """The parameters of a state as the optimiser updates them."""
    if "masters" not in state:
        return state["params"]
    return jax.tree.map(lambda leaf, master: leaf if master is None else master, state["params"], state["masters"])


def narrowed(originals: Any, dtype: ParamDtype) -> Any:
    """The parameters as the loss is given them."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype.value) if _is_narrowed(leaf, dtype) else leaf, originals)


def _is_narrowed(leaf: Any, dtype: ParamDtype) -> bool:
    # scales and biases are hardly any bytes, and a step of 16 bits is large beside a scale of 1
    return leaf.ndim > 1 and leaf.dtype.itemsize > jnp.dtype(dtype.value).itemsize
