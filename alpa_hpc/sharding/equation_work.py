"""FLOP and memory traffic of the equations of a flat jaxpr, under a simple model of what XLA fuses.

A contraction reads its operands and writes its result. Everything elementwise is fused into its readers, so it moves bytes only where its result must
exist: read by a contraction or leaving the program. A reduction reads its operand once.
"""

from dataclasses import dataclass

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from alpa_hpc.sharding.strategies.registry import CONTRACTIONS, rule_of


@dataclass(frozen=True, slots=True)
class EquationWork:
    """`may_stay_partial`: only linear operators stand between the result and a gradient, so its sum may wait until the end of the iteration."""

    flop: float
    num_bytes: float
    itemsize: int
    gradient_reduction: bool
    may_stay_partial: bool


NO_WORK = EquationWork(0.0, 0.0, 4, gradient_reduction=False, may_stay_partial=False)


def equation_work(jaxpr: Jaxpr, gradients: frozenset[Var]) -> tuple[EquationWork, ...]:
    """Work of each equation; `gradients` are the variables that are accumulated over microbatches."""
    exist = _must_exist(jaxpr)
    waiting = _only_linear_to(jaxpr, gradients)
    return tuple(_work(eqn, exist, waiting) for eqn in jaxpr.eqns)


def _work(eqn: JaxprEqn, exist: frozenset[Var], waiting: frozenset[Var]) -> EquationWork:
    stays = all(var in waiting for var in eqn.outvars)
    name = eqn.primitive.name
    written = float(sum(_bytes(var) for var in eqn.outvars if var in exist))
    if name == "dot_general":
        read = sum(_bytes(atom) for atom in eqn.invars)
        return EquationWork(_dot_flop(eqn), read + _bytes(eqn.outvars[0]), _itemsize(eqn.invars[0]), gradient_reduction=False, may_stay_partial=stays)
    if name in CONTRACTIONS:
        return EquationWork(0.0, 2.0 * _bytes(eqn.invars[-1] if name == "scatter-add" else eqn.outvars[0]), 4, gradient_reduction=False, may_stay_partial=stays)
    if name.startswith(("reduce_", "arg", "cum")) or rule_of(eqn) is None:
        read = float(sum(_bytes(atom) for atom in eqn.invars))
        return EquationWork(0.0, read + written, _itemsize(eqn.outvars[0]), gradient_reduction=stays and name == "reduce_sum", may_stay_partial=stays)
    return EquationWork(0.0, written, _itemsize(eqn.outvars[0]), gradient_reduction=False, may_stay_partial=stays)


def _must_exist(jaxpr: Jaxpr) -> frozenset[Var]:
    exist = {var for var in jaxpr.outvars if isinstance(var, Var)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CONTRACTIONS or rule_of(eqn) is None:
            exist.update(atom for atom in eqn.invars if isinstance(atom, Var))
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
            passes = all(u.primitive.name in LINEAR_PATH and all(out in waiting for out in u.outvars) for u in users)
            if var not in left and passes and (users or var in gradients):
                waiting.add(var)
            elif users and not passes:
                waiting.discard(var)
    return frozenset(waiting)


def _dot_flop(eqn: JaxprEqn) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    depth = float(np.prod([eqn.invars[0].aval.shape[d] for d in contract], dtype=np.float64))
    return 2.0 * depth * float(np.prod(eqn.outvars[0].aval.shape, dtype=np.float64))


def _bytes(atom: Var | Literal) -> float:
    return float(np.prod(atom.aval.shape, dtype=np.float64)) * _itemsize(atom)


def _itemsize(atom: Var | Literal) -> int:
    return int(getattr(atom.aval.dtype, "itemsize", 8))
