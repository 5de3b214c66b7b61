"""A program that exchanges more or less than its plan is found out, with the place; one that does what is planned is not."""

from collections import Counter
from functools import cache

import jax
import numpy as np
import optax
import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.report.planning import check_report
from alpa_hpc.report.result import check_line, check_warnings
from alpa_hpc.runtime.assemble import Assembly
from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.sharding import apply
from alpa_hpc.sharding.place import Place
from alpa_hpc.sharding.resharding import AllGather, AllReduce, CollectiveKind, Lane, Move
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify.check import TaskCheck, axis_groups, check_task, lane_of
from alpa_hpc.verify.hlo import Collective
from alpa_hpc.verify.plan import NotCompiled, PlanCheck, StageCheck, check_plan_code
from tests.random_plans import Family, Plan, Variant, mlp_batch, mlp_loss, mlp_params, optax_step

pytestmark = pytest.mark.slow

SEED = 3
VARIANT = Variant(0, 4, (2, 2), True, SEED)


@cache
def family() -> Family:
    params = mlp_params()
    optimiser = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    return Family(optax_step(mlp_loss, optimiser), {"params": params, "optimiser": optimiser.init(params)}, mlp_batch)


@cache
def assembly() -> Assembly:
    return family().assembly(Plan((VARIANT,), 2))


def checked(name: str) -> TaskCheck:
    """A task of the stage, compiled now."""
    whole = assembly()
    compiled = compile_task(whole.tasks(0)[name], VARIANT.mesh)
    return check_task(whole.step, whole.stages[0], whole.pipeline.stages[0], whole.tasks(0)[name], 0, compiled)


def without_first(kind: type) -> tuple[list[Move], object]:
    """A `run_move` that leaves out the first all-reduce that it meets."""
    run_move, dropped = apply.run_move, list[Move]()

    def dropping(x: jax.Array, move: Move, place: Place) -> jax.Array:
        if isinstance(move.steps[0], kind) and not dropped:
            dropped.append(move)
            return x
        return run_move(x, move, place)

    return dropped, dropping


def test_a_dropped_sum_is_found_with_its_neighbourhood(monkeypatch: pytest.MonkeyPatch):
    assert not checked("backward").mismatches
    dropped, dropping = without_first(AllReduce)
    monkeypatch.setattr(apply, "run_move", dropping)
    found = checked("backward")
    assert len(dropped) == 1
    wrong = [lane for lane in found.lanes if not lane.agrees]
    assert [lane.lane for lane in wrong] == [Lane(CollectiveKind.ALL_REDUCE, dropped[0].axes)]
    assert wrong[0].compiled_bytes < wrong[0].planned_bytes
    (text,) = found.mismatches
    assert text.startswith("backward: all-reduce over mesh axis") and "not compiled" in text and "not planned" not in text
    arrows = [line for line in text.splitlines() if "->" in line]
    assert arrows and all(" = " in line for line in arrows), "the equation that wants it, with specs"
    assert "layer " in text


def test_a_sum_too_many_is_found(monkeypatch: pytest.MonkeyPatch):
    run_move, doubled = apply.run_move, list[Move]()

    def twice(x: jax.Array, move: Move, place: Place) -> jax.Array:
        if isinstance(move.steps[0], AllReduce) and not doubled:
            doubled.append(move)
            x = 0.5 * run_move(x, move, place)
        return run_move(x, move, place)

    monkeypatch.setattr(apply, "run_move", twice)
    (text,) = checked("backward").mismatches
    assert "not planned" in text and "-> " in text, "XLA remembers which operation it was"


def test_a_gather_in_place_of_a_cut_is_found_in_the_update(monkeypatch: pytest.MonkeyPatch):
    dropped, dropping = without_first(AllGather)
    assert not checked("partials").mismatches
    monkeypatch.setattr(apply, "run_move", dropping)
    with pytest.raises((TypeError, ValueError)):
        checked("update")  # shapes do not fit: not every mistake gets as far as the check
    assert dropped


def test_lanes_are_told_by_their_groups():
    shape = MeshShape(2, 4)
    for axes, known in axis_groups(shape).items():
        groups = tuple(tuple(sorted(group)) for group in known)
        assert lane_of(Collective(CollectiveKind.ALL_REDUCE, (4,), groups), shape) == Lane(CollectiveKind.ALL_REDUCE, axes)
    assert lane_of(Collective(CollectiveKind.COLLECTIVE_PERMUTE, (4,), ((0, 1), (1, 0))), shape).axes == ()
    assert lane_of(Collective(CollectiveKind.ALL_REDUCE, (4,), ((0, 1, 2, 3),)), MeshShape(4, 1)).axes == (0,)


def test_equal_stages_are_compiled_once_and_the_report_is_plain():
    plan = Plan((Variant(0, 2, (2, 1), False, SEED), Variant(2, 4, (2, 1), False, SEED)), 2)
    whole = family().assembly(plan)
    checks = check_plan_code(whole, [Submesh(1, 2), Submesh(1, 2)], CheckTarget.CPU)
    names = Counter(task.task.partition(":")[0] for task in checks.tasks)
    assert names["forward"] == names["backward"] == 2, "the first stage looks up tokens, the last one makes the loss"
    assert names["zeros"] == 2 and not checks.mismatches
    report = check_report(checks)
    assert report["target"] == "cpu" and len(report["tasks"]) == len(checks.tasks)
    assert "of 4 kinds" not in check_line(report) and "peak memory of" in check_line(report)
    again = check_plan_code(family().assembly(plan), [Submesh(1, 2), Submesh(1, 2)], CheckTarget.NONE)
    assert again == PlanCheck(CheckTarget.NONE, ())


def test_what_the_compiler_fails_on_stands_in_the_report_even_alone():
    report = check_report(PlanCheck(CheckTarget.H100, (StageCheck(2, (), (NotCompiled("update", "INTERNAL: no tiles"),)),)))
    assert report["not_compiled"] == [{"stage": 2, "task": "update", "reason": "INTERNAL: no tiles"}] and not report["tasks"]
    assert check_line(report).endswith("; 1 not checked, since the compiler failed: stage 2, update (all in planning.json)")
    [told] = check_warnings(report)
    assert told == "the plan stands, but stage 2, update is not checked: XLA's compiler for h100 failed on it: INTERNAL: no tiles"


def test_a_mismatch_stands_in_the_report():
    wrong = TaskCheck("forward", (), checked("zeros").memory, ("forward: all-reduce ... compiled 8\n  not planned: 8 bytes",))
    report = check_report(PlanCheck(CheckTarget.CPU, (StageCheck(3, (wrong,)),)))
    assert report["mismatches"] == ["stage 3, forward: all-reduce ... compiled 8\n  not planned: 8 bytes"]
    assert check_line(report).endswith("1 not as planned, first: stage 3, forward: all-reduce ... compiled 8 (all in planning.json)")
    np.testing.assert_equal(report["tasks"][0]["planned_peak_bytes"], wrong.memory.planned_peak)
