"""Named searches on a small GPT: each plan is what its name says, all are priced alike, and none beats that of the whole search."""

from dataclasses import dataclass, replace
from functools import cache

import pytest

from alpa_hpc.baselines.dim_kinds import DimKind, layer_kinds
from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.errors import InfeasibleError, PlanError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.options import Clustering, LayerOptions
from alpa_hpc.models.gpt import GPT
from alpa_hpc.planner.families import pricer_for
from alpa_hpc.planner.refine import modelled
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan, analytic_seconds, find_candidates, pick, simulate_partition
from alpa_hpc.report.planning import stage_rows
from alpa_hpc.report.words import stage_words
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import SpecSpace
from alpa_hpc.sharding.solved import Solved, StageValue
from alpa_hpc.stages.candidate import LogicalShapes, StageCandidate, SubmeshShapes
from alpa_hpc.stages.options import Partitions, RematChoice, SearchOptions, Strategies, with_layers_for
from alpa_hpc.training.prepare import prepare
from tests.planning import SEARCH, TRAINING

MODEL = GPT(num_layers=4, hidden=32, num_heads=4, vocab=64, sequence=8)
CLUSTER = ClusterSpec("two nodes", 2, 2, DeviceSpec("cpu", 1 << 30, 1e9, 1e9, 1e11, 1.0), Link(4e9, 1e-7), Link(2e7, 1e-6))
WIDE = replace(CLUSTER, devices_per_node=4)
LAYERS = LayerOptions(num_layers=4, imbalance=0.5)
ALPA = replace(SEARCH, name="alpa", remat=RematChoice.ALWAYS)
SEARCHES = {
    "alpa": ALPA,
    "intra_only": replace(ALPA, partitions=Partitions.ONE_STAGE),
    "inter_only": replace(ALPA, submesh_shapes=SubmeshShapes.ONE_DEVICE),
    "pp_dp": replace(ALPA, strategies=Strategies.DATA_PARALLEL, logical_shapes=LogicalShapes.ROWS),
    "equal_layer": replace(ALPA, partitions=Partitions.EQUAL_LAYERS),
    "equal_operator": replace(ALPA, clustering=Clustering.EQUAL_OPERATORS),
    "megatron": replace(ALPA, partitions=Partitions.GRID, strategies=Strategies.MEGATRON),
}
SAME_LAYERS = [name for name in SEARCHES if name != "equal_operator"]


@dataclass(frozen=True, eq=False)
class Found:
    """The plan of a search, its seconds by the objective and by simulation, and the bound of the search."""

    chosen: SimulatedPlan
    objective: float
    bound: float


@cache
def step_for(layers: LayerOptions, clustering: Clustering) -> LayeredStep:
    return prepare(MODEL, TRAINING, layers, 4, clustering=clustering).step


def plan(search: SearchOptions, cluster: ClusterSpec = CLUSTER) -> Found:
    step = step_for(with_layers_for(LAYERS, search, cluster.num_devices), search.clustering)
    schedule = SCHEDULES[ScheduleKind.ONE_F_ONE_B]
    pricer = pricer_for(step, cluster, search, schedule)
    partitions = modelled(pricer, find_candidates(step, cluster, search), search).partitions
    chosen = pick([simulate_partition(pricer, one, schedule, analytic_seconds(pricer)) for one in partitions], cluster)
    return Found(chosen, partitions[0].objective_seconds, partitions[0].lower_bound)


@cache
def planned(name: str) -> Found:
    return plan(SEARCHES[name])


def words(found: Found) -> tuple[str, ...]:
    return tuple(stage_words(row) for row in stage_rows(found.chosen.partition))


def manual(*stages: str) -> SearchOptions:
    return replace(ALPA, name="manual", partitions=Partitions.MANUAL, manual=stages)


def splits_of_weights(layers: tuple[ChosenLayer, ...]) -> set[int]:
    """The axes that split a weight in forward or backward."""
    weights = [layer.spec(tensor) for layer in layers for tensor in (*layer.problem.params, *layer.problem.gradients)]
    return {axis for spec in weights for dim in spec.dims for axis in dim}


@pytest.mark.parametrize("name", SEARCHES)
def test_each_plan_covers_layers_and_devices_and_obeys_its_name(name: str) -> None:
    found = planned(name)
    stages, shapes = found.chosen.partition.stages, [one.option.shape for one in found.chosen.partition.stages]
    lengths = {one.stop - one.start for one in stages}
    assert sum(shape.num_devices for shape in shapes) == 4
    assert found.bound <= found.objective <= found.chosen.partition.objective_seconds
    match name:
        case "intra_only":
            assert len(stages) == 1
        case "inter_only":
            assert shapes == [MeshShape(1, 1)] * 4
        case "pp_dp":
            assert all(shape.cols == 1 for shape in shapes)
            assert not any(splits_of_weights(stage.layers) for stage in found.chosen.stages)
        case "equal_layer":
            assert len(lengths) == 1
        case "megatron":
            assert len(lengths) == len(set(shapes)) == 1
            assert not any(0 in splits_of_weights(stage.layers) for stage in found.chosen.stages)
        case _:
            assert stages[-1].stop == 4


