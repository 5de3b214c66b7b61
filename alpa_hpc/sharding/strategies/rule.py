"""The sharding rule of an operator, in factors: the loops of its computation that a mesh axis may split.

Every dim of every operand and result either belongs to one factor or to none (`UNSPLIT`). Giving a mesh axis to a factor splits all dims
of that factor over the axis; a factor that is summed over (a contraction) leaves a partial sum. So a strategy is an assignment of axes to
factors.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import Atom, aval_of

UNSPLIT = -1
NOWHERE: Mapping[int, int] = MappingProxyType({})


class Combine(enum.Enum):
    """How the pieces of a reduced factor are put together."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Reduction:
    """Splitting `factor` leaves pieces of the results numbered `results`, which have no such dim; `combine` puts them together."""

    factor: int
    combine: Combine
    results: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class OpRule:
    """`operands[i][d]` / `results[i][d]` = factor of dim d, or UNSPLIT; `sizes[f]` must be divisible by the axes given to factor f.

    `linear` = partial operands (all of them, over the same axes) give a partial result, so the sum may be put off.
    """

    sizes: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    reduced: tuple[Reduction, ...] = ()
    linear: bool = False


RuleFunction = Callable[[JaxprEqn], OpRule | None]


@dataclass(slots=True)
class RuleDraft:
    """A rule being written: every dim is whole until `factor` says otherwise."""

    operands: list[list[int]]
    results: list[list[int]]
    sizes: list[int] = field(default_factory=list[int])
    reduced: list[Reduction] = field(default_factory=list[Reduction])

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "RuleDraft":
        """The rule of an equation that nothing splits."""
        return cls([[UNSPLIT] * len(shape_of(atom)) for atom in eqn.invars], [[UNSPLIT] * len(shape_of(var)) for var in eqn.outvars])

    def factor(self, size: int, operands: Mapping[int, int], results: Mapping[int, int] = NOWHERE, combine: Combine | None = None) -> None:
        """A new factor: the dim of each operand and result that belongs to it, by position; `combine` if result 0 is made in pieces."""
        for places, dims in ((self.operands, operands), (self.results, results)):
            for position, dim in dims.items():
                assert places[position][dim] == UNSPLIT, f"dim {dim} of number {position} has two factors"
                places[position][dim] = len(self.sizes)
        if combine is not None:
            self.reduced.append(Reduction(len(self.sizes), combine))
        self.sizes.append(size)

    def rule(self, *, linear: bool = False) -> OpRule:
        """The rule as it stands."""
        return OpRule(tuple(self.sizes), tuple(map(tuple, self.operands)), tuple(map(tuple, self.results)), tuple(self.reduced), linear)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Shape of a jaxpr variable or literal."""
    return tuple(aval_of(atom).shape)
