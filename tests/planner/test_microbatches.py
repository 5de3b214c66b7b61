"""The number of microbatches that is chosen is the best of all, though most are given up; where none has a plan, the reason is told."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import InfeasibleError, TraceError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.planner.families import pricer_for
from alpa_hpc.planner.microbatches import SIMULATED_WITHIN, TriedNumber, best_number, numbers_for, tried, try_numbers, words
from alpa_hpc.planner.refine import WHOLE, Interest
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan
from alpa_hpc.planner.simulating import fastest_modelled
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.stages.options import Partitions, SearchOptions
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.training.prepare import prepare
from tests.planning import CLUSTER, DEVICE, LAYERS, MODEL, SEARCH, TRAINING

SCHEDULE = SCHEDULES[ScheduleKind.ONE_F_ONE_B]
FOUR = replace(CLUSTER, devices_per_node=2)
NUMBERS = numbers_for(TRAINING.batch_size, FOUR.num_devices)
SLOW_TO_START = replace(FOUR, intra_node=replace(FOUR.intra_node, latency=1e-3))
FAST = replace(FOUR, inter_node=FOUR.intra_node)
TIGHT = replace(FOUR, device=replace(DEVICE, memory=190_000))
EQUAL_LAYERS = replace(SEARCH, name="equal", partitions=Partitions.EQUAL_LAYERS)
CASES = [(FOUR, SEARCH), (FAST, SEARCH), (TIGHT, SEARCH), (SLOW_TO_START, SEARCH), (TIGHT, EQUAL_LAYERS)]


@cache
def step(number: int) -> LayeredStep:
    return prepare(MODEL, TRAINING, LAYERS, number).step


@cache
def pricer(number: int, cluster: ClusterSpec, search: SearchOptions) -> StagePricer:
    return pricer_for(step(number), cluster, search, SCHEDULE)


def searching(number: int, cluster: ClusterSpec, search: SearchOptions, interest: Interest) -> SimulatedPlan:
    return fastest_modelled(pricer(number, cluster, search), search, SCHEDULE, interest)


@cache
def tried_on(cluster: ClusterSpec, search: SearchOptions) -> tuple[TriedNumber, ...]:
    return try_numbers(NUMBERS, lambda number, most: tried(number, most, partial(searching, number, cluster, search)))


@given(num_rows=st.integers(1, 5000), num_devices=st.integers(1, 100))
def test_all_numbers_that_divide_the_rows_are_tried_once(num_rows: int, num_devices: int) -> None:
    numbers = numbers_for(num_rows, num_devices)
    assert sorted(numbers) == [number for number in range(1, num_rows + 1) if num_rows % number == 0]
    assert numbers[0] in sorted(numbers, key=lambda number: max(number / num_devices, num_devices / number))[:2]


@pytest.mark.parametrize(
    ("cluster", "search"), CASES, ids=["slow between", "fast between", "tight", "slow to start", "tight, equal stages"]
)
def test_giving_up_loses_nothing(cluster: ClusterSpec, search: SearchOptions) -> None:
    seconds: dict[int, float] = {}
    for number in NUMBERS:
        try:
            seconds[number] = searching(number, cluster, search, WHOLE).timeline.seconds
        except InfeasibleError:
            seconds[number] = math.inf
    found = tried_on(cluster, search)
    assert best_number(found) == min(seconds, key=lambda number: (seconds[number], number))
    assert [one.num_microbatches for one in found] == sorted(NUMBERS)
    for one in found:
        assert one.seconds == (math.inf if one.reason else seconds[one.num_microbatches])


def test_numbers_are_given_up_and_lack_memory_and_the_best_differs_from_cluster_to_cluster() -> None:
    """What the test above goes through is not empty."""
    found = [tried_on(cluster, search) for cluster, search in CASES]
    assert len({best_number(one) for one in found}) > 1
    reasons = [one.reason for tries in found for one in tries]
    assert any("Eq. 2 is at least" in reason for reason in reasons) and any("missing" in reason for reason in reasons)


def test_a_number_at_which_the_step_cannot_be_traced_has_no_plan() -> None:
    def untraceable(interest: Interest) -> SimulatedPlan:
        raise TraceError("groups of 4\nat line 7")

    assert tried(8, math.inf, untraceable) == TriedNumber(8, reason="groups of 4")


TRIES = st.builds(TriedNumber, st.integers(1, 100), st.sampled_from([0.5, 1.0, math.inf]), missing_bytes=st.sampled_from([5.0, math.inf]))


@given(tries=st.lists(TRIES, min_size=1, unique_by=lambda one: one.num_microbatches))
def test_the_best_is_the_fastest_or_else_the_one_that_lacks_least(tries: list[TriedNumber]) -> None:
    best = next(one for one in tries if one.num_microbatches == best_number(tries))
    assert best.seconds == min(one.seconds for one in tries)
    if best.seconds == math.inf:
        assert best.missing_bytes == min(one.missing_bytes for one in tries)


@pytest.mark.parametrize("num_parallel", [1, 3])
def test_all_are_tried_and_told_whatever_is_tried_beside_them(num_parallel: int) -> None:
    asked: list[float] = []
    told: list[str] = []
    objective = {8: 2.0, 4: 1.0, 2: 4.0, 16: 3.0}

    def try_at(number: int, most_seconds: float) -> TriedNumber:
        asked.append(most_seconds)
        return TriedNumber(number, objective[number], objective[number])

    found = try_numbers(tuple(objective), try_at, told.append, num_parallel)
    assert [one.num_microbatches for one in found] == [2, 4, 8, 16]
    assert sorted(told) == sorted(f"planning: {words(one)}" for one in found)
    assert asked[0] == math.inf and all(most >= SIMULATED_WITHIN for most in asked)
    if num_parallel == 1:
        assert asked == [math.inf, 2 * SIMULATED_WITHIN, SIMULATED_WITHIN, SIMULATED_WITHIN]


def test_a_fault_of_ours_in_one_of_them_is_no_refusal() -> None:
    def broken(number: int, most_seconds: float) -> TriedNumber:
        assert number != 4, "a fault"
        return TriedNumber(number)

    with pytest.raises(AssertionError, match="a fault"):
        try_numbers((8, 4, 2), broken, num_parallel=2)
