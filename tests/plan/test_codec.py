"""Plans as files: what is written is read back, and what is torn, foreign, old or inconsistent is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.plan.codec import plan_from_json, plan_hash, plan_to_json
from alpa_hpc.plan.plan import MadeFor, ParallelPlan, Prediction, StagePlan, check_plan

STAGES = (
    StagePlan(0, 2, Submesh(1, 2), MeshShape(2, 1), (0, 1), remat=True, strategies=(0, 0)),
    StagePlan(2, 3, Submesh(1, 2), MeshShape(1, 2), (2, 3), remat=False, strategies=(1,)),
)
TABLE = ({"forward 3": "S0,R -> R"}, {})
MADE_FOR = MadeFor("2 arrays", "float32[4]", "8", "3 layers", "2 updates", "2 x 2 devices", "jax 0")
PLAN = ParallelPlan("a" * 64, 3, 4, 8, "1f1b", STAGES, TABLE, Prediction(0.5, (10, 20)), MADE_FOR)

Edit = Callable[[dict[str, Any]], object]


def test_a_plan_comes_back_as_it_was():
    found = plan_from_json(plan_to_json(PLAN), "plan.json")
    assert found == PLAN
    assert (found.prediction, found.made_for) == (PLAN.prediction, PLAN.made_for)


def test_a_plan_is_written_so_that_diff_can_compare_it():
    """Nothing but what changed differs, and what belongs together stands on one line."""
    lines = plan_to_json(PLAN).splitlines()
    assert '   "devices": [0, 1],' in lines and '   "layers": [0, 2],' in lines and '  "stage_bytes": [10, 20]' in lines
    other = plan_to_json(replace(PLAN, stages=(replace(STAGES[0], devices=(1, 0)), STAGES[1]))).splitlines()
    assert [(a, b) for a, b in zip(lines, other, strict=True) if a != b] == [('   "devices": [0, 1],', '   "devices": [1, 0],')]


def test_the_prediction_is_no_part_of_what_a_plan_means():
    assert replace(PLAN, prediction=Prediction(9.0, (1, 1))) == PLAN
    assert replace(PLAN, num_microbatches=4) != PLAN


def same_plan_otherwise_written() -> ParallelPlan:
    """The rows of the table in another order, its nodes too, and another prediction by another version."""
    stages = tuple(replace(stage, strategies=tuple(1 - row for row in stage.strategies)) for stage in STAGES)
    other = replace(MADE_FOR, software="jax 1")
    return replace(PLAN, stages=stages, strategy_table=TABLE[::-1], prediction=Prediction(9.0, (1, 1)), made_for=other)


def test_the_hash_of_a_plan_is_that_of_what_it_means():
    assert plan_hash(plan_from_json(plan_to_json(PLAN), "plan.json")) == plan_hash(PLAN)
    assert plan_hash(same_plan_otherwise_written()) == plan_hash(PLAN)


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, model_key="b" * 64),
        replace(PLAN, num_microbatches=4),
        replace(PLAN, schedule="gpipe"),
        replace(PLAN, stages=(replace(STAGES[0], devices=(1, 0)), STAGES[1])),
        replace(PLAN, stages=(replace(STAGES[0], remat=False), STAGES[1])),
        replace(PLAN, stages=(replace(STAGES[0], strategies=(0, 1)), STAGES[1])),
        replace(PLAN, strategy_table=({"forward 3": "S1,R -> R"}, {})),
    ],
)
def test_another_plan_has_another_hash(other: ParallelPlan):
    assert plan_hash(other) != plan_hash(PLAN)


def test_a_torn_file_is_refused_at_every_length():
    text = plan_to_json(PLAN)
    for length in range(0, len(text) - 2, 7):
        with pytest.raises(PlanError, match=r"^runs/1/plan\.json is not complete JSON"):
            plan_from_json(text[:length], "runs/1/plan.json")


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"kind": "a cake", "version": 1}'])
def test_a_foreign_file_is_refused(text: str):
    with pytest.raises(PlanError, match=r"^x\.json is no plan of alpa_hpc"):
        plan_from_json(text, "x.json")


@pytest.mark.parametrize("field", ["version", "rules_version"])
def test_a_plan_of_another_version_is_refused(field: str):
    document = json.loads(plan_to_json(PLAN))
    document[field] += 1
    with pytest.raises(PlanError, match=r"has plan and rules version \(\d, \d\), this program reads .*another version of alpa_hpc"):
        plan_from_json(json.dumps(document), "plan.json")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("stages"), "lacks or garbles a field"),
        (lambda d: d.update(num_layers="three"), "lacks or garbles a field"),
        (lambda d: d.update(strategies=[["forward 3"], {}]), "lacks or garbles a field"),
        (lambda d: d["stages"][0].update(shape=[2]), "lacks or garbles a field"),
        (lambda d: d["stages"][1].update(layers=[1, 3]), "expected a run that starts at 2"),
        (lambda d: d.update(num_layers=4), "cover 3 layers, the model has 4"),
        (lambda d: d["stages"][1].update(devices=[1, 3]), r"use devices \[0, 1, 1, 3\]"),
        (lambda d: d["stages"][1].update(shape=[2, 2]), "stage 1 has 2 devices"),
        (lambda d: d["stages"][1].update(shape=[-1, -2]), "stage 1 has 2 devices"),
        (lambda d: d["prediction"].update(stage_bytes=[10]), "has the bytes of 1 stages, the plan has 2"),
        (lambda d: d["made_for"].pop("batch"), "lacks or garbles a field"),
        (lambda d: d["stages"][1].update(strategies=[2]), r"stage 1 has 1 strategy rows \(2,\)"),
        (lambda d: d["stages"][0].update(strategies=[0]), "expected one of the table for each of its layers"),
    ],
)
def test_an_edited_plan_is_refused_with_what_is_wrong(edit: Edit, message: str):
    document = json.loads(plan_to_json(PLAN))
    edit(document)
    with pytest.raises(PlanError, match=message):
        plan_from_json(json.dumps(document), "plan.json")


def test_a_plan_that_is_right_is_given_back():
    assert check_plan(PLAN) is PLAN
