"""What profiling finds out decides: what failed is in no plan, what nobody could measure stays as modelled, whole tasks count whole."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.planner.evidence import NO_EVIDENCE, Look, Pace, Signature, measured_seconds, pace_of
from alpa_hpc.planner.refine import Refinement, option_signature, propose, settle, signature, with_measurements
from alpa_hpc.planner.requests import ProfileRequest, describe_request
from alpa_hpc.planner.search import analytic_seconds, chosen_stage
from alpa_hpc.profiling.options import Extent
from alpa_hpc.profiling.outcome import Failed, MeasuredTasks, MeasuredWork, Outcome, Unmeasured
from alpa_hpc.report.planning import not_measured_rows
from alpa_hpc.sharding.breakdown import StageSeconds, TaskSeconds
from alpa_hpc.stages.objective import StageChoice, StagePartition
from tests.planning import CLUSTER, NUM_MICROBATCHES, SEARCH, Planned, planned, with_bandwidth

describe = partial(describe_request, device_kind="cpu", versions="jax 1", xla_flags="", extent=Extent.LONE, cluster_name="c")
describe_mesh = partial(describe, extent=Extent.MESH)
FAST_NETWORK = with_bandwidth(200.0)


@dataclass
class Lab:
    """Answers each request by a function, and remembers what it was asked."""

    answer: Callable[[ProfileRequest], Outcome]
    asked: list[ProfileRequest] = field(default_factory=list[ProfileRequest])

    def __call__(self, requests: Sequence[ProfileRequest]) -> Mapping[str, Outcome]:
        self.asked += requests
        return {one.key: self.answer(one) for one in requests}


def work(request: ProfileRequest) -> MeasuredWork:
    layers = (request.stage.stop - request.stage.start) / request.stage.shape.num_devices
    return MeasuredWork(1e-3 * layers, 2e-3 * layers, 3e-3 * layers)


def refined(lab: Lab, cluster: ClusterSpec = CLUSTER, *, extent: Extent = Extent.LONE, max_rounds: int = 20) -> Refinement:
    one = planned(cluster)
    describe_it = describe if extent is Extent.LONE else describe_mesh
    return with_measurements(one.pricer, one.refinement(), SEARCH, lab, describe_it, max_rounds=max_rounds, tasks_per_round=8)


def labels(partition: StagePartition) -> list[tuple[int, int, Submesh, MeshShape]]:
    return [(choice.start, choice.stop, choice.submesh, choice.option.shape) for choice in partition.stages]


def options_of(one: Planned) -> list[StageChoice]:
    return [StageChoice(*cell, option) for cell, options in one.table.options.items() for option in options]


# ---- failures


def test_a_stage_that_cannot_run_is_in_no_partition_and_changes_the_choice():
    usual = refined(Lab(work)).partitions[0]
    broken = usual.stages[0].option.shape

    def answer(request: ProfileRequest) -> Outcome:
        return Failed("out of device memory: 3 GB") if request.stage.shape == broken else work(request)

    lab = Lab(answer)
    found = refined(lab)
    assert labels(found.partitions[0]) != labels(usual)
    assert any(choice.option.measured for choice in found.partitions[0].stages)
    failed = {signature(planned().pricer, choice) for p in found.partitions for choice in p.stages} & found.evidence.failed
    assert not failed and found.evidence.failed
    for cell, options in found.table.options.items():
        assert not any(option_signature(planned().pricer, *cell, one) in found.evidence.failed for one in options)
    keys = [request.key for request in lab.asked]
    assert len(keys) == len(set(keys)), "what failed is not tried again"
    rows = not_measured_rows(found)
    assert rows and all(row["outcome"] == "failed" and row["reason"] == "out of device memory: 3 GB" for row in rows)
    assert {row["label"] for row in rows} == {one.label for one in lab.asked if one.stage.shape == broken}


def test_options_that_lost_against_a_failed_one_are_tried_after_it():
    def answer(request: ProfileRequest) -> Outcome:
        return Failed("no") if request.stage.shape in broken else work(request)

    analytic = propose(planned().pricer, planned().table, SEARCH, NO_EVIDENCE)
    known = {signature(planned().pricer, choice) for choice in options_of(planned())}
    broken = {choice.option.shape for partition in analytic.partitions for choice in partition.stages}
    found = refined(Lab(answer))
    added = {option_signature(planned().pricer, *cell, one) for cell, options in found.table.options.items() for one in options} - known
    assert added and not added & found.evidence.failed
    assert all(choice.option.shape not in broken for choice in found.partitions[0].stages)


def test_when_all_fails_the_reasons_are_listed():
    lab = Lab(lambda request: Failed(f"died on {request.stage.shape.num_devices}"))
    with pytest.raises(InfeasibleError, match=r"(?s)Left out, since they failed .*layers 0-\d on .*: died on \d") as caught:
        refined(lab, max_rounds=500)
    assert len(str(caught.value).splitlines()) == 2 + len({one.label for one in lab.asked})


def test_an_infeasible_table_without_failures_says_nothing_of_them():
    one = planned()
    empty = one.table.updated(dict.fromkeys(one.table.options, ()))
    with pytest.raises(InfeasibleError) as caught:
        propose(one.pricer, empty, SEARCH, NO_EVIDENCE)
    assert "failed" not in str(caught.value)


# ---- what could not be measured


def test_what_nobody_could_measure_stays_as_modelled_and_is_asked_for_once():
    lab = Lab(lambda request: Unmeasured("no 2 nodes within 60 minutes"))
    found = refined(lab)
    analytic = settle(planned().pricer, planned().table, SEARCH, NO_EVIDENCE)
    assert found.partitions == analytic.partitions
    assert not any(choice.option.measured for choice in found.partitions[0].stages)
    assert len(lab.asked) == len({one.key for one in lab.asked}) > 0
    assert found.num_rounds < 20, "no round is spent on what was tried"
    assert {(row["outcome"], row["reason"]) for row in not_measured_rows(found)} == {("unmeasured", "no 2 nodes within 60 minutes")}


def test_what_nobody_could_measure_goes_at_the_pace_of_the_measured():
    def answer(request: ProfileRequest) -> Outcome:
        return Unmeasured("too few nodes") if request.stage.shape.num_devices > 2 else work(request)

    found = refined(Lab(answer))
    left = [one for one in found.evidence.not_measured if one in found.evidence.looks]
    assert left and found.evidence.pace.work > 1.0
    for one in left:
        modelled = found.evidence.looks[one].seconds
        assert found.evidence.seconds(one, modelled) == found.evidence.pace.of(modelled)


# ---- whole tasks on a mesh


def modelled(one: Planned) -> dict[str, StageSeconds]:
    """Modelled seconds of every option, by the key of its request."""
    found: dict[str, StageSeconds] = {}
    seconds_of = analytic_seconds(one.pricer)
    for choice in options_of(one):
        stage = chosen_stage(one.pricer, choice)
        found[describe_mesh(choice, stage).key] = seconds_of(choice, stage)
    return found


@pytest.mark.parametrize("slow_links", [1.0, 1000.0])
def test_a_network_slower_than_described_changes_the_choice(slow_links: float):
    """Described, the network between nodes is fast; rows measured over it are slower by `slow_links`."""
    one = planned(FAST_NETWORK)
    table = modelled(one)

    def answer(request: ProfileRequest) -> Outcome:
        seconds = table[request.key]
        factor = slow_links if request.submesh.num_nodes > 1 else 1.0
        return MeasuredTasks(*(t.compute + factor * t.communication for t in (seconds.forward, seconds.backward, seconds.update)))

    found = refined(Lab(answer), FAST_NETWORK, extent=Extent.MESH)
    spans = any(choice.submesh.num_nodes > 1 for choice in found.partitions[0].stages)
    assert spans == (slow_links == 1.0)


def test_measured_tasks_are_the_seconds_of_a_stage():
    found = refined(Lab(lambda request: MeasuredTasks(0.25, 0.5, 0.125)), extent=Extent.MESH)
    for choice in found.partitions[0].stages:
        assert choice.option.measured
        assert (choice.option.seconds, choice.option.seconds_once) == (0.75, 0.125)


def test_equal_work_on_other_links_has_a_key_of_its_own_only_where_links_are_timed():
    first = planned(FAST_NETWORK)
    choice = next(one for one in options_of(first) if one.submesh == Submesh(2, 4))
    stage = chosen_stage(first.pricer, choice)
    lone, mesh = describe(choice, stage), describe_mesh(choice, stage)
    elsewhere = describe_mesh(choice, stage, cluster_name="d")
    narrower = describe_mesh(StageChoice(choice.start, choice.stop, Submesh(4, 2), choice.option), stage)
    assert len({lone.key, mesh.key, elsewhere.key, narrower.key}) == 4
    assert describe(choice, stage, cluster_name="d").key == lone.key
    alone = StageChoice(0, 1, Submesh(1, 1), replace(choice.option, shape=MeshShape(1, 1)))
    assert describe_mesh(alone, chosen_stage(first.pricer, alone)) == describe(alone, chosen_stage(first.pricer, alone))
    assert (lone.submesh, mesh.submesh) == (Submesh(1, 1), Submesh(2, 4))


# ---- seconds

POSITIVE = st.floats(1e-6, 1e3)
SECONDS = st.just(0.0) | POSITIVE
TASKS = st.builds(TaskSeconds, SECONDS, SECONDS)
STAGES = st.builds(StageSeconds, TASKS, TASKS, TASKS)


@given(STAGES, POSITIVE, POSITIVE, POSITIVE)
def test_whole_tasks_replace_work_and_communication(seconds: StageSeconds, forward: float, backward: float, update: float):
    found = measured_seconds(seconds, MeasuredTasks(forward, backward, update))
    for task, total, before in (
        (found.forward, forward, seconds.forward),
        (found.backward, backward, seconds.backward),
        (found.update, update, seconds.update),
    ):
        assert task.total == pytest.approx(total) and task.compute >= 0 and task.communication >= 0
        assert task.communication == 0 or before.communication > 0, "where nothing was to be sent nothing is"
    lone = measured_seconds(seconds, MeasuredWork(forward, backward, update))
    assert (lone.forward.compute, lone.backward.compute, lone.update.compute) == (forward, backward, update)
    assert lone.forward.communication == seconds.forward.communication


@settings(max_examples=30)
@given(st.lists(STAGES, min_size=1, max_size=4), st.floats(0.01, 100), st.floats(0.01, 100))
def test_the_pace_of_measurements_is_found_again(stages: list[StageSeconds], work_pace: float, link_pace: float):
    names = [Signature((), Submesh(1, 1), MeshShape(1, 1), False, number) for number in range(len(stages))]
    looks = {name: Look(seconds, 0.0) for name, seconds in zip(names, stages, strict=True)}
    truth = Pace(work_pace, link_pace)
    pace = pace_of(looks, {name: truth.of(look.seconds) for name, look in looks.items()}, NUM_MICROBATCHES)
    works = any(s.forward.compute or s.backward.compute or s.update.compute for s in stages)
    talks = any(s.forward.communication or s.backward.communication or s.update.communication for s in stages)
    assert pace.work == pytest.approx(work_pace if works else 1.0)
    assert pace.communication == pytest.approx(link_pace if talks else 1.0)
    for seconds in stages:
        assert truth.of(seconds).microbatch >= truth.least * seconds.microbatch * (1 - 1e-9)
