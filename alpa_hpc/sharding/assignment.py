"""The strategies of one operator: mesh axes given to the factors of its rule, and the specs that follow (paper, section 4.1).

All strategies of an operator stand in one `PlanTable`. It depends on the rule and the mesh's shape alone, so equal operators share it.
"""

from dataclasses import dataclass
from functools import lru_cache

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.spec import AXES, Spec, SpecList, split_of, subsets
from alpa_hpc.sharding.strategies.rule import UNSPLIT, Combine, OpRule

NONE = -1
Assignment = tuple[int, int]  # factor split over axis 0, factor split over axis 1 (NONE = the axis repeats the work)
WHOLE: Assignment = (NONE, NONE)


@dataclass(frozen=True, slots=True)
class EquationPlan:
    """How one equation runs by `assignment`: the specs its operands must have, and what its results have right after it.

    `combined` = axes over which a result that is no sum (a maximum) is joined at once; sums are left partial in `raw`. `split` = over how
    many devices the work is divided.
    """

    assignment: Assignment
    operands: tuple[Spec, ...]
    raw: tuple[Spec, ...]
    combined: tuple[tuple[int, Combine], ...]
    split: int


def combined_axes(plan: EquationPlan, mesh: MeshShape) -> dict[Combine, tuple[int, ...]]:
    """The axes of more than one device over which a plan joins results at once: one collective for each way to join, axes in order."""
    found: dict[Combine, tuple[int, ...]] = {}
    for axis, combine in plan.combined:
        if mesh.sizes[axis] > 1:
            found[combine] = tuple(sorted((*found.get(combine, ()), axis)))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class PlanTable:
    """The plans an equation chooses from, and the same by columns: `operands[i][k]` = spec of operand i in plan k, likewise for results.

    `finished` = specs of the results once the sums that the operator itself makes are complete (those its operands brought along stay).
    """

    labels: tuple[str, ...]
    plans: tuple[EquationPlan, ...]
    operands: tuple[SpecList, ...]
    raw: tuple[SpecList, ...]
    finished: tuple[SpecList, ...]


@lru_cache(maxsize=4096)
def own_plans(rule: OpRule, mesh: MeshShape) -> PlanTable:
    """Every way to split an operator."""
    options = assignments(rule, mesh)
    return table_of(rule, tuple(assignment_label(option) for option in options), tuple(plan_of(rule, option, mesh) for option in options))


@lru_cache(maxsize=4096)
def waiting_plans(rule: OpRule, mesh: MeshShape) -> PlanTable:
    """Every way to split a linear operator, and each again with its operands as sums over axes that split nothing, which stay so."""
    options = [(option, partial) for option in assignments(rule, mesh) for partial in subsets(_free_axes(option, mesh))]
    labels = tuple(assignment_label(option) + "".join(f",{'xy'[axis]}+" for axis in partial) for option, partial in options)
    return table_of(rule, labels, tuple(plan_of(rule, option, mesh, partial) for option, partial in options))


def _free_axes(option: Assignment, mesh: MeshShape) -> tuple[int, ...]:
    return tuple(axis for axis in AXES if option[axis] == NONE and mesh.sizes[axis] > 1)


@lru_cache(maxsize=4096)
def whole_plan(rule: OpRule, mesh: MeshShape) -> PlanTable:
    """The one plan of an operator that every device runs whole."""
    return table_of(rule, ("whole",), (plan_of(rule, WHOLE, mesh),))


@lru_cache(maxsize=16384)
def following_plans(rule: OpRule, operand: int, specs: SpecList, mesh: MeshShape) -> PlanTable | None:
    """Plan k keeps operand number `operand` in `specs[k]`; None when the operator cannot take one of them so."""
    plans: dict[Spec, EquationPlan] = {}
    for spec in dict.fromkeys(specs):
        plan = following(rule, operand, spec, mesh)
        if plan is None:
            return None
        plans[spec] = plan
    return table_of(rule, tuple(map(str, specs)), tuple(plans[spec] for spec in specs))


def table_of(rule: OpRule, labels: tuple[str, ...], plans: tuple[EquationPlan, ...]) -> PlanTable:
    """Plans by rows and by columns."""
    return PlanTable(
        labels,
        plans,
        tuple(tuple(plan.operands[i] for plan in plans) for i in range(len(rule.operands))),
        tuple(tuple(plan.raw[i] for plan in plans) for i in range(len(rule.results))),
        tuple(tuple(_finished(plan, i) for plan in plans) for i in range(len(rule.results))),
    )


