"""Bounds in place of prices: none is above what it stands for, and with them the search finds what it finds when everything is priced."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.planner.evidence import NO_EVIDENCE
from alpa_hpc.planner.refine import Refinement, modelled, settle
from alpa_hpc.planner.search import find_candidates
from alpa_hpc.stages.cost_table import BY_FLOP, BY_LAYERS
from alpa_hpc.stages.options import Partitions, RematChoice, SearchOptions
from alpa_hpc.stages.pricing import StagePricer, state_bytes
from alpa_hpc.training.prepare import prepare
from tests.planning import CLUSTER, MODEL, NUM_MICROBATCHES, SEARCH, TRAINING, planned

WIDE = replace(SEARCH, remat=RematChoice.SEARCH, num_best=2)
EQUAL = replace(WIDE, partitions=Partitions.EQUAL_LAYERS)
BOUNDS = (BY_FLOP, BY_LAYERS)


@cache
def step() -> LayeredStep:
    """Three blocks in three layers."""
    return prepare(replace(MODEL, num_layers=3), TRAINING, LayerOptions(num_layers=3, imbalance=1.0), NUM_MICROBATCHES).step


def cluster_of(num_nodes: int, devices_per_node: int, share: float, bandwidth: float = 1.0) -> ClusterSpec:
    """Devices that hold `share` times their part of the state."""
    memory = int(share * sum(state_bytes(step()).values()) / (num_nodes * devices_per_node))
    network = replace(CLUSTER.inter_node, bandwidth=CLUSTER.inter_node.bandwidth * bandwidth)
    device = replace(CLUSTER.device, memory=memory)
    return replace(CLUSTER, num_nodes=num_nodes, devices_per_node=devices_per_node, device=device, inter_node=network)


@pytest.mark.parametrize(("num_nodes", "devices_per_node"), [(2, 2), (1, 6)])
def test_a_bound_is_never_above_any_option_that_it_stands_for(num_nodes: int, devices_per_node: int) -> None:
    cluster = cluster_of(num_nodes, devices_per_node, 50.0)
    pricer, seen = StagePricer(step(), cluster), Counter[str]()
    for candidate in find_candidates(step(), cluster, WIDE):
        by_flop, by_layers = (pricer.bound(candidate, kind) for kind in BOUNDS)
        assert by_flop.seconds <= by_layers.seconds * (1 + 1e-9)
        for option in pricer.options(candidate):
            assert by_layers.seconds <= option.seconds * (1 + 1e-9)
            assert by_layers.fixed_bytes <= option.fixed_bytes * (1 + 1e-9)
            assert all(bound.peak_bytes(count) <= option.peak_bytes(count) for bound in (by_flop, by_layers) for count in (1, 7))
            seen["near"] += by_layers.seconds > 0.95 * option.seconds
            seen["told by FLOP"] += by_flop.seconds > 0.5 * option.seconds
            seen["longer than a layer"] += candidate.stop - candidate.start > 1
    assert min(seen[kind] for kind in ("near", "told by FLOP", "longer than a layer")) > 10, seen


ONE_NODE, SLOW, FAST = (1, 6, 1.0), (2, 2, 1.0), (2, 2, 100.0)  # nodes, devices a node, times the bandwidth between nodes
CASES = [(*ONE_NODE, 1.1), (*ONE_NODE, 1.7), (*ONE_NODE, 2.5), (*ONE_NODE, 50.0), (*SLOW, 1.7), (*FAST, 3.0)]


@pytest.mark.parametrize("search", [WIDE, EQUAL], ids=["any stages", "equal stages"])
@pytest.mark.parametrize(("num_nodes", "devices_per_node", "bandwidth", "share"), CASES)
def test_what_is_found_by_bounds_is_what_is_found_when_everything_is_priced(
    num_nodes: int, devices_per_node: int, bandwidth: float, share: float, search: SearchOptions
) -> None:
    cluster = cluster_of(num_nodes, devices_per_node, share, bandwidth)
    try:
        candidates = find_candidates(step(), cluster, search)
    except InfeasibleError:
        assert share < 2, "only little memory is refused so early"
        return
    lazy, whole = StagePricer(step(), cluster), StagePricer(step(), cluster)

    def everything() -> Refinement:
        return settle(whole, whole.price(candidates), search, NO_EVIDENCE)

    try:
        expected = everything()
    except InfeasibleError as refusal:
        with pytest.raises(InfeasibleError) as caught:
            modelled(lazy, candidates, search)
        assert caught.value.missing_bytes == pytest.approx(refusal.missing_bytes)
        return
    found = modelled(lazy, candidates, search)
    assert found.partitions[0].objective_seconds == pytest.approx(expected.partitions[0].objective_seconds, rel=1e-9)
    assert found.partitions[0].lower_bound <= found.partitions[0].objective_seconds * (1 + 1e-9)
    assert not any(choice.option.is_bound for partition in found.partitions for choice in partition.stages)


def test_most_stages_are_never_priced() -> None:
    whole = planned()
    lazy = StagePricer(whole.pricer.step, whole.cluster)
    found = modelled(lazy, find_candidates(lazy.step, whole.cluster, whole.search), whole.search)
    assert found.partitions[0].objective_seconds == pytest.approx(whole.refinement().partitions[0].objective_seconds, rel=1e-9)
    assert lazy.num_runs < 0.7 * whole.pricer.num_runs


def test_of_equal_stages_only_those_that_may_win_are_priced() -> None:
    cluster, lazy = cluster_of(2, 2, 50.0), StagePricer(step(), cluster_of(2, 2, 50.0))
    candidates = find_candidates(step(), cluster, EQUAL)
    modelled(lazy, candidates, replace(EQUAL, num_best=1))
    whole = StagePricer(step(), cluster)
    whole.price(candidates)
    assert lazy.num_runs < 0.7 * whole.num_runs
