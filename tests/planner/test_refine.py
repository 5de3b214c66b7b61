"""The analytic table is corrected where the search looks: exact memory, measured work, and what follows for all others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.planner.evidence import NO_EVIDENCE, Evidence, Pace
from alpa_hpc.planner.refine import (
    Refinement,
    looked_at,
    option_signature,
    propose,
    settle,
    signature,
    with_measurements,
)
from alpa_hpc.planner.requests import ProfileRequest, describe_request, requests_from_json, requests_to_json
from alpa_hpc.planner.search import best_partitions, chosen_stage
from alpa_hpc.profiling.options import Extent
from alpa_hpc.profiling.outcome import MeasuredWork
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.breakdown import StageSeconds, TaskSeconds
from alpa_hpc.sharding.workspace import chosen_workspace
from alpa_hpc.stages.cost_table import StageOption
from alpa_hpc.stages.objective import StageChoice
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.training.prepare import prepare
from tests.planning import CLUSTER, MODEL, NUM_MICROBATCHES, SEARCH, TRAINING, Planned, planned

describe = partial(describe_request, device_kind="cpu", versions="jax 1", xla_flags="", extent=Extent.LONE, cluster_name="c")


@dataclass
class FakeProfiler:
    """Devices on which a layer takes 1 ms forward, 2 ms backward and 3 ms to update, divided by the devices of its mesh."""

    asked: list[tuple[ProfileRequest, ...]] = field(default_factory=list[tuple[ProfileRequest, ...]])

    def __call__(self, requests: Sequence[ProfileRequest]) -> Mapping[str, MeasuredWork]:
        self.asked.append(tuple(requests))
        return {one.key: self.seconds(one) for one in requests}

    def seconds(self, request: ProfileRequest) -> MeasuredWork:
        layers = (request.stage.stop - request.stage.start) / request.stage.shape.num_devices
        return MeasuredWork(1e-3 * layers, 2e-3 * layers, 3e-3 * layers)


def measured(profiler: FakeProfiler, *, max_rounds: int = 20, tasks_per_round: int = 8) -> Refinement:
    one = planned()
    return with_measurements(
        one.pricer, one.refinement(), SEARCH, profiler, describe, max_rounds=max_rounds, tasks_per_round=tasks_per_round
    )


@cache
def measured_to_the_end() -> tuple[Refinement, FakeProfiler]:
    profiler = FakeProfiler()
    return measured(profiler), profiler


def all_choices(one: Planned) -> list[StageChoice]:
    return [StageChoice(*cell, option) for cell, options in one.table.options.items() for option in options]


def iteration(option: StageOption) -> float:
    return option.seconds * NUM_MICROBATCHES + option.seconds_once


# ---- memory


def test_exact_memory_only_raises_workspace_and_is_exact_for_what_is_proposed():
    one = planned()
    exact = settle(one.pricer, one.table, SEARCH, NO_EVIDENCE).table
    assert exact.options.keys() == one.table.options.keys()
    raised = 0
    for cell, options in exact.options.items():
        for before, after in zip(one.table.options[cell], options, strict=True):
            assert after == replace(before, workspace_bytes=after.workspace_bytes)
            assert after.workspace_bytes >= before.workspace_bytes
            raised += after.workspace_bytes > before.workspace_bytes
    assert raised, "splitting everything evenly is not what happens"
    for partition in best_partitions(one.pricer, exact, SEARCH):
        for choice in partition.stages:
            stage = chosen_stage(one.pricer, choice)
            assert choice.option.workspace_bytes == chosen_workspace(stage.layers, stage.shape, hiding=False)


# ---- measured seconds


def test_measuring_ends_when_the_best_partition_is_measured():
    refinement, profiler = measured_to_the_end()
    assert 1 <= refinement.num_rounds < 20 and len(profiler.asked) == refinement.num_rounds
    assert all(choice.option.measured for choice in refinement.partitions[0].stages)
    keys = [request.key for requests in profiler.asked for request in requests]
    assert len(keys) == len(set(keys)), "nothing is measured twice"


def test_what_only_the_other_partitions_use_is_not_measured_for_its_own_sake():
    profiler = FakeProfiler()
    refinement = measured(profiler, tasks_per_round=1)
    assert all(choice.option.measured for choice in refinement.partitions[0].stages)
    assert not all(choice.option.measured for partition in refinement.partitions for choice in partition.stages)
    assert len(profiler.asked) == refinement.num_rounds < 20


def test_measured_options_have_the_measured_work_and_the_modelled_communication():
    one, (refinement, profiler) = planned(), measured_to_the_end()
    assert refinement.evidence.measured
    for choice in (choice for partition in refinement.partitions for choice in partition.stages if choice.option.measured):
        stage = chosen_stage(one.pricer, choice)
        work = profiler.seconds(describe(choice, stage))
        modelled = refinement.evidence.looks[signature(one.pricer, choice)].seconds
        waits = modelled.forward.communication + modelled.backward.communication
        assert choice.option.seconds == pytest.approx(work.forward + work.backward + waits)
        assert choice.option.seconds_once == pytest.approx(work.update + modelled.update.communication)
        found = refinement.seconds_of(one.pricer)(choice, stage)
        assert (found.forward.compute, found.backward.compute, found.update.compute) == (work.forward, work.backward, work.update)


@pytest.mark.parametrize("max_rounds", [0, 1])
def test_rounds_and_tasks_are_bounded(max_rounds: int):
    profiler = FakeProfiler()
    refinement = measured(profiler, max_rounds=max_rounds, tasks_per_round=1)
    assert [len(requests) for requests in profiler.asked] == [1] * max_rounds
    assert refinement.num_rounds == max_rounds
    assert len(refinement.evidence.measured) == max_rounds
    assert len(refinement.partitions) == SEARCH.num_best


def test_a_stage_measured_ten_times_as_slow_makes_the_best_partition_slower():
    one, (refinement, _) = planned(), measured_to_the_end()
    evidence = refinement.evidence
    slow = signature(one.pricer, refinement.partitions[0].stages[0])
    tenfold = {**evidence.measured, slow: scaled(evidence.measured[slow], 10)}
    same = propose(one.pricer, one.table, SEARCH, evidence)
    worse = propose(one.pricer, one.table, SEARCH, replace(evidence, measured=tenfold))
    assert same.partitions[0].objective_seconds == pytest.approx(refinement.partitions[0].objective_seconds)
    assert worse.partitions[0].objective_seconds > 1.01 * same.partitions[0].objective_seconds


def scaled(seconds: StageSeconds, factor: float) -> StageSeconds:
    tasks = (seconds.forward, seconds.backward, seconds.update)
    return StageSeconds(*(TaskSeconds(task.compute * factor, task.communication) for task in tasks))


# ---- options that nobody measured


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 3.0])
def test_unmeasured_options_keep_their_communication_and_an_unseen_one_never_stands_too_dear(ratio: float):
    one = planned()
    choices = all_choices(one)
    chosen = {signature(one.pricer, choice): choice for choice in choices}
    looked = looked_at(one.pricer, chosen, NO_EVIDENCE)
    anything = {next(iter(chosen)): StageSeconds(TaskSeconds(), TaskSeconds(), TaskSeconds())}
    unseen, seen = Evidence({}, anything, {}, Pace(ratio)), Evidence(looked.looks, anything, {}, Pace(ratio))
    waited = 0.0
    for choice in choices:
        name = signature(one.pricer, choice)
        if name in anything:
            continue
        modelled = looked.looks[name].seconds
        tasks = ((modelled.forward, NUM_MICROBATCHES), (modelled.backward, NUM_MICROBATCHES), (modelled.update, 1))
        work, waits = (sum(times * getattr(task, part) for task, times in tasks) for part in ("compute", "communication"))
        assert iteration(seen.correct(name, choice.option)) == pytest.approx(work * ratio + waits)
        # 1%: a move that several readers share is done once, the table counts it for each of them
        assert iteration(unseen.correct(name, choice.option)) <= (work * ratio + waits) * 1.01
        waited = max(waited, waits / work)
    assert waited > 0.05, "some options wait much, else nothing is tested"


def test_what_is_proposed_in_the_end_was_looked_at():
    one, (refinement, _) = planned(), measured_to_the_end()
    assert refinement.evidence.pace.work != 1.0 and refinement.evidence.pace.communication == 1.0
    settled = settle(one.pricer, one.table, SEARCH, refinement.evidence)
    assert settled.partitions == refinement.partitions
    for partition in settled.partitions:
        assert all(signature(one.pricer, choice) in settled.evidence.looks for choice in partition.stages)


# ---- keys


@cache
def deep() -> StagePricer:
    """Four blocks in four layers: the two in the middle are equal."""
    made = prepare(replace(MODEL, num_layers=4), TRAINING, LayerOptions(num_layers=4, imbalance=1.0), NUM_MICROBATCHES)
    return StagePricer(made.step, CLUSTER)


def proposed(start: int, shape: MeshShape, *, remat: bool = False) -> tuple[StageChoice, Stage]:
    option = StageOption(shape, remat, 0, 0.0, 0.0, 0.0, 0.0, 0.0, measured=False)
    choice = StageChoice(start, start + 1, Submesh(1, shape.num_devices), option)
    return choice, chosen_stage(deep(), choice)


def test_equal_layers_have_equal_keys_wherever_they_stand():
    one, other = proposed(1, MeshShape(2, 1)), proposed(2, MeshShape(2, 1))
    assert describe(*one).key == describe(*other).key
    assert describe(*one).stage != describe(*other).stage
    signatures = [option_signature(deep(), c.start, c.stop, c.submesh, c.option) for c, _ in (one, other)]
    assert signatures[0] == signatures[1]


def test_keys_differ_where_anything_differs_that_is_timed():
    choice, stage = proposed(1, MeshShape(2, 1))
    last = stage.layers[0]
    node = next(v for v, labels in enumerate(last.problem.labels) if len(labels) > 1)
    changed = (*last.choices[:node], 1 - min(last.choices[node], 1), *last.choices[node + 1 :])
    first = last.problem.updates[0]
    other = replace(first, work=replace(first.work, key="another optimiser"))
    requests = [
        describe(choice, stage),
        describe(choice, Stage(stage.shape, (replace(last, choices=changed),))),
        describe(choice, Stage(stage.shape, (replace(last, problem=replace(last.problem, updates=(other, *last.problem.updates[1:]))),))),
        describe(*proposed(0, MeshShape(2, 1))),
        describe(*proposed(1, MeshShape(4, 1))),
        describe(*proposed(1, MeshShape(2, 2))),
        describe(*proposed(1, MeshShape(2, 1), remat=True)),
        describe(choice, stage, versions="jax 2"),
        describe(choice, stage, device_kind="gpu"),
        describe(choice, stage, xla_flags="--fast"),
    ]
    assert len({request.key for request in requests}) == len(requests)


def test_requests_come_back_from_their_file():
    requests = (describe(*proposed(1, MeshShape(2, 1))), describe(*proposed(0, MeshShape(4, 1))))
    assert requests_from_json(requests_to_json(requests), "requests.json") == requests
