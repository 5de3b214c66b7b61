"""Every schedule runs each microbatch once in each direction, forward first, in order, within its bound."""

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
