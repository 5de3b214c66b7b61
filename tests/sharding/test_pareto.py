"""The points of seconds and bytes that a stage is offered at: each is optimal at its price of memory, and none is worse than another."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.sharding.solve import solve
from alpa_hpc.sharding.solved import StageValue
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.stage_problem import stage_problem
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.pricing import PRICE_FACTORS, StagePricer
from tests.planning import CLUSTER, prepared

ALIKE = 1e-9  # relative: sums in another order


def candidates() -> list[StageCandidate]:
    """Runs of layers on meshes on which there is a choice."""
    found = [
        StageCandidate(start, stop, submesh, shape, remat=False)
        for submesh, shape in ((Submesh(1, 2), MeshShape(2, 1)), (Submesh(1, 4), MeshShape(2, 2)), (Submesh(1, 4), MeshShape(4, 1)))
        for start, stop in ((0, 3), (0, 1), (1, 2), (2, 3))
    ]
    assert len(prepared().step.layers) == 3
    return found


@cache
def pricer() -> StagePricer:
    return StagePricer(prepared().step, CLUSTER)


def solver_of(candidate: StageCandidate) -> StageSolver:
    return pricer().solver(candidate.submesh, candidate.shape, remat=candidate.remat)


def value_at(candidate: StageCandidate, price: MemoryPrice) -> StageValue:
    return solver_of(candidate).value(candidate.start, candidate.stop, price)


def score(value: StageValue, price: MemoryPrice) -> float:
    return value.seconds + price.fixed * value.fixed_bytes + price.inflight * value.inflight_bytes


def point(value: StageValue) -> tuple[float, float, float]:
    return (value.seconds, value.fixed_bytes, value.inflight_bytes)


def is_worse(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """No better in anything, and worse in something by more than rounding."""
    no_better = all(a >= b for a, b in zip(one, other, strict=True))
    return no_better and any(a > b + ALIKE * abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("candidate", candidates(), ids=str)
def test_no_offered_point_is_worse_than_another(candidate: StageCandidate) -> None:
    options = pricer().options(candidate)
    assert options
    assert len({option.variant for option in options}) == len(options)
    points = [(option.seconds, option.fixed_bytes, option.inflight_bytes) for option in options]
    assert not any(is_worse(one, other) for one in points for other in points)


@pytest.mark.parametrize("candidate", candidates(), ids=str)
def test_what_is_not_offered_is_no_better_than_what_is(candidate: StageCandidate) -> None:
    """Of the four prices' optima those that are left out are reached or beaten in every respect by one that stays."""
    microbatches = prepared().step.num_microbatches
    points = [(option.seconds, option.fixed_bytes, option.inflight_bytes) for option in pricer().options(candidate)]
    for variant in range(len(PRICE_FACTORS)):
        found = value_at(candidate, pricer().memory_price(variant))
        mine = (found.seconds / microbatches, found.fixed_bytes, found.inflight_bytes)
        assert any(all(a <= b for a, b in zip(kept, mine, strict=True)) for kept in points)


@pytest.mark.parametrize("variant", range(len(PRICE_FACTORS)))
def test_each_point_is_the_optimum_at_its_price_by_another_solver(variant: int) -> None:
    price = pricer().memory_price(variant)
    for candidate in candidates():
        solver = solver_of(candidate)
        problem, _ = stage_problem(solver.step, [solver.problem(index) for index in range(candidate.start, candidate.stop)])
        columns = zip(problem.node_costs, problem.fixed_bytes, problem.inflight_bytes, strict=True)
        priced = tuple(seconds + price.fixed * fixed + price.inflight * inflight for seconds, fixed, inflight in columns)
        assert score(value_at(candidate, price), price) == pytest.approx(solve(replace(problem, node_costs=priced)).objective, rel=1e-6)


PRICES = st.builds(MemoryPrice, *(st.floats(-14.0, -6.0).map(lambda exponent: 10.0**exponent) for _ in range(2)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(candidates()), PRICES, PRICES)
def test_at_its_own_price_no_other_prices_optimum_is_better(candidate: StageCandidate, here: MemoryPrice, there: MemoryPrice) -> None:
    """So at positive prices none is worse than another in every respect."""
    mine, other = value_at(candidate, here), value_at(candidate, there)
    assert score(mine, here) <= score(other, here) * (1 + ALIKE)
    assert score(other, there) <= score(mine, there) * (1 + ALIKE)
    assert not is_worse(point(mine), point(other))
