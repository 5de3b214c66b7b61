"""A place in the plan -> lines for people: the equation, its neighbours, and how their tensors lie."""

import re
from collections.abc import Sequence

from jax.extend.core import Literal

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.sharding.apply import ChosenLayer, program_title
from alpa_hpc.sharding.build import LayerProblem, Program
from alpa_hpc.sharding.graph import FREE
from alpa_hpc.sharding.tiles import Origin
from alpa_hpc.verify.traffic import AtBorder, InProgram, Site

BESIDE = 2  # equations before and after
_SCOPE = re.compile(r"layer(?P<layer>\d+)\.(?P<title>\w+)\.(?P<equation>\d+)")


def compiled_site(layers: Sequence[ChosenLayer], origin: str) -> Site:
    """The place of a compiled operation, as XLA remembers it; between programs, its words."""
    scope = _SCOPE.search(origin)
    if scope:
        for chosen in layers:
            for program in _programs(chosen.problem):
                if (str(chosen.problem.layer.index), program_title(chosen.problem, program)) == (scope["layer"], scope["title"]):
                    return InProgram(chosen, Origin(program, int(scope["equation"])))
    return AtBorder(origin or "an operation without a name")


def _programs(problem: LayerProblem) -> tuple[Program, ...]:
    updates = (program for update in problem.updates for program in update.programs)
    return (problem.forward, problem.backward, *updates)


def site_lines(site: Site) -> list[str]:
    """The place in words; where it is an equation, with its neighbours, an arrow before it."""
    match site:
        case AtBorder(words):
            return [words]
        case InProgram(chosen, origin):
            program, at, last = origin.program, origin.equation, len(origin.program.records)
            where = f"equation {at}" if at < last else "its results"
            head = f"layer {chosen.problem.layer.index}, {program_title(chosen.problem, program)}, {where}"
            around = range(max(0, at - BESIDE), min(last, at + BESIDE + 1))
            return [head, *(f"{'->' if number == at else '  '} {equation_line(chosen, program, number)}" for number in around)]


def equation_line(chosen: ChosenLayer, program: Program, number: int) -> str:
    """One equation: `12  t40 float32[8,64] [S0,R] = dot_general t38 [S0,R], t4 [R,R] as [R,S1]`. Tensors are numbered by layer."""
    eqn, record = program.jaxpr.jaxpr.eqns[number], program.records[number]
    if not record.plans:
        return f"{number:4}  {eqn.primitive.name}"
    outcomes = zip(eqn.outvars, record.results, strict=True)
    results = [f"t{tensor} {aval_of(var).str_short()} {chosen.spec(tensor)}" for var, tensor in outcomes]
    plan = record.plans[0 if record.node == FREE else chosen.choices[record.node]]
    operands: list[str] = []
    for atom, tensor, spec in zip(eqn.invars, record.operands, plan.operands, strict=True):
        if isinstance(atom, Literal):
            operands.append(str(atom.val))
        else:
            own = chosen.spec(tensor)
            operands.append(f"t{tensor} {own}" + (f" as {spec}" if spec != own else ""))
    return f"{number:4}  {'; '.join(results)} = {eqn.primitive.name} {', '.join(operands)}"
