"""What a plan was made for is told in words, and the refusal of another names just what differs."""

from dataclasses import replace
from functools import cache

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.plan.fit import check_made_for, differences, made_for
from alpa_hpc.plan.plan import ParallelPlan, Prediction, StagePlan, check_plan
from alpa_hpc.training.prepare import prepare
from tests.planning import CLUSTER, LAYERS, MODEL, NUM_MICROBATCHES, TRAINING, prepared

OTHERS = {
    "another vocabulary": (replace(MODEL, vocab=64), TRAINING, LAYERS, NUM_MICROBATCHES),
    "other activations": (replace(MODEL, sequence=4), TRAINING, LAYERS, NUM_MICROBATCHES),
    "a larger batch": (MODEL, replace(TRAINING, batch_size=32), LAYERS, NUM_MICROBATCHES),
    "more, smaller microbatches": (MODEL, TRAINING, LAYERS, 8),
    "the same microbatch, more often": (MODEL, replace(TRAINING, batch_size=32), LAYERS, 8),
    "fewer layers": (MODEL, TRAINING, replace(LAYERS, num_layers=2), NUM_MICROBATCHES),
    "another learning rate": (MODEL, replace(TRAINING, learning_rate=2e-3), LAYERS, NUM_MICROBATCHES),
}
NAMED = {
    "another vocabulary": "the model's parameters and optimiser state",
    "other activations": r"a microbatch \(int32\[4, 9\] in the plan, int32\[4, 5\] here\)",
    "a larger batch": r"a microbatch \(int32\[4, 9\] in the plan, int32\[8, 9\] here\)",
    "more, smaller microbatches": r"a microbatch .*; the number of microbatches \(4 in the plan, 8 here\)",
    "the same microbatch, more often": r"differs in the number of microbatches \(4 in the plan, 8 here\)",
    "fewer layers": r"differs in the layers \(3 layers, \w+ in the plan, 2 layers, \w+ here\)",
    "another learning rate": r"differs in the optimiser and its numbers \(\d+ updates, \w+ in the plan, \d+ updates, \w+ here\)\.",
}


@cache
def plan() -> ParallelPlan:
    """A plan for the small GPT whose strategies nobody looks at."""
    step = prepared().step
    stage = StagePlan(0, 3, Submesh(2, 4), MeshShape(2, 4), tuple(range(8)), remat=False, strategies=(0, 0, 0))
    made = made_for(step, CLUSTER)
    return check_plan(ParallelPlan(step.key, 3, 8, NUM_MICROBATCHES, "gpipe", (stage,), ({},), Prediction(1.0, (1,)), made))


def other(name: str) -> LayeredStep:
    return prepare(*OTHERS[name]).step


def test_what_it_was_made_for_passes():
    check_made_for(plan(), prepared().step, CLUSTER)


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_named(name: str):
    with pytest.raises(PlanError, match=NAMED[name]):
        check_made_for(plan(), other(name), CLUSTER)


def test_other_software_is_named_where_it_traced_otherwise_and_else_let_pass():
    old = replace(plan(), made_for=replace(plan().made_for, software="alpa_hpc 0.0.1, jax 0.9"))
    check_made_for(old, prepared().step, CLUSTER)
    with pytest.raises(PlanError, match=r"differs in the software that traced it \(alpa_hpc 0.0.1, jax 0.9 in the plan, alpa_hpc "):
        check_made_for(replace(old, model_key="0" * 32), prepared().step, CLUSTER)


def test_only_differences_are_named():
    made = plan().made_for
    assert differences(replace(made, batch="x"), replace(made, batch="y")) == "a microbatch (x in the plan, y here)"
