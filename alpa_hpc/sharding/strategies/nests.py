"""scan, while and cond, seen alike: flat programs, what passes in and out of them, and what flows from one run of them to the next."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from alpa_hpc.ir.graph import Atom
from alpa_hpc.ir.inline import inline_all


@dataclass(frozen=True, slots=True)
class Passage:
    """What an operand of the equation becomes inside (or a result may have been inside), without its first `stacked` dims."""

    atoms: tuple[Atom, ...]
    stacked: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Nest:
    """`operands` and `results` are those of the equation, in order; in `flows` the value of the first goes on as the second."""

    programs: tuple[ClosedJaxpr, ...]
    operands: tuple[Passage, ...]
    results: tuple[Passage, ...]
    flows: tuple[tuple[Atom, Var], ...]


def nest_of(eqn: JaxprEqn) -> Nest:
    """The programs of a scan, while or cond equation."""
    return _NESTS[eqn.primitive.name](eqn)


def _scan(eqn: JaxprEqn) -> Nest:
    params = eqn.params
    body = _flat(params["jaxpr"])
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    stop = num_consts + num_carry
    variables, outcomes = body.jaxpr.invars, body.jaxpr.outvars
    carry = variables[num_consts:stop]
    return Nest(
        (body,),
        (*_passed(variables[:stop]), *_passed(variables[stop:], 1)),
        (*_passed(carry), *_passed(outcomes[num_carry:], 1)),
        tuple(zip(outcomes[:num_carry], carry, strict=True)),
    )


def _while(eqn: JaxprEqn) -> Nest:
    condition, body = _flat(eqn.params["cond_jaxpr"]), _flat(eqn.params["body_jaxpr"])
    num_asked, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asked, looked_at = condition.jaxpr.invars[:num_asked], condition.jaxpr.invars[num_asked:]
    consts, carry = body.jaxpr.invars[:num_consts], body.jaxpr.invars[num_consts:]
    flows = (*zip(body.jaxpr.outvars, carry, strict=True), *zip(carry, looked_at, strict=True))
    return Nest((condition, body), (*_passed(asked), *_passed(consts), *_passed(carry)), _passed(carry), flows)


def _cond(eqn: JaxprEqn) -> Nest:
    branches = tuple(map(_flat, eqn.params["branches"]))
    operands = zip(*(branch.jaxpr.invars for branch in branches), strict=True)
    results = zip(*(branch.jaxpr.outvars for branch in branches), strict=True)
    return Nest(branches, (Passage(()), *map(Passage, operands)), tuple(map(Passage, results)), ())


def _flat(body: ClosedJaxpr) -> ClosedJaxpr:
    return inline_all(body, unguarded=frozenset())


def _passed(atoms: Sequence[Atom], stacked: int = 0) -> tuple[Passage, ...]:
    return tuple(Passage((atom,), stacked) for atom in atoms)


_NESTS = {"scan": _scan, "while": _while, "cond": _cond}