def test_data_parallelism_splits_the_batch_and_nothing_else() -> None:
    step, found = step_for(LAYERS, Clustering.COMMUNICATION), planned("pp_dp").chosen
    assert all(stage.shape == MeshShape(2, 1) for stage in found.stages)
    for layer in (layer for stage in found.stages for layer in stage.layers):
        kinds, program, split = layer_kinds(step, layer.problem.layer), layer.problem.forward, set[DimKind]()
        for var, tensor in zip(program.jaxpr.jaxpr.invars, program.inputs, strict=True):
            split |= {kind for dim, kind in zip(layer.spec(tensor).dims, kinds(var), strict=True) if dim}
        assert split == {DimKind.BATCH}


def test_where_each_stage_has_one_device_there_are_as_many_layers() -> None:
    for cluster, num_layers in ((CLUSTER, 4), (WIDE, 8)):
        layers = with_layers_for(LAYERS, SEARCHES["inter_only"], cluster.num_devices)
        assert layers == replace(LAYERS, num_layers=num_layers)
        assert with_layers_for(LAYERS, ALPA, cluster.num_devices) == LAYERS


@pytest.mark.parametrize("name", SAME_LAYERS[1:])
def test_no_restriction_beats_the_whole_search(name: str) -> None:
    whole, restricted = planned("alpa"), planned(name)
    assert whole.objective <= restricted.objective * (1 + 1e-9)
    assert whole.bound <= restricted.bound * (1 + 1e-9)


def test_stages_of_as_many_layers_are_good_enough_for_a_transformer() -> None:
    assert planned("equal_layer").objective <= planned("alpa").objective * 1.01


def test_restrictions_cost_something_here() -> None:
    whole = planned("alpa").objective
    assert sum(planned(name).objective > whole * 1.01 for name in SEARCHES) >= 3
    assert len({words(planned(name)) for name in SEARCHES}) >= 3


@pytest.mark.parametrize("name", ["alpa", "pp_dp", "megatron"])
def test_a_plan_that_is_given_in_its_own_words_is_priced_and_simulated_as_it_was(name: str) -> None:
    searched = planned(name)
    again = plan(replace(SEARCHES[name], partitions=Partitions.MANUAL, manual=words(searched)))
    assert words(again) == words(searched)
    assert again.objective == pytest.approx(searched.chosen.partition.objective_seconds, rel=1e-12)
    assert again.chosen.timeline.seconds == pytest.approx(searched.chosen.timeline.seconds, rel=1e-12)
    assert again.chosen.stage_bytes == searched.chosen.stage_bytes


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            ("layers 0-1 on 1x4 as 2x2", "layer 3 on 1x4 as 2x2"),
            "stage 1 has layer 3, expected layer 2 to be its first: the model has layers 0-3",
        ),
        (("layers 0-2 on 1x4 as 2x2", "layers 2-3 on 1x4 as 2x2"), "stage 1 has layers 2-3, expected layer 3 to be its first"),
        (("layers 0-1 on 1x4 as 2x2", "layer 2 on 1x4 as 2x2"), "ends with layer 2, expected 3: the model has layers 0-3"),
        (("layers 0-4 on 2x4 as 2x4",), "ends with layer 4, expected 3: the model has layers 0-3"),
        (("layers 0-1 on 1x4 as 2x2", "layers 2-3 on 1x2 as 2x1"), "use 6 devices, expected all 8"),
        (("layers 0-3 on 4x2 as 4x2",), "expected whole nodes of 4 devices or a part of one node"),
        (
            ("layer 0 on 1x3 as 3x1", "layer 1 on 1x3 as 3x1", "layers 2-3 on 1x2 as 1x2"),
            r"stages of \[2, 3, 3\] devices cannot fill nodes of 4",
        ),
    ],
)
def test_stages_that_are_no_partition_are_refused(stages: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_candidates(step_for(LAYERS, Clustering.COMMUNICATION), WIDE, manual(*stages))


def test_what_does_not_fit_is_refused_with_what_it_lacks() -> None:
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory=60_000))
    with pytest.raises(InfeasibleError, match=r"no partition fits: [\d.]+ kB .* its layers 0 to 3 on 2 x 2 devices") as refused:
        plan(manual("layers 0-3 on 2x2 as 2x2"), small)
    assert refused.value.missing_bytes > 0


def test_what_is_solved_under_a_restriction_is_not_kept_for_others() -> None:
    """The store of solved runs has no word for restrictions: neither may a restricted pricer read it, nor may it write to it."""
    step = step_for(LAYERS, Clustering.COMMUNICATION)
    known = {"some run": Solved(StageValue(0.0, 0.0, 0.0), SpecSpace.FULL)}
    for name, is_free in (("alpa", True), ("intra_only", True), ("pp_dp", False), ("megatron", False)):
        pricer = pricer_for(step, CLUSTER, SEARCHES[name], SCHEDULES[ScheduleKind.ONE_F_ONE_B], known)
        assert pricer.options(StageCandidate(1, 2, Submesh(1, 2), MeshShape(2, 1), remat=True))
        assert (pricer.solved.known == known) is is_free and bool(pricer.learnt) is is_free, name
        assert pricer.solved.new


def test_a_search_that_cannot_use_all_devices_says_so_in_its_users_words() -> None:
    """Candidates that it has, but that no division of the layers is made of: memory is not what is missing."""
    wide = replace(CLUSTER, devices_per_node=12)  # microbatches of 4 rows keep at most 4 devices of a stage busy
    with pytest.raises(InfeasibleError, match=r"has no way to run 4 layers and microbatches of 4 rows on all 24 devices") as refused:
        plan(SEARCHES["pp_dp"], wide)
    assert refused.value.missing_bytes == 0
