"""Whatever becomes of profiling tasks, each request has one outcome in the end, and a task that dies takes only its culprit with it."""

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import profiling
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.launch.outcome import Died, Ended, JobOutcome, NotStarted
from alpa_hpc.launch.paths import RunPaths, new_run
from alpa_hpc.launch.profiling import ProfileTask, StoreProfiler, measure_all, read_answer, shares
from alpa_hpc.planner.requests import ProfileRequest, requests_from_json
from alpa_hpc.profiling.outcome import Failed, MeasuredTasks, MeasuredWork, Outcome, Unmeasured
from alpa_hpc.profiling.store import ProfileRow, StoreContents, read_store, write_shard
from tests.launching import LONE, profile_request

MESHES = (LONE, Submesh(1, 2), Submesh(2, 2))


class Fate(enum.Enum):
    """What happens when a request is measured."""

    KNOWN = enum.auto()
    GOOD = enum.auto()
    DOES_NOT_COMPILE = enum.auto()
    KILLS = enum.auto()
    KILLS_AFTER_ITS_ROW = enum.auto()


class Killed(Exception):
    """Stands for the end of the process that measures."""


def row(key: str) -> ProfileRow:
    return ProfileRow(key, "stage", (1.0,), (2.0,), (3.0,), 0.5, "host", 1, 1.0, "cpu", "jax 1")


@dataclass
class Cluster:
    """Runs profiling tasks as the real ones do, from their request file, up to the fate of a request.

    `never`: numbers of tasks that no node ever takes; `dies_at_its_end`: of tasks that are killed with all their work done.
    """

    paths: RunPaths
    rows: dict[str, ProfileRow]
    fates: Mapping[str, Fate]
    never: frozenset[int] = frozenset()
    dies_at_its_end: frozenset[int] = frozenset()
    waves: list[list[ProfileTask]] = field(default_factory=list[list[ProfileTask]])
    measured: Counter[str] = field(default_factory=Counter[str])

    def __call__(self, tasks: Sequence[ProfileTask]) -> Mapping[int, JobOutcome]:
        assert len(self.waves) < 50, "this would go on for ever"
        self.waves.append(list(tasks))
        return {task.number: self._run(task) for task in tasks}

    def _run(self, task: ProfileTask) -> JobOutcome:
        requests = requests_from_json(read_json(self.paths.profile_request(task.number)), "request file")
        assert requests == task.requests
        assert {one.submesh for one in requests} == {task.submesh}
        if task.number in self.never:
            return NotStarted(f"task {task.number} found no node")
        try:
            measure_all(self.paths, task.number, Path("store"), requests, self._measure)
        except Killed:
            return Died(f"{task.number} was killed")
        return Died("was killed late") if task.number in self.dies_at_its_end else Ended()

    def _measure(self, request: ProfileRequest) -> ProfileRow | Failed:
        self.measured[request.key] += 1
        match self.fates[request.key]:
            case Fate.KNOWN:
                raise AssertionError("what is known is not measured again")
            case Fate.GOOD:
                return row(request.key)
            case Fate.DOES_NOT_COMPILE:
                return Failed("does not compile")
            case Fate.KILLS:
                raise Killed
            case Fate.KILLS_AFTER_ITS_ROW:
                self.rows[request.key] = row(request.key)
                raise Killed


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path / "runs", "demo")


def in_memory(patch: pytest.MonkeyPatch, rows: dict[str, ProfileRow]) -> None:
    """Keep the rows of a store in a dictionary."""
    patch.setattr(profiling, "read_store", lambda _: StoreContents(dict(rows), ()))
    patch.setattr(profiling, "write_shard", lambda _, new: rows.update((one.key, one) for one in new))
    patch.setattr(profiling, "compact_when_many", lambda _: 0)


cases = st.lists(st.tuples(st.sampled_from(MESHES), st.sampled_from(list(Fate))), max_size=12)
numbers = st.frozensets(st.integers(0, 12), max_size=4)


def described(case: Sequence[tuple[Submesh, Fate]]) -> tuple[list[ProfileRequest], dict[str, Fate]]:
    requests = [profile_request(f"{number:x}", submesh) for number, (submesh, _) in enumerate(case)]
    return requests, {one.key: fate for one, (_, fate) in zip(requests, case, strict=True)}


