"""What the cost model counts of a trial's own work: FLOP of products, bytes of passes, by the rules that count those of models."""

from functools import cache

import jax
from jax.extend.core import Var

from alpa_hpc.calibration.programs import work_arguments, work_program
from alpa_hpc.calibration.trials import PassTrial, ProductTrial
from alpa_hpc.ir.inline import inline_calls
from alpa_hpc.sharding.equation_work import Leaving, equation_work


def product_flop(trial: ProductTrial) -> int:
    """FLOP of the three products."""
    return 3 * 2 * trial.rows * trial.width**2


@cache
def pass_bytes(trial: PassTrial) -> float:
    """Bytes that a pass moves, where all that it gives is kept."""
    jaxpr = inline_calls(jax.make_jaxpr(work_program(trial))(*work_arguments(trial))).jaxpr
    kept = frozenset(var for var in jaxpr.outvars if isinstance(var, Var))
    return sum(part.num_bytes for equation in equation_work(jaxpr, Leaving(kept, frozenset())) for part in equation.work)
