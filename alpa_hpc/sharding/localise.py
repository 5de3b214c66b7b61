"""One equation on one device: the same primitive with the shapes of this device's tiles.

Most primitives take their shapes from their operands; those that carry shapes in their parameters, or that must know where the tile
lies, have an entry in `LOCAL`. Sums over split factors are left partial (paper, section 4.1); `apply.py` finishes them.
"""

from collections.abc import Sequence
from functools import partial

import jax
from jax.extend.core import JaxprEqn

from alpa_hpc.sharding.assignment import EquationPlan
from alpa_hpc.sharding.local import indexing, nested, random, shapes
from alpa_hpc.sharding.place import LocalRun, Place, bind


def run_local(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """Results of the equation on this device's tiles, sums over split factors still partial."""
    run = LOCAL.get(eqn.primitive.name)
    if run is not None:
        return run(eqn, plan, operands, place)
    return bind(eqn, operands, {})


LOCAL: dict[str, LocalRun] = {
    "broadcast_in_dim": shapes.broadcast,
    "reshape": shapes.reshape,
    "slice": shapes.cut,
    "dynamic_slice": shapes.dynamic_slice,
    "iota": shapes.iota,
    **dict.fromkeys(("sharding_constraint", "layout_constraint", "device_put"), shapes.identity),
    "conv_general_dilated": shapes.convolution,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), shapes.pooling),
    "gather": indexing.gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), indexing.scatter),
    "fft": shapes.transform,
    "random_bits": random.random_bits,
    "scan": partial(nested.scan, run_local),
    "while": partial(nested.while_loop, run_local),
    "cond": partial(nested.cond, run_local),
}
