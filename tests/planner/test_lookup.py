"""A plan names its strategies, and a plan that was made for something else is refused by name."""

import json
from dataclasses import replace
from functools import cache

import pytest

from alpa_hpc.errors import PlanError
from alpa_hpc.plan.codec import plan_from_json, plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import make_plan, stages_of_plan
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan, simulate_partition
from alpa_hpc.runtime.options import ScheduleKind
from tests.planning import CLUSTER, MODEL, planned, prepared

KIND = ScheduleKind.ONE_F_ONE_B


@cache
def chosen() -> SimulatedPlan:
    """A plan of two stages."""
    one = planned()
    refinement = one.refinement()
    partition = next(p for p in refinement.partitions if len(p.stages) == 2)
    return simulate_partition(one.pricer, partition, SCHEDULES[KIND], refinement.seconds_of(one.pricer))


def plan() -> ParallelPlan:
    return make_plan(prepared().step, chosen(), CLUSTER, KIND)


def test_a_plan_comes_back_from_its_file():
    found = plan_from_json(plan_to_json(plan()), "plan.json")
    assert found == plan()
    assert found.prediction == plan().prediction


def test_looking_a_plan_up_gives_the_strategies_it_was_made_from():
    stages = stages_of_plan(plan_from_json(plan_to_json(plan()), "plan.json"), prepared().step, CLUSTER)
    assert [stage.shape for stage in stages] == [stage.shape for stage in chosen().stages]
    for found, made in zip(stages, chosen().stages, strict=True):
        assert [layer.choices for layer in found.layers] == [layer.choices for layer in made.layers]
        assert any(choice for layer in found.layers for choice in layer.choices), "not all first strategies: else nothing is tested"


def test_a_plan_of_another_model_is_refused():
    other = prepared(replace(MODEL, hidden=48))
    with pytest.raises(
        PlanError, match=rf"another training step \(content {prepared().step.key[:12]}, this one is {other.step.key[:12]}\)"
    ):
        stages_of_plan(plan(), other.step, CLUSTER)


def test_a_plan_edited_to_other_microbatches_is_refused():
    made = plan()
    edited = replace(made, num_microbatches=made.num_microbatches + 1)
    with pytest.raises(PlanError, match=f"the plan is for {edited.num_microbatches} microbatches, this step has {made.num_microbatches}"):
        stages_of_plan(edited, prepared().step, CLUSTER)


def test_a_plan_of_another_cluster_is_refused():
    with pytest.raises(PlanError, match="the plan uses 8 devices, cluster two nodes has 4"):
        stages_of_plan(plan(), prepared().step, replace(CLUSTER, num_nodes=1))


def test_an_edited_strategy_is_refused_with_its_node():
    document = json.loads(plan_to_json(plan()))
    row = document["strategies"][0]
    node = next(iter(row))
    row[node] = "S9,R"
    with pytest.raises(PlanError) as caught:
        stages_of_plan(plan_from_json(json.dumps(document), "plan.json"), prepared().step, CLUSTER)
    assert node in str(caught.value) and "'S9,R'" in str(caught.value)


def test_a_strategy_that_is_missing_is_refused_with_its_node():
    document = json.loads(plan_to_json(plan()))
    node, _ = document["strategies"][0].popitem()
    with pytest.raises(PlanError) as caught:
        stages_of_plan(plan_from_json(json.dumps(document), "plan.json"), prepared().step, CLUSTER)
    assert node in str(caught.value)