def _finished(plan: EquationPlan, position: int) -> Spec:
    raw = plan.raw[position]
    brought = {axis for operand in plan.operands for axis in operand.partial}
    return Spec(raw.dims, tuple(axis for axis in raw.partial if axis in brought))


def assignments(rule: OpRule, mesh: MeshShape) -> tuple[Assignment, ...]:
    """All ways to give each axis (of size > 1) to a factor that it divides and that some tensor has, or to none."""
    factors = sorted({factor for dims in (*rule.operands, *rule.results) for factor in dims} - {UNSPLIT})
    options = [(NONE,) if mesh.sizes[axis] == 1 else (NONE, *factors) for axis in AXES]
    return tuple((first, second) for first in options[0] for second in options[1] if _divides(rule, (first, second), mesh))


@lru_cache(maxsize=4096)
def most_devices(rule: OpRule, mesh: MeshShape) -> int:
    """Over how many devices the work of an operator can be divided."""
    return max(split_of(tuple(axis for axis in AXES if chosen[axis] != NONE), mesh) for chosen in assignments(rule, mesh))


def _divides(rule: OpRule, assignment: Assignment, mesh: MeshShape) -> bool:
    for factor in set(assignment) - {NONE}:
        axes = tuple(axis for axis in AXES if assignment[axis] == factor)
        if rule.sizes[factor] % split_of(axes, mesh):
            return False
    return True


def plan_of(rule: OpRule, assignment: Assignment, mesh: MeshShape, partial: tuple[int, ...] = ()) -> EquationPlan:
    """The specs of `assignment`; `partial` = axes over which a linear operator's operands are partial sums already."""
    axes_of = {factor: tuple(axis for axis in AXES if assignment[axis] == factor) for factor in set(assignment) - {NONE}}
    sums = [list(partial) for _ in rule.results]
    combined: list[tuple[int, Combine]] = []
    for reduction in rule.reduced:
        axes = axes_of.get(reduction.factor, ())
        if reduction.combine is Combine.SUM:
            for position in reduction.results:
                sums[position] += axes
        else:
            combined += [(axis, reduction.combine) for axis in axes]
    operands = tuple(Spec(_dims(dims, axes_of), partial) for dims in rule.operands)
    raw = tuple(Spec(_dims(dims, axes_of), tuple(sorted(axes))) for dims, axes in zip(rule.results, sums, strict=True))
    used = [axis for axes in axes_of.values() for axis in axes]
    return EquationPlan(assignment, operands, raw, tuple(combined), split_of(tuple(used), mesh))


def _dims(dims: tuple[int, ...], axes_of: dict[int, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple([() if factor == UNSPLIT else axes_of.get(factor, ()) for factor in dims])


def following(rule: OpRule, operand: int, spec: Spec, mesh: MeshShape) -> EquationPlan | None:
    """The plan in which operand number `operand` keeps `spec`; None when the operator cannot take it so."""
    if spec.partial and not rule.linear:
        return None
    chosen = _assignment_of(rule, rule.operands[operand], spec, mesh)
    return None if chosen is None else plan_of(rule, chosen, mesh, spec.partial)


def making(rule: OpRule, result: int, spec: Spec, mesh: MeshShape) -> EquationPlan | None:
    """The plan in which result number `result` is made in `spec`, from nothing but its pieces; None where the operator cannot do that."""
    chosen = _assignment_of(rule, rule.results[result], spec, mesh)
    return None if chosen is None else plan_of(rule, chosen, mesh)


def _assignment_of(rule: OpRule, dims: tuple[int, ...], spec: Spec, mesh: MeshShape) -> Assignment | None:
    """The factors that the axes of `spec` have in a tensor whose dims have the factors `dims`."""
    assignment = [NONE, NONE]
    for factor, axes in zip(dims, spec.dims, strict=True):
        if axes and factor == UNSPLIT:
            return None
        for axis in axes:
            assignment[axis] = factor
    chosen = (assignment[0], assignment[1])
    return chosen if _divides(rule, chosen, mesh) else None


def assignment_label(assignment: Assignment) -> str:
    """Readable and stable: "x2,y-" = axis 0 splits factor 2, axis 1 repeats."""
    return ",".join(f"{name}{'-' if factor == NONE else factor}" for name, factor in zip("xy", assignment, strict=True))
