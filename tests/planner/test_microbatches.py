"""The number of microbatches that is chosen is the best of all, though most are given up; where none has a plan, the reason is told."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import InfeasibleError, TraceError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.planner.families import pricer_for
from alpa_hpc.planner.microbatches import SearchAt, TriedNumber, best_number, numbers_for, try_numbers, words
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


def searching(cluster: ClusterSpec, search: SearchOptions) -> SearchAt:
    def search_at(number: int, interest: Interest) -> SimulatedPlan:
        return fastest_modelled(pricer(number, cluster, search), search, SCHEDULE, interest)

    return search_at


@cache
def tried_on(cluster: ClusterSpec, search: SearchOptions) -> tuple[TriedNumber, ...]:
    return try_numbers(NUMBERS, searching(cluster, search))


def refusing(errors: dict[int, Callable[[], Exception]], else_search: SearchAt) -> SearchAt:
    def search_at(number: int, interest: Interest) -> SimulatedPlan:
        if number in errors:
            raise errors[number]()
        return else_search(number, interest)

    return search_at


@given(num_rows=st.integers(1, 5000), num_devices=st.integers(1, 100))
def test_all_numbers_that_divide_the_rows_are_tried_once(num_rows: int, num_devices: int) -> None:
    numbers = numbers_for(num_rows, num_devices)
    assert sorted(numbers) == [number for number in range(1, num_rows + 1) if num_rows % number == 0]
    assert numbers[0] in sorted(numbers, key=lambda number: max(number / num_devices, num_devices / number))[:2]


@pytest.mark.parametrize(
    ("cluster", "search"), CASES, ids=["slow between", "fast between", "tight", "slow to start", "tight, equal stages"]
)
def test_giving_up_loses_nothing(cluster: ClusterSpec, search: SearchOptions) -> None:
    search_at, seconds = searching(cluster, search), dict[int, float]()
    for number in NUMBERS:
        try:
            seconds[number] = search_at(number, WHOLE).timeline.seconds
        except InfeasibleError:
            seconds[number] = math.inf
    tried = tried_on(cluster, search)
    assert best_number(tried) == min(seconds, key=lambda number: (seconds[number], number))
    assert {one.num_microbatches for one in tried} == set(NUMBERS)
    for one in tried:
        assert one.seconds == (math.inf if one.reason else seconds[one.num_microbatches])


def test_numbers_are_given_up_and_lack_memory_and_the_best_differs_from_cluster_to_cluster() -> None:
    """What the test above goes through is not empty."""
    found = [tried_on(cluster, search) for cluster, search in CASES]
    assert len({best_number(tried) for tried in found}) > 1
    reasons = [one.reason for tried in found for one in tried]
    assert any("by Eq. 2" in reason for reason in reasons) and any("missing" in reason for reason in reasons)


def test_a_number_at_which_the_step_cannot_be_traced_is_passed_over() -> None:
    search_at = searching(FOUR, SEARCH)
    told: list[str] = []
    tried = try_numbers((8, 4), refusing({8: lambda: TraceError("groups of 4\nat line 7")}, search_at), told.append)
    assert best_number(tried) == 4
    assert tried[0] == TriedNumber(8, math.inf, "groups of 4")
    assert told == ["planning: 8 microbatches: groups of 4", f"planning: {words(tried[1])}"]


def test_where_nothing_fits_the_number_that_lacks_least_says_what() -> None:
    least = {number: InfeasibleError(f"{number}", float(100 + abs(number - 4))) for number in NUMBERS}
    asked: list[tuple[int, Interest]] = []

    def search_at(number: int, interest: Interest) -> SimulatedPlan:
        asked.append((number, interest))
        raise InfeasibleError("in full", 7.0) if interest == WHOLE else least[number]

    with pytest.raises(InfeasibleError, match="in full"):
        try_numbers(NUMBERS, search_at)
    assert asked[-1] == (4, WHOLE) and len(asked) == len(NUMBERS) + 1


def test_a_step_that_cannot_be_traced_at_all_says_why() -> None:
    with pytest.raises(TraceError, match="no loss"):
        try_numbers((1, 2), refusing(dict.fromkeys((1, 2), lambda: TraceError("no loss")), searching(FOUR, SEARCH)))
