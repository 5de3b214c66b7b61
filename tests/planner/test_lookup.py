"""A plan names its strategies, and a plan that was made for something else is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from alpa_hpc.errors import PlanError
from alpa_hpc.plan.codec import plan_from_json, plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import check_plan_fits, make_plan, stages_of_plan
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
    with pytest.raises(PlanError, match=r"another training step; it differs in the model's parameters .* MB, \w+ in the plan, .* here\)"):
        stages_of_plan(plan(), other.step, CLUSTER)


def test_a_plan_of_another_cluster_is_refused():
    with pytest.raises(PlanError, match="for a cluster of 2 x 4 devices, two nodes has 1 x 4"):
        stages_of_plan(plan(), prepared().step, replace(CLUSTER, num_nodes=1))
    with pytest.raises(PlanError, match="for a cluster of 2 x 4 devices, two nodes has 4 x 2"):
        stages_of_plan(plan(), prepared().step, replace(CLUSTER, num_nodes=4, devices_per_node=2))
    with pytest.raises(PlanError, match=r"needs [\d.]+ [kM]B a device, a device of cluster two nodes has 20 kB"):
        stages_of_plan(plan(), prepared().step, replace(CLUSTER, device=replace(CLUSTER.device, memory=20_000)))


def swapped_devices(document: dict[str, Any]) -> None:
    """Each stage gets the first half of the other's devices, so that both lie on two nodes."""
    first, second = (stage["devices"] for stage in document["stages"])
    first[0], second[0] = second[0], first[0]


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "the plan says 5 microbatches, 3 layers, 8 devices, this run has 4, 3, 8": lambda d: d.update(num_microbatches=5),
    "stage 0 says 1 nodes x 4 devices, but its devices 4, 1, 2, 3 lie otherwise": swapped_devices,
    "names the schedule 'one_f_two_b', expected one of one_f_one_b, gpipe": lambda d: d.update(schedule="one_f_two_b"),
    "made for the schedule gpipe, this run asks for one_f_one_b": lambda d: d.update(schedule="gpipe"),
    "name the space 'vast', expected full or narrow": lambda d: d["strategies"][0].update(space="vast"),
    "gives a strategy to no such node, which the layer does not have": lambda d: d["strategies"][0].update({"no such node": "S0"}),
    "the strategy 'S9,R', expected one of": lambda d: d["strategies"][0].update(dict.fromkeys([*d["strategies"][0]][1:], "S9,R")),
    "another training step": lambda d: d.update(model_key="0" * 32),
}


@pytest.mark.parametrize("message", EDITS)
def test_a_plan_that_was_edited_is_refused_with_what_is_wrong(message: str):
    document = json.loads(plan_to_json(plan()))
    EDITS[message](document)
    with pytest.raises(PlanError, match=message):
        check_plan_fits(plan_from_json(json.dumps(document), "plan.json"), prepared().step, CLUSTER, KIND)


def test_a_plan_that_fits_is_given_back():
    made = plan()
    assert check_plan_fits(made, prepared().step, CLUSTER, KIND) is made


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
