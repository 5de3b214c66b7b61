"""The evaluator adds up what the problem says, and names every broken rule."""

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.sharding.evaluate import evaluate, explain
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from tests.oracles import total_bytes, total_seconds
from tests.sharding.problems import problems


@settings(max_examples=150, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_cost_bytes_and_verdict_are_those_of_the_definition(problem: ShardingProblem, random: Random) -> None:
    choices = tuple(random.randrange(len(costs)) for costs in problem.node_costs)
    seen = evaluate(problem, choices)
    assert seen.seconds == seen.node_seconds + seen.edge_seconds == total_seconds(problem, choices)
    assert seen.fixed_bytes + problem.inflight * seen.inflight_bytes == total_bytes(problem, choices)
    is_good = seen.seconds < np.inf and total_bytes(problem, choices) <= problem.memory_limit
    assert (seen.violations == ()) == is_good


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_an_explanation_is_the_cost_of_each_single_change(problem: ShardingProblem, random: Random) -> None:
    choices = [random.randrange(len(costs)) for costs in problem.node_costs]
    node = random.randrange(len(choices))
    for strategy, seconds in explain(problem, choices, node):
        changed = [*choices[:node], strategy, *choices[node + 1 :]]
        assert seconds == total_seconds(problem, changed)


def test_every_broken_rule_is_named() -> None:
    problem = ShardingProblem(
        node_costs=(np.array([np.inf, 1.0]), np.array([1.0])),
        edges=(Edge(0, 1, np.array([[np.inf], [0.0]])),),
        fixed_bytes=(np.array([5.0, 0.0]), np.array([1.0])),
        inflight_bytes=(np.array([2.0, 0.0]), np.array([0.0])),
        memory_limit=9.0,
        inflight=2,
        names=("dot", "add"),
    )
    assert evaluate(problem, (1, 0)).violations == ()
    assert evaluate(problem, (0, 0)).violations == (
        "dot chooses strategy 0, which is not allowed",
        "there is no resharding from strategy 0 of dot -> 0 of add",
        "10 bytes a device with 2 microbatches in flight, the limit is 9",
    )
    assert evaluate(replace(problem, memory_limit=10.0), (0, 0)).violations[2:] == ()