@given(cases, numbers, numbers, st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_every_request_gets_the_outcome_that_it_deserves(
    case: Sequence[tuple[Submesh, Fate]], never: frozenset[int], dies_at_its_end: frozenset[int], num_shares: int
) -> None:
    requests, fates = described(case)
    rows = {key: row(key) for key, fate in fates.items() if fate is Fate.KNOWN}
    known = len(rows)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("alpa_hpc.launch.files.os.fsync", lambda _: None)
        in_memory(patch, rows)
        paths = new_run(Path(folder), "demo")
        cluster = Cluster(paths, rows, fates, never, dies_at_its_end)
        profiler = StoreProfiler(paths, Path("store"), cluster, num_shares)
        outcomes = profiler(requests)
    assert set(outcomes) == set(fates)
    homeless = {one.key for wave in cluster.waves for task in wave if task.number in never for one in task.requests}
    for one in requests:
        check_outcome(outcomes[one.key], fates[one.key], one, is_homeless=one.key in homeless)
    assert cluster.measured == {key: 1 for key, fate in fates.items() if fate is not Fate.KNOWN and key not in homeless}
    assert (profiler.num_new, profiler.num_reused) == (len(requests) - known, known)
    killers = sum(fate in (Fate.KILLS, Fate.KILLS_AFTER_ITS_ROW) for fate in fates.values())
    assert len(cluster.waves) <= (1 + killers if len(requests) > known else 0)
    given_numbers = [task.number for wave in cluster.waves for task in wave]
    assert given_numbers == list(range(len(given_numbers))), "no two tasks share files"


def check_outcome(outcome: Outcome, fate: Fate, request: ProfileRequest, *, is_homeless: bool) -> None:
    match outcome:
        case MeasuredWork():
            assert request.submesh == LONE
        case MeasuredTasks():
            assert request.submesh != LONE
        case Unmeasured(reason):
            assert is_homeless
            assert "found no node" in reason
        case Failed(reason):
            assert reason == "does not compile" if fate is Fate.DOES_NOT_COMPILE else "was killed" in reason
    if not is_homeless:
        assert isinstance(outcome, Failed) == (fate in (Fate.DOES_NOT_COMPILE, Fate.KILLS))


def test_a_request_that_kills_its_task_has_failed_and_those_after_it_are_measured_in_the_end(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = {"a": Fate.GOOD, "b": Fate.KILLS, "c": Fate.GOOD, "d": Fate.KILLS, "e": Fate.GOOD}
    rows: dict[str, ProfileRow] = {}
    in_memory(monkeypatch, rows)
    cluster = Cluster(run, rows, fates)
    outcomes = StoreProfiler(run, Path("store"), cluster, 1)([profile_request(key) for key in fates])
    assert [[one.key for one in task.requests] for wave in cluster.waves for task in wave] == [list("abcde"), list("cde"), ["e"]]
    assert outcomes == {
        **dict.fromkeys("ace", MeasuredWork(1.0, 2.0, 3.0)),
        "b": Failed("its profiling task 0 was killed"),
        "d": Failed("its profiling task 1 was killed"),
    }


def test_through_real_files_a_second_run_measures_nothing(run: RunPaths, tmp_path: Path) -> None:
    requests = [profile_request("a"), profile_request("b", MESHES[2])]

    def tasks(wanted: Sequence[ProfileTask]) -> Mapping[int, JobOutcome]:
        for task in wanted:
            measure_all(run, task.number, run.costs, task.requests, lambda request: row(request.key))
        return {task.number: Ended() for task in wanted}

    first, second = (StoreProfiler(run, run.costs, tasks, 4) for _ in range(2))
    assert first(requests) == second(requests) == {"a": MeasuredWork(1.0, 2.0, 3.0), "b": MeasuredTasks(1.0, 2.0, 3.0)}
    assert ((first.num_new, first.num_reused), (second.num_new, second.num_reused)) == ((2, 0), (0, 2))
    assert first(requests[:1]) and (first.num_new, first.num_reused) == (2, 1)
    assert run.costs == tmp_path / "runs" / "costs"


def test_a_torn_shard_is_told_and_measured_again(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    shard = write_shard(run.costs, [row("a")])
    shard.write_bytes(shard.read_bytes()[:100])

    def tasks(wanted: Sequence[ProfileTask]) -> Mapping[int, JobOutcome]:
        write_shard(run.costs, [row(one.key) for task in wanted for one in task.requests])
        return {task.number: Ended() for task in wanted}

    profiler = StoreProfiler(run, run.costs, tasks, 1)
    assert profiler([profile_request("a")]) == {"a": MeasuredWork(1.0, 2.0, 3.0)}
    assert profiler.num_new == 1
    assert f"warning: {shard} counts as missing" in capsys.readouterr().err


def ended(run: RunPaths, end: JobOutcome) -> Mapping[str, Outcome]:
    """The outcome of one request whose task ends without having written anything."""
    return StoreProfiler(run, run.costs, lambda tasks: {task.number: end for task in tasks}, 1)([profile_request("a")])


def test_a_task_that_died_before_it_began_is_nobodys_fault_and_ends_planning(run: RunPaths) -> None:
    with pytest.raises(LaunchError, match="^profiling task 0 died before it measured anything: no such module"):
        ended(run, Died("no such module"))


def test_a_task_that_ended_well_without_a_row_is_not_believed(run: RunPaths) -> None:
    with pytest.raises(LaunchError, match="^profiling task 0 ended well, but stage a is not in the cost store"):
        ended(run, Ended())


@pytest.mark.parametrize("left", [{"current": "a", "failed": {}}, {"current": "zz", "failed": {}}, {"current": "", "failed": {"a": "old"}}])
def test_what_an_earlier_planning_job_left_is_not_taken_for_an_answer(left: object, run: RunPaths) -> None:
    write_json(run.profile_answer(0), left)
    assert ended(run, NotStarted("no node")) == {"a": Unmeasured("no node")}
    write_json(run.profile_answer(0), left)
    with pytest.raises(LaunchError, match="died before it measured anything"):
        ended(run, Died("no such module"))


def test_a_task_says_what_it_is_at_before_it_begins_it_and_what_failed_when_it_is_done(run: RunPaths) -> None:
    seen: list[tuple[str, list[str], list[str]]] = []

    def measure(request: ProfileRequest) -> ProfileRow | Failed:
        answer = read_answer(run, 3)
        seen.append((answer.current, sorted(answer.failed), sorted(read_store(run.costs).rows)))
        return Failed("too large") if request.key == "b" else row(request.key)

    measure_all(run, 3, run.costs, [profile_request(key) for key in "abc"], measure)
    assert seen == [("a", [], []), ("b", [], ["a"]), ("c", ["b"], ["a"])]
    assert (read_answer(run, 3).current, read_answer(run, 3).failed) == ("", {"b": "too large"})
    assert read_answer(run, 4).failed == {}


@given(st.lists(st.sampled_from(MESHES), max_size=15), st.integers(1, 6))
def test_shares_deal_out_each_request_once_evenly_and_mesh_by_mesh(submeshes: list[Submesh], num_shares: int) -> None:
    requests = [profile_request(f"{number:x}", submesh) for number, submesh in enumerate(submeshes)]
    dealt = shares(requests, num_shares)
    assert sorted(one.key for _, share in dealt for one in share) == sorted(one.key for one in requests)
    assert all({one.submesh for one in share} == {submesh} for submesh, share in dealt)
    runs = [submesh for index, (submesh, _) in enumerate(dealt) if index == 0 or dealt[index - 1][0] != submesh]
    assert len(runs) == len(set(runs)) == len(set(submeshes)), "an array for each size of mesh takes neighbours together"
    for submesh in set(submeshes):
        sizes = [len(share) for other, share in dealt if other == submesh]
        assert len(sizes) == min(num_shares, submeshes.count(submesh))
        assert max(sizes) - min(sizes) <= 1
    for _, share in dealt:
        assert [int(one.key, 16) for one in share] == sorted(int(one.key, 16) for one in share), "in the order that was asked for"
