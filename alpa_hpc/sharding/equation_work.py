"""Equations of a flat jaxpr -> their rule, FLOP and memory traffic, under a simple model of what XLA fuses.

A contraction reads its operands and writes its result. Everything elementwise is fused into its readers, so it moves bytes only where its
result must exist: read by a contraction or leaving the program. A reduction reads its operand once.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from alpa_hpc.ir.graph import Atom, aval_of, variables
from alpa_hpc.sharding.strategies.registry import CONTRACTIONS, rule_of
from alpa_hpc.sharding.strategies.rule import OpRule, shape_of


@dataclass(frozen=True, slots=True)
class EquationWork:
    """`rule` = None: runs whole on every device. `may_stay_partial`: only linear operators stand between the result and a gradient.

    So its sum may wait until the end of the iteration; `gradient_reduction` marks the reductions for which that pays.
    """

    rule: OpRule | None
    flop: float
    num_bytes: float
    itemsize: int
    gradient_reduction: bool
    may_stay_partial: bool


NO_WORK = EquationWork(None, 0.0, 0.0, 4, gradient_reduction=False, may_stay_partial=False)


@dataclass(frozen=True, slots=True)
class Leaving:
    """Variables of a program that are kept when it has run; those among them that are added up over microbatches."""

    kept: frozenset[Var]
    gradients: frozenset[Var]


@lru_cache(maxsize=512)
def equation_work(jaxpr: Jaxpr, leaving: Leaving) -> tuple[EquationWork, ...]:
    """Work of each equation of a program of which `leaving` is kept."""
    rules = [rule_of(eqn) for eqn in jaxpr.eqns]
    exist = must_exist(jaxpr, leaving.kept)
    waiting = _only_linear_to(jaxpr, leaving.gradients)
    return tuple(_work(eqn, rule, exist, waiting) for eqn, rule in zip(jaxpr.eqns, rules, strict=True))


def _work(eqn: JaxprEqn, rule: OpRule | None, exist: frozenset[Var], waiting: frozenset[Var]) -> EquationWork:
    stays = all(var in waiting for var in eqn.outvars)
    name = eqn.primitive.name
    read = float(sum(map(_bytes, eqn.invars)))
    written = float(sum(_bytes(var) for var in eqn.outvars if var in exist))
    itemsize = itemsize_of(eqn.outvars[0])
    # A sum over dims of size 1 only drops them: it follows its operand, partial or not, and no sum is completed for it.
    is_gradient = stays and name == "reduce_sum" and prod(shape_of(eqn.invars[0])) > prod(shape_of(eqn.outvars[0]))
    if name == "dot_general":
        flop, moved, itemsize = _dot_flop(eqn), read + _bytes(eqn.outvars[0]), itemsize_of(eqn.invars[0])
    elif name in CONTRACTIONS:
        flop, moved, itemsize = 0.0, 2.0 * _bytes(eqn.invars[-1] if name == "scatter-add" else eqn.outvars[0]), 4
    elif name.startswith(("reduce_", "arg", "cum")) or rule is None:
        flop, moved = 0.0, read + written
    else:
        flop, moved = 0.0, written
    return EquationWork(rule, flop, moved, itemsize, gradient_reduction=is_gradient, may_stay_partial=stays)


def must_exist(jaxpr: Jaxpr, kept: frozenset[Var]) -> frozenset[Var]:
    """Variables that must lie in memory: kept when the program has run, or read by a contraction or an operator without a rule."""
    exist = set(kept)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CONTRACTIONS or rule_of(eqn) is None:
            exist.update(variables(eqn.invars))
    return frozenset(exist)


LINEAR_PATH = frozenset("add_any add convert_element_type transpose reshape squeeze reduce_sum neg copy broadcast_in_dim".split())


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


def _dot_flop(eqn: JaxprEqn) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    shape = shape_of(eqn.invars[0])
    return 2.0 * float(prod(shape[d] for d in contract)) * float(prod(shape_of(eqn.outvars[0])))


def _bytes(atom: Atom) -> float:
    return float(prod(shape_of(atom))) * itemsize_of(atom)


def itemsize_of(atom: Atom) -> int:
    """Bytes an element; a PRNG key counts as 8."""
    return int(getattr(aval_of(atom).dtype, "itemsize", 8))
