"""A task's own marker decides; Slurm only explains why there is none, and "cannot be asked" is never an end."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import follow
from alpa_hpc.launch.follow import follow_job, unwatched, wait_for_tasks
from alpa_hpc.launch.outcome import Died, Ended, JobOutcome, NotStarted
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.queue import QueuePhase, QueueState
from alpa_hpc.launch.status import JobState, JobStatus, write_status
from alpa_hpc.launch.submission import write_submission
from tests.launching import submission

RUNNING = QueueState(QueuePhase.RUNNING, nodes="node1")
DOWN = QueueState(QueuePhase.UNKNOWN, "Unable to contact slurm controller")
FAILED = QueueState(QueuePhase.FAILED, "NonZeroExitCode", exit_code=7)
GONE = QueueState(QueuePhase.GONE)
COMPLETED = QueueState(QueuePhase.COMPLETED)
ARRAY = submission(JobKind.PROFILE, 4, 5)
HALF_A_MINUTE = 30.0
Step = Callable[[], None]


def pending(reason: str) -> QueueState:
    return QueueState(QueuePhase.PENDING, reason)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path / "runs", "demo")


@dataclass
class Clock:
    """Time passes only where somebody sleeps."""

    began: float = field(default_factory=time.monotonic)
    now: float = 0.0
    steps: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        self.now = self.began

    @property
    def passed(self) -> float:
        return self.now - self.began

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.steps.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(follow, "time", clock)
    return clock


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ids: list[str] = []
    monkeypatch.setattr(follow, "cancel", ids.extend)
    return ids


def mark(paths: RunPaths, task: int, state: JobState, message: str = "", kind: JobKind = JobKind.PROFILE) -> None:
    ended = None if state is JobState.RUNNING else 2.0
    write_status(paths, JobStatus(kind, task, state, None, "host", "node7", 17, 1.0, ended, message, is_explained=True, traceback=""))


@dataclass
class Queue:
    """Answers with one state after another (the last one for ever), and does what the test wants before each."""

    answers: Sequence[QueueState]
    before: Mapping[int, Step] = field(default_factory=dict)
    asked: list[list[str]] = field(default_factory=list[list[str]])

    def __call__(self, ids: Sequence[str]) -> Mapping[str, QueueState]:
        assert len(self.asked) < 1000, "nobody will ever come to an end here"
        number = len(self.asked)
        self.asked.append(list(ids))
        self.before.get(number, lambda: None)()
        return dict.fromkeys(ids, self.answers[min(number, len(self.answers) - 1)])


def waited(paths: RunPaths, queue: Queue, *, max_pending_seconds: float = HALF_A_MINUTE) -> dict[int, JobOutcome]:
    return wait_for_tasks(paths, (submission(JobKind.PROFILE, 4),), max_pending_seconds=max_pending_seconds, ask=queue)


# ---- by its own marker


@pytest.mark.usefixtures("clock", "cancelled")
def test_each_task_has_its_own_end_by_its_marker_and_the_queue_is_asked_only_about_the_others(run: RunPaths) -> None:
    mark(run, 4, JobState.DONE)
    mark(run, 6, JobState.FAILED, "does not compile")
    queue = Queue([RUNNING], {2: lambda: mark(run, 5, JobState.DONE)})
    other = submission(JobKind.PROFILE, 6, job_id="13")
    assert wait_for_tasks(run, (ARRAY, other), max_pending_seconds=HALF_A_MINUTE, ask=queue) == {
        4: Ended(),
        5: Ended(),
        6: Died("failed on node7: does not compile"),
    }
    assert queue.asked == [["12_1"]] * 3


@pytest.mark.usefixtures("clock")
def test_where_all_have_reported_the_queue_is_not_asked(run: RunPaths) -> None:
    mark(run, 4, JobState.DONE)
    queue = Queue([FAILED])
    assert waited(run, queue) == {4: Ended()}
    assert queue.asked == []
    assert wait_for_tasks(run, (), max_pending_seconds=1, ask=queue) == {}


def test_the_queue_that_all_users_share_is_asked_seldom(run: RunPaths, clock: Clock) -> None:
    queue = Queue([RUNNING], {9: lambda: mark(run, 4, JobState.DONE)})
    waited(run, queue)
    assert len(queue.asked) == 10
    assert clock.passed >= 9 * follow.QUEUE_SECONDS
    assert len(clock.steps) > 5 * len(queue.asked), "markers are looked at more often"


# ---- pending


def test_what_waits_too_long_is_cancelled_and_was_not_started(run: RunPaths, clock: Clock, cancelled: list[str]) -> None:
    outcomes = waited(run, Queue([pending("Resources")]), max_pending_seconds=120)
    assert outcomes == {4: NotStarted("it waited in the queue for more than 2 minutes (Resources)")}
    assert cancelled == ["12_0"], "the task, not the array"
    assert 120 < clock.passed < 120 + 2 * follow.QUEUE_SECONDS


@pytest.mark.parametrize("reason", ["PartitionNodeLimit", "DependencyNeverSatisfied", "QOSMaxNodePerJobLimit"])
@pytest.mark.usefixtures("clock")
def test_what_would_never_start_is_cancelled_at_once(reason: str, run: RunPaths, cancelled: list[str]) -> None:
    queue = Queue([pending("Priority"), pending(reason)])
    assert waited(run, queue, max_pending_seconds=math.inf) == {4: NotStarted(f"Slurm would never start it ({reason})")}
    assert (cancelled, len(queue.asked)) == (["12_0"], 2)


@pytest.mark.usefixtures("clock")
def test_a_task_that_our_own_limit_holds_back_does_not_wait_for_the_site(run: RunPaths, cancelled: list[str]) -> None:
    answers = [pending("JobArrayTaskLimit")] * 40 + [pending("Resources")] * 3 + [RUNNING]
    queue = Queue(answers, {45: lambda: mark(run, 4, JobState.DONE)})
    assert waited(run, queue) == {4: Ended()}
    assert cancelled == []


@pytest.mark.usefixtures("clock")
def test_time_in_which_it_runs_does_not_count_as_waiting(run: RunPaths, cancelled: list[str]) -> None:
    answers = [RUNNING] * 40 + [pending("Resources")] * 3
    assert waited(run, Queue(answers, {42: lambda: mark(run, 4, JobState.DONE)})) == {4: Ended()}
    assert cancelled == []


# ---- a queue that cannot be asked


@pytest.mark.usefixtures("clock")
def test_a_controller_that_is_down_ends_nothing(run: RunPaths, cancelled: list[str]) -> None:
    queue = Queue([DOWN], {200: lambda: mark(run, 4, JobState.DONE)})
    assert waited(run, queue) == {4: Ended()}
    assert cancelled == []


@pytest.mark.usefixtures("clock", "cancelled")
def test_a_controller_that_knows_less_than_it_was_asked_ends_nothing(run: RunPaths) -> None:
    asked: list[Sequence[str]] = []

    def ask(ids: Sequence[str]) -> Mapping[str, QueueState]:
        asked.append(ids)
        if len(asked) == 50:
            mark(run, 4, JobState.DONE)
        return {}

    outcomes = wait_for_tasks(run, (submission(JobKind.PROFILE, 4),), max_pending_seconds=HALF_A_MINUTE, ask=ask)
    assert outcomes == {4: Ended()}


# ---- over, without a word


@pytest.mark.parametrize("state", [FAILED, GONE, COMPLETED, QueueState(QueuePhase.CANCELLED), QueueState(QueuePhase.NODE_FAILED)])
@pytest.mark.usefixtures("cancelled")
def test_a_task_that_slurm_ended_before_its_first_word_was_not_started(state: QueueState, run: RunPaths, clock: Clock) -> None:
    outcomes = waited(run, Queue([state]))
    assert outcomes == {4: NotStarted(f"ended before it could report anything (Slurm job 12_0: {state.describe()})")}
    assert clock.passed >= follow.SETTLE_SECONDS, "its marker may come late"


@pytest.mark.parametrize("phase", [QueuePhase.RUNNING, QueuePhase.PENDING])
@pytest.mark.usefixtures("clock")
def test_a_number_that_is_another_jobs_now_is_neither_waited_for_nor_cancelled(
    phase: QueuePhase, run: RunPaths, cancelled: list[str]
) -> None:
    outcomes = waited(run, Queue([QueueState(phase, name="of-somebody-else")]))
    assert outcomes == {4: NotStarted(f"ended before it could report anything (Slurm job 12_0: {GONE.describe()})")}
    assert cancelled == []


@pytest.mark.usefixtures("clock", "cancelled")
def test_a_task_that_slurm_ended_after_its_first_word_died(run: RunPaths) -> None:
    mark(run, 4, JobState.RUNNING)
    assert waited(run, Queue([RUNNING, FAILED])) == {4: Died("on node7 Slurm job 12_0: failed with exit code 7")}


@pytest.mark.parametrize(("state", "outcome"), [(JobState.DONE, Ended()), (JobState.FAILED, Died("failed on node7: said late"))])
@pytest.mark.usefixtures("cancelled")
def test_a_marker_that_comes_late_beats_slurms_word(state: JobState, outcome: JobOutcome, run: RunPaths, clock: Clock) -> None:
    mark(run, 4, JobState.RUNNING)
    late = int(follow.SETTLE_SECONDS / follow.QUEUE_SECONDS)
    queue = Queue([FAILED], {late: lambda: mark(run, 4, state, "said late")})
    assert waited(run, queue) == {4: outcome}
    assert clock.passed > follow.SETTLE_SECONDS - follow.QUEUE_SECONDS


@pytest.mark.usefixtures("clock", "cancelled")
def test_a_task_that_slurm_starts_again_is_not_over(run: RunPaths) -> None:
    answers = [GONE, GONE, RUNNING, GONE, GONE, RUNNING]
    queue = Queue(answers, {30: lambda: mark(run, 4, JobState.DONE)})
    assert waited(run, queue) == {4: Ended()}


# ---- who watches


@pytest.mark.usefixtures("clock")
def test_who_watches_hears_the_queue_at_each_answer_and_is_called_at_every_look(run: RunPaths) -> None:
    heard: list[Mapping[str, QueueState]] = []
    queue = Queue([RUNNING], {2: lambda: mark(run, 4, JobState.DONE)})
    wait_for_tasks(run, (submission(JobKind.PROFILE, 4),), max_pending_seconds=9.0, ask=queue, watch=heard.append)
    assert [states for states in heard if states] == [{"12_0": RUNNING}] * 3
    assert len(heard) > 10


# ---- one job of the run


@pytest.fixture
def queue_says(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Queue], None]]:
    real = wait_for_tasks

    def says(queue: Queue) -> None:
        monkeypatch.setattr(follow, "wait_for_tasks", lambda *args, **options: real(*args, **options, ask=queue))

    yield says


@pytest.mark.usefixtures("clock", "cancelled")
def test_a_job_that_ends_well_is_followed_to_its_end(run: RunPaths) -> None:
    write_submission(run, submission(JobKind.PLAN))
    mark(run, 0, JobState.DONE, kind=JobKind.PLAN)
    follow_job(run, JobKind.PLAN, unwatched)


@pytest.mark.usefixtures("clock", "cancelled")
def test_the_account_of_a_job_that_failed_is_told_with_its_log_folder(run: RunPaths) -> None:
    write_submission(run, submission(JobKind.TRAIN, job_id="77"))
    mark(run, 0, JobState.FAILED, "rank 2 on node3 failed: out of paper", kind=JobKind.TRAIN)
    with pytest.raises(LaunchError) as caught:
        follow_job(run, JobKind.TRAIN, unwatched)
    said = f"train job 77 failed on node7: rank 2 on node3 failed: out of paper\nIts log is in {run.logs / 'train'}."
    assert str(caught.value) == said


@pytest.mark.usefixtures("clock")
def test_a_job_that_died_before_its_first_word_is_told_by_the_end_of_its_log(run: RunPaths, queue_says: Callable[[Queue], None]) -> None:
    write_submission(run, submission(JobKind.PLAN, job_id="5"))
    folder = run.batch_log_folder(JobKind.PLAN)
    folder.mkdir(parents=True)
    (folder / "5_0_log.out").write_text("".join(f"line {number}\n" for number in range(40)) + "module: command not found\n")
    queue_says(Queue([FAILED]))
    with pytest.raises(
        LaunchError, match=r"(?s)^plan job 5 ended before.*the end of .*/5_0_log.out:\nline 31\n.*module: command not found$"
    ):
        follow_job(run, JobKind.PLAN, unwatched)


@pytest.mark.usefixtures("clock")
def test_a_training_whose_planning_failed_is_not_waited_for(
    run: RunPaths, cancelled: list[str], queue_says: Callable[[Queue], None]
) -> None:
    write_submission(run, submission(JobKind.TRAIN, job_id="77"))
    queue_says(Queue([pending("Dependency"), pending("DependencyNeverSatisfied")]))
    with pytest.raises(LaunchError, match=r"^train job 77 Slurm would never start it \(DependencyNeverSatisfied\)"):
        follow_job(run, JobKind.TRAIN, unwatched)
    assert cancelled == ["77"]


@pytest.mark.usefixtures("clock")
def test_a_job_of_the_run_may_wait_for_days(run: RunPaths, cancelled: list[str], queue_says: Callable[[Queue], None]) -> None:
    write_submission(run, submission(JobKind.PLAN))
    queue_says(Queue([pending("Priority")], {900: lambda: mark(run, 0, JobState.DONE, kind=JobKind.PLAN)}))
    follow_job(run, JobKind.PLAN, unwatched)
    assert cancelled == []


def test_a_job_that_another_node_has_just_submitted_is_found(run: RunPaths, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    mark(run, 0, JobState.DONE, kind=JobKind.TRAIN)
    write_submission(run, submission(JobKind.TRAIN, job_id=""))
    real = clock.sleep

    def sleep(seconds: float) -> None:
        real(seconds)
        if clock.passed > 5:
            write_submission(run, submission(JobKind.TRAIN, job_id="78"))

    monkeypatch.setattr(clock, "sleep", sleep)
    follow_job(run, JobKind.TRAIN, unwatched)
    assert clock.passed > 5


def test_a_job_that_nobody_submitted_is_not_waited_for_for_ever(run: RunPaths, clock: Clock) -> None:
    write_submission(run, submission(JobKind.PLAN))
    with pytest.raises(LaunchError, match=r"^no train job was submitted for .*; the logs in .*/logs say why$"):
        follow_job(run, JobKind.TRAIN, unwatched)
    assert follow.SETTLE_SECONDS <= clock.passed <= follow.SETTLE_SECONDS + 2


def test_of_several_submissions_the_newest_is_followed(run: RunPaths, clock: Clock, queue_says: Callable[[Queue], None]) -> None:
    """A record is named by its kind, so a second job of a kind takes the place of the first."""
    write_submission(run, submission(JobKind.TRAIN, job_id="12"))
    write_submission(run, submission(JobKind.TRAIN, job_id="13", submitted=2.0))
    queue = Queue([RUNNING], {1: lambda: mark(run, 0, JobState.DONE, kind=JobKind.TRAIN)})
    queue_says(queue)
    follow_job(run, JobKind.TRAIN, unwatched)
    assert queue.asked == [["13"], ["13"]]
    assert clock.passed > 0
