"""Equations of a flat jaxpr -> their rule, FLOP and memory traffic, under a simple model of what XLA fuses.

A contraction reads its operands and writes its result. Everything elementwise is fused into its readers, so it moves bytes only where its
result must exist: read by a contraction or leaving the program. A reduction reads its operand once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from alpa_hpc.ir.flops import equation_flops
from alpa_hpc.ir.graph import Atom, aval_of, variables
from alpa_hpc.ir.inline import HEAVY
from alpa_hpc.sharding.strategies.nested import InnerStep, nested_split
from alpa_hpc.sharding.strategies.registry import rule_of
from alpa_hpc.sharding.strategies.rule import UNSPLIT, OpRule, shape_of

LOOKUPS = frozenset({"gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
NESTS = frozenset({"scan", "while", "cond"})
CONTRACTIONS = HEAVY | LOOKUPS | NESTS  # what reads from memory, writes there, and chooses how it is split


@dataclass(frozen=True, slots=True)
class Work:
    """FLOP, bytes moved, bytes an element; splitting one of `factors` of the equation divides it (None: any)."""

    flop: float
    num_bytes: float
    itemsize: int
    factors: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class EquationWork:
    """`rule` = None: runs whole on every device. `work` is one item but for nested programs, whose parts are split differently.

    Only linear operators stand between a result in `may_stay_partial` and a gradient, so its sum may wait until the end of the
    iteration; `gradient_reduction` marks the reductions for which that pays.
    """

    rule: OpRule | None
    work: tuple[Work, ...]
    gradient_reduction: bool
    may_stay_partial: frozenset[int]

    @property
    def flop(self) -> float:
        """FLOP of all parts."""
        return sum(part.flop for part in self.work)


NO_WORK = EquationWork(None, (), gradient_reduction=False, may_stay_partial=frozenset())


@dataclass(frozen=True, slots=True)
class Leaving:
    """Variables of a program that are kept when it has run; those among them that are added up over microbatches."""

    kept: frozenset[Var]
    gradients: frozenset[Var]


@lru_cache(maxsize=512)
def equation_work(jaxpr: Jaxpr, leaving: Leaving) -> tuple[EquationWork, ...]:
    """Work of each equation of a program of which `leaving` is kept."""
    exist = must_exist(jaxpr, leaving.kept)
    waiting = _only_linear_to(jaxpr, leaving.gradients)
    return tuple(_equation_work(eqn, exist, waiting) for eqn in jaxpr.eqns)


def _equation_work(eqn: JaxprEqn, exist: frozenset[Var], waiting: frozenset[Var]) -> EquationWork:
    rule = rule_of(eqn)
    stays = frozenset(position for position, var in enumerate(eqn.outvars) if var in waiting)
    # A sum over dims of size 1 only drops them: it follows its operand, partial or not, and no sum is completed for it.
    is_sum = eqn.primitive.name == "reduce_sum" and prod(shape_of(eqn.invars[0])) > prod(shape_of(eqn.outvars[0]))
    work = _nested_work(eqn) if eqn.primitive.name in NESTS else (_work(eqn, rule, exist),)
    return EquationWork(rule, tuple(part for part in work if part.flop or part.num_bytes), is_sum and bool(stays), stays)


def _work(eqn: JaxprEqn, rule: OpRule | None, exist: frozenset[Var]) -> Work:
    name = eqn.primitive.name
    read = float(sum(map(_bytes, eqn.invars)))
    written = float(sum(_bytes(var) for var in eqn.outvars if var in exist))
    itemsize = itemsize_of(eqn.outvars[0]) if eqn.outvars else 1
    if name in HEAVY:
        return Work(float(equation_flops(eqn)), read + _bytes(eqn.outvars[0]), itemsize_of(eqn.invars[0]))
    if name in LOOKUPS:
        return Work(0.0, 2.0 * _bytes(eqn.outvars[0] if name == "gather" else eqn.invars[-1]), 4)
    if name.startswith(("reduce_", "select_and_", "arg", "cum")) or name in ("sort", "top_k") or rule is None:
        return Work(0.0, read + written, itemsize)
    return Work(0.0, written, itemsize)


def _nested_work(eqn: JaxprEqn) -> tuple[Work, ...]:
    """The work of the equations inside, each divided by the factors that it has; of a cond's branches, that of the dearest."""
    times = eqn.params.get("length", 1)
    split = nested_split(rule_of, eqn)
    programs = [_program_work(closed.jaxpr, steps) for closed, steps in zip(split.nest.programs, split.steps, strict=True)]
    if eqn.primitive.name == "cond":
        programs = [max(programs, key=lambda parts: (sum(part.flop for part in parts), sum(part.num_bytes for part in parts)))]
    return tuple(Work(times * part.flop, times * part.num_bytes, part.itemsize, part.factors) for parts in programs for part in parts)


def _program_work(jaxpr: Jaxpr, steps: Sequence[InnerStep]) -> list[Work]:
    """The work of a nested program in the factors of the whole equation, alike parts together."""
    found: dict[tuple[int, frozenset[int]], Work] = {}
    kept = Leaving(frozenset(variables(jaxpr.outvars)), frozenset())
    for step, how in zip(steps, equation_work(jaxpr, kept), strict=True):
        for part in how.work:
            factors = frozenset(step.outer if part.factors is None else (step.outer[f] for f in part.factors)) - {UNSPLIT}
            old = found.get((part.itemsize, factors), Work(0.0, 0.0, part.itemsize, factors))
            found[part.itemsize, factors] = Work(old.flop + part.flop, old.num_bytes + part.num_bytes, part.itemsize, factors)
    return list(found.values())


def must_exist(jaxpr: Jaxpr, kept: frozenset[Var]) -> frozenset[Var]:
    """Variables that must lie in memory: kept when the program has run, or read by a contraction or an operator without a rule."""
    exist = set(kept)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CONTRACTIONS or rule_of(eqn) is None:
            exist.update(variables(eqn.invars))
    return frozenset(exist)


LINEAR_PATH = frozenset("add_any add convert_element_type transpose reshape squeeze reduce_sum neg copy broadcast_in_dim split".split())


def _only_linear_to(jaxpr: Jaxpr, gradients: frozenset[Var]) -> frozenset[Var]:
    """Variables all of whose readers are linear operators on the way to a gradient."""
    waiting = set(gradients)
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(eqn)
    left = {var for var in jaxpr.outvars if isinstance(var, Var)} - gradients
    for eqn in reversed(jaxpr.eqns):
        for var in eqn.outvars:
            users = readers.get(var, [])
            passes = all(user.primitive.name in LINEAR_PATH and all(out in waiting for out in user.outvars) for user in users)
            if var not in left and passes and (users or var in gradients):
                waiting.add(var)
            elif users and not passes:
                waiting.discard(var)
    return frozenset(waiting)


def _bytes(atom: Atom) -> float:
    return float(prod(shape_of(atom))) * itemsize_of(atom)


def itemsize_of(atom: Atom) -> int:
    """Bytes an element; a PRNG key counts as 8."""
    return int(getattr(aval_of(atom).dtype, "itemsize", 8))
