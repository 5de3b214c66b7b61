"""The sharding rule of an operator, in factors: the loops of its computation that a mesh axis may split.

Every dim of every operand and result either belongs to one factor or to none (`UNSPLIT`). Giving a mesh axis to a factor splits all dims
of that factor over the axis; a factor that is summed over (a contraction) leaves a partial sum. So a strategy is an assignment of axes to
factors.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import Atom, aval_of

UNSPLIT = -1


class Combine(enum.Enum):
    """How the pieces of a reduced factor are put together."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class OpRule:
    """`operands[i][d]` / `results[i][d]` = factor of dim d, or UNSPLIT; `sizes[f]` must be divisible by the axes given to factor f.

    `reduced` maps a factor that no result dim has to how its pieces combine. `linear` = partial operands (all of them, over the same axes)
    give a partial result, so the sum may be put off.
    """

    sizes: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    reduced: tuple[tuple[int, Combine], ...] = ()
    linear: bool = False


RuleFunction = Callable[[JaxprEqn], OpRule | None]


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Shape of a jaxpr variable or literal."""
    return tuple(aval_of(atom).shape)
