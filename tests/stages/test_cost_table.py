"""Pareto points lose no option that could be best, and tables are replaced, not changed."""

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.stages.cost_table import CostTable, StageOption, pareto

NUMBERS = st.integers(0, 4).map(float)
OPTIONS = st.builds(
    StageOption, st.just(MeshShape(1, 1)), st.booleans(), st.integers(0, 3), NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.just(False)
)


def fastest(options: tuple[StageOption, ...], num_microbatches: int, in_flight: int, limit: float) -> float:
    return min(
        (o.seconds + o.seconds_once / num_microbatches for o in options if o.peak_bytes(in_flight) <= limit),
        default=float("inf"),
    )


@settings(max_examples=400, deadline=None)
@given(
    options=st.lists(OPTIONS, max_size=8).map(tuple),
    num_microbatches=st.integers(1, 9),
    in_flight=st.integers(1, 9),
    limit=st.integers(0, 20),
)
def test_the_fastest_fitting_option_survives(options: tuple[StageOption, ...], num_microbatches: int, in_flight: int, limit: int) -> None:
    kept = pareto(options)
    assert set(kept) <= set(options)
    assert fastest(kept, num_microbatches, in_flight, limit) == fastest(options, num_microbatches, in_flight, limit)


@settings(deadline=None)
@given(options=st.lists(OPTIONS, max_size=8).map(tuple))
def test_every_survivor_beats_each_other_one_somewhere(options: tuple[StageOption, ...]) -> None:
    kept = pareto(options)
    assert bool(kept) == bool(options)
    for one, other in permutations(kept, 2):
        sooner = any(one.seconds + one.seconds_once / b < other.seconds + other.seconds_once / b for b in (1, 1e6))
        leaner = any(one.peak_bytes(k) < other.peak_bytes(k) for k in (1, 10**6))
        assert sooner or leaner


def test_a_smaller_stash_survives_a_larger_start() -> None:
    lean = StageOption(MeshShape(1, 1), True, 0, 1.0, 0.0, 2.0, 0.0, 0.0, False)
    light = StageOption(MeshShape(1, 1), False, 0, 1.0, 0.0, 0.0, 1.0, 0.0, False)
    assert set(pareto((lean, light))) == {lean, light}


def test_peak_bytes() -> None:
    assert StageOption(MeshShape(1, 1), False, 0, 1.0, 0.0, 10.0, 2.0, 5.0, False).peak_bytes(3) == 21.0


def test_updated_replaces_cells_in_a_new_table() -> None:
    old = StageOption(MeshShape(1, 1), False, 0, 1.0, 0.0, 0.0, 0.0, 0.0, False)
    new = StageOption(MeshShape(1, 1), False, 0, 2.0, 0.0, 0.0, 0.0, 0.0, True)
    cell, other = (0, 1, Submesh(1, 1)), (0, 2, Submesh(1, 1))
    table = CostTable(2, {cell: (old,), other: (old,)}, (0.0, 1.0))
    updated = table.updated({cell: (new,)})
    assert dict(updated.options) == {cell: (new,), other: (old,)}
    assert table.options[cell] == (old,)
