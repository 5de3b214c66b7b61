"""Layer problems -> the work that every device of a mesh repeats, because no rule knows how to split its operator (DESIGN 7.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from alpa_hpc.ir.flops import equation_bytes, equation_flops
from alpa_hpc.ir.graph import aval_of
from alpa_hpc.ir.state import is_key
from alpa_hpc.sharding.build import LayerProblem, Program


@dataclass(frozen=True, slots=True)
class ReplicatedWork:
    """Operators of one primitive that run whole on every device: what one of these devices does in a microbatch or an update."""

    primitive: str
    flop: float
    num_bytes: float
    count: int


@dataclass(frozen=True, slots=True)
class ReplicatedShare:
    """Repeated work as a share (0 to 1) of the FLOP and of the bytes of all operators."""

    flop: float
    num_bytes: float


def replicated_work(layers: Sequence[LayerProblem]) -> tuple[ReplicatedWork, ...]:
    """The repeated operators of `layers` by primitive, the most bytes first; those on single numbers are left out."""
    found: dict[str, ReplicatedWork] = {}
    for problem in layers:
        for program in _programs(problem):
            for eqn, record in zip(program.jaxpr.jaxpr.eqns, program.records, strict=True):
                if record.replicated and _is_divisible(eqn):
                    name = eqn.primitive.name
                    old = found.get(name, ReplicatedWork(name, 0.0, 0.0, 0))
                    flop, num_bytes = old.flop + equation_flops(eqn), old.num_bytes + equation_bytes(eqn)
                    found[name] = ReplicatedWork(name, flop, num_bytes, old.count + 1)
    return tuple(sorted(found.values(), key=lambda work: (-work.num_bytes, work.primitive)))


def replicated_share(layers: Sequence[LayerProblem]) -> ReplicatedShare:
    """The share of repeated work; both counts take every operator by itself, unfused, so that they can be compared."""
    repeated = replicated_work(layers)
    equations = [eqn for problem in layers for program in _programs(problem) for eqn in program.jaxpr.jaxpr.eqns]
    flop, num_bytes = sum(map(equation_flops, equations)), sum(map(equation_bytes, equations))
    return ReplicatedShare(sum(work.flop for work in repeated) / max(flop, 1), sum(work.num_bytes for work in repeated) / max(num_bytes, 1))


def _is_divisible(eqn: JaxprEqn) -> bool:
    """Whether an operator is on more than single numbers and single keys, or is a loop of many."""
    makes_keys = all(is_key(aval_of(var)) for var in eqn.outvars)
    return equation_flops(eqn) > 1 or any(aval_of(atom).size > 1 for atom in (*(() if makes_keys else eqn.invars), *eqn.outvars))


def _programs(problem: LayerProblem) -> tuple[Program, ...]:
    updates = (program for update in problem.updates for program in update.programs)
    return (problem.forward, problem.backward, *updates)
