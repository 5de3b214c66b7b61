"""Every schedule runs each microbatch once in each direction, forward first, in order, within its bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.runtime.schedule import AbstractSchedule, Backward, Forward, GPipe, OneFOneB, Step
from tests.pipelines import schedules


def in_flight_after(steps: tuple[Step, ...]) -> list[int]:
    """Microbatches in flight behind each step."""
    counts = [0]
    for step in steps:
        counts.append(counts[-1] + (1 if isinstance(step, Forward) else -1))
    return counts


@settings(deadline=None)
@given(schedules, st.integers(1, 8), st.integers(1, 20), st.data())
def test_each_microbatch_runs_in_order_within_the_bound(
    schedule: AbstractSchedule, num_stages: int, num_microbatches: int, data: st.DataObject
):
    stage = data.draw(st.integers(0, num_stages - 1))
    steps = schedule.steps(stage, num_stages, num_microbatches)
    assert [step.microbatch for step in steps if isinstance(step, Forward)] == list(range(num_microbatches))
    assert [step.microbatch for step in steps if isinstance(step, Backward)] == list(range(num_microbatches))
    counts = in_flight_after(steps)
    assert min(counts) == 0, "a backward precedes its forward"
    assert max(counts) == schedule.max_in_flight(stage, num_stages, num_microbatches), "the bound is tight"


def test_one_f_one_b_of_the_paper_figure():
    kinds = ["".join("F" if isinstance(step, Forward) else "B" for step in OneFOneB().steps(stage, 4, 6)) for stage in range(4)]
    assert kinds == ["FFFFBFBFBBBB", "FFFBFBFBFBBB", "FFBFBFBFBFBB", "FBFBFBFBFBFB"]


def test_gpipe_holds_all_microbatches():
    assert "".join("F" if isinstance(step, Forward) else "B" for step in GPipe().steps(1, 3, 4)) == "FFFFBBBB"


def clock_after(schedule: AbstractSchedule, num_stages: int, num_microbatches: int) -> int:
    """When the last step ends, if each takes one tick and starts as soon as its stage is free and what it needs is there."""
    waiting = [list(schedule.steps(stage, num_stages, num_microbatches)) for stage in range(num_stages)]
    ended: dict[tuple[type[Step], int, int], int] = {}
    free = [0] * num_stages
    while any(waiting):
        before = len(ended)
        for stage, steps in enumerate(waiting):
            while steps:
                step, neighbour = steps[0], stage - 1 if isinstance(steps[0], Forward) else stage + 1
                needed = [(type(step), neighbour, step.microbatch)] if 0 <= neighbour < num_stages else []
                needed += [] if isinstance(step, Forward) else [(Forward, stage, step.microbatch)]
                if not all(one in ended for one in needed):
                    break
                free[stage] = max([free[stage], *(ended[one] for one in needed)]) + 1
                ended[type(step), stage, step.microbatch] = free[stage]
                steps.pop(0)
        assert len(ended) > before, "the schedule waits for itself"
    return max(free)


@pytest.mark.parametrize("num_stages", [4, 8, 16, 64])
@pytest.mark.parametrize("num_microbatches", [1, 2, 16, 128])
def test_a_schedule_takes_the_published_number_of_ticks(num_stages: int, num_microbatches: int) -> None:
    """2 (n + B - 1), and one for the update (the original's `num_clock`); in flight on stage i: at most n - i under 1F1B."""
    for schedule in (GPipe(), OneFOneB()):
        assert clock_after(schedule, num_stages, num_microbatches) == 2 * (num_stages + num_microbatches - 1)
    for stage in range(num_stages):
        assert OneFOneB().max_in_flight(stage, num_stages, num_microbatches) <= num_stages - stage
