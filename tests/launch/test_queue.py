"""Slurm's own words (22.05, captured from a real one) are read right, and "cannot be asked" is never taken for an end."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import queue
from alpa_hpc.launch.queue import Answer, QueuePhase, QueueState, ask_queue, cancel, cancel_pending, find_by_name, never_starts, run_command
from alpa_hpc.launch.queue_words import parse_names, parse_sacct, parse_scontrol, parse_squeue

WIDTHS = (48, 32, 160, 16, 32, 256)
UNKNOWN_ID = "slurm_load_jobs error: Invalid job id specified\n"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
NO_ACCOUNTING = Answer(1, "", "Slurm accounting storage is disabled\n")

SCONTROL_ARRAY = (
    "JobId=15 ArrayJobId=4 ArrayTaskId=1 JobName=arr UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901756 Nice=0 "
    "Account=(null) QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=3:0 RunTime=00:00:00 TimeLimit=00:10:00 StartTime=2026-11-29T21:58:33 EndTime=2026-11-29T21:58:33 Deadline=N/A "
    "Partition=debug ReqNodeList=(null) ExcNodeList=(null) NodeList=node2 BatchHost=node2 NumNodes=1 NumCPUs=1\n"
)
SCONTROL_DRAINED = (
    "JobId=18 JobName=drained UserId=root(0) Priority=4294901744 Account=(null) JobState=PENDING "
    "Reason=ReqNodeNotAvail,_UnavailableNodes:node4 Dependency=(null) ExitCode=0:0 StartTime=Unknown EndTime=Unknown Deadline=N/A "
    "ReqNodeList=node4 ExcNodeList=(null) NodeList= NumNodes=1\n"
)
SCONTROL_UNSEEN = SCONTROL_DRAINED.replace("JobState=PENDING", "JobState=FAILED").replace("ExitCode=0:0", "ExitCode=0:53")


def line(*cells: str) -> str:
    """A line of squeue, which pads and cuts each column."""
    return "".join(cell.ljust(width)[:width] for cell, width in zip(cells, WIDTHS, strict=True)) + "\n"


class FakeSlurm:
    """Answers by the name of the command, and keeps what it was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, command: Sequence[str]) -> Answer:
        self.asked.append(tuple(command))
        return self.answers.get(f"{command[0]}_{command[1].strip('-')}", self.answers.get(command[0], NO_ACCOUNTING))


@pytest.mark.parametrize(
    ("cells", "phase", "exit_code", "signal", "said"),
    [
        (("2", "FAILED", "NonZeroExitCode", "1792", "2026-11-29T21:58:33", "node1"), QueuePhase.FAILED, 7, 0, "failed with exit code 7"),
        (("3", "FAILED", "JobLaunchFailure", "9", "2026-11-29T21:58:33", "node1"), QueuePhase.FAILED, 0, 9, "out of host memory"),
        (("25", "FAILED", "JobLaunchFailure", "53", "2026-11-29T22:02:37", "node1"), QueuePhase.FAILED, 0, 53, "log folder is not visible"),
        (("26", "FAILED", "NonZeroExitCode", "35072", "N/A", "node1"), QueuePhase.FAILED, 137, 0, "out of host memory"),
        (("27", "OUT_OF_MEMORY", "OutOfMemory", "125", "N/A", "node1"), QueuePhase.OUT_OF_MEMORY, 0, 125, "out of host memory"),
        (("28", "FAILED", "OutOfMemory", "0:125", "N/A", "node1"), QueuePhase.FAILED, 0, 125, "out of host memory"),
        (("13", "TIMEOUT", "TimeLimit", "15", "2026-11-29T22:00:05", "node2"), QueuePhase.TIMED_OUT, 0, 15, "time limit"),
        (
            ("29", "NODE_FAIL", "NodeDown", "0", "2026-11-29T22:00:05", "node2"),
            QueuePhase.NODE_FAILED,
            0,
            0,
            "lost a node that failed (node2)",
        ),
        (("30", "PREEMPTED", "None", "0", "2026-11-29T22:00:05", "node2"), QueuePhase.PREEMPTED, 0, 0, "preempted"),
        (("9", "CANCELLED", "Priority", "0", "2026-11-29T21:58:34", ""), QueuePhase.CANCELLED, 0, 0, "cancelled"),
        (("1", "COMPLETED", "None", "0", "2026-11-29T22:03:33", "node[1-2]"), QueuePhase.COMPLETED, 0, 0, "exit code 0"),
        (("5_3", "PENDING", "JobArrayTaskLimit", "0", "N/A", ""), QueuePhase.PENDING, 0, 0, "waits in the queue (JobArrayTaskLimit)"),
        (("31", "RUNNING", "None", "0", "2026-11-29T22:08:33", "node[1-2]"), QueuePhase.RUNNING, 0, 0, "runs on node[1-2]"),
        (("32", "COMPLETING", "None", "0", "2026-11-29T22:08:33", "node1"), QueuePhase.RUNNING, 0, 0, "runs"),
        (("33", "REQUEUE_HOLD", "None", "0", "N/A", ""), QueuePhase.PENDING, 0, 0, "waits"),
        (("34", "DREAMING", "None", "0", "N/A", ""), QueuePhase.UNKNOWN, 0, 0, "DREAMING"),
    ],
)
def test_a_line_of_squeue(cells: tuple[str, ...], phase: QueuePhase, exit_code: int, signal: int, said: str) -> None:
    states = parse_squeue(line(*cells))
    assert list(states) == [cells[0]]
    state = states[cells[0]]
    assert (state.phase, state.exit_code, state.signal, state.nodes) == (phase, exit_code, signal, cells[5])
    assert said in state.describe()
    assert (state.ended is not None) == (state.is_over and cells[4] != "N/A"), "of a job that runs, Slurm names when its time is over"


def test_a_reason_with_spaces_stays_in_its_column() -> None:
    (state,) = parse_squeue(line("18", "PENDING", "ReqNodeNotAvail, UnavailableNodes:node4", "0", "N/A", "")).values()
    assert state == QueueState(QueuePhase.PENDING, "ReqNodeNotAvail, UnavailableNodes:node4")


def test_lines_of_scontrol() -> None:
    states = parse_scontrol(SCONTROL_ARRAY + SCONTROL_DRAINED)
    assert {job_id: (state.phase, state.exit_code, state.nodes) for job_id, state in states.items()} == {
        "4_1": (QueuePhase.FAILED, 3, "node2"),
        "18": (QueuePhase.PENDING, 0, ""),
    }
    assert states["18"].reason == "ReqNodeNotAvail,_UnavailableNodes:node4"
    assert "not visible" in parse_scontrol(SCONTROL_UNSEEN)["18"].describe()


def test_lines_of_sacct_count_only_when_they_tell_an_end() -> None:
    text = (
        "2|FAILED|7:0|2026-11-29T21:58:33|node1\n5_3|CANCELLED by 1000|0:15|2026-11-29T21:58:33|node[1-2]\n"
        "26|PENDING|0:0|Unknown|None assigned\nnoise\n"
    )
    states = parse_sacct(text)
    assert {job_id: (state.phase, state.exit_code) for job_id, state in states.items()} == {
        "2": (QueuePhase.FAILED, 7),
        "5_3": (QueuePhase.CANCELLED, 0),
    }


def test_numbers_by_name() -> None:
    text = "".join(f"{number:48}{name:256}\n" for number, name in (("4_[0-2]", "arr-x-1"), ("7", "train-x-1"), ("12", "train-x-1")))
    assert parse_names(text) == {"arr-x-1": "4", "train-x-1": "12"}


def test_squeue_is_asked_once_for_all_and_the_rest_one_after_the_other() -> None:
    slurm = FakeSlurm(
        squeue=Answer(0, line("2", "RUNNING", "None", "0", "N/A", "node1") + line("77", "RUNNING", "None", "0", "N/A", "node1"), ""),
        scontrol=Answer(0, SCONTROL_ARRAY, ""),
        sacct_completion=Answer(0, "9|CANCELLED|0:0|2026-11-29T21:58:33|(null)\n", ""),
    )
    states = ask_queue(["2", "4_1", "9", "10", "11_0"], slurm)
    assert [state.phase.value for state in states.values()] == ["running", "failed", "cancelled", "gone", "gone"]
    assert [command[0] for command in slurm.asked].count("squeue") == 1
    (completion,) = [command for command in slurm.asked if "--completion" in command]
    assert "--jobs=9,10" in completion, "of the log of ended jobs, array tasks cannot be asked"


def test_an_accounting_database_is_believed_also_about_array_tasks() -> None:
    slurm = FakeSlurm(
        squeue=Answer(1, "", UNKNOWN_ID),
        scontrol=Answer(1, "Job 4_77 not found\n", ""),
        sacct_allocations=Answer(0, "4_1|COMPLETED|0:0|2026-11-29T21:58:33|node2\n", ""),
    )
    states = ask_queue(["4_1", "5"], slurm)
    assert (states["4_1"].phase, states["5"].phase) == (QueuePhase.COMPLETED, QueuePhase.GONE)
    assert not any("--completion" in command for command in slurm.asked)


@pytest.mark.parametrize(
    "squeue",
    [
        Answer(1, "", DOWN),
        Answer(1, "", "squeue: error: slurm_receive_msg: Socket timed out on send/recv operation\n"),
        Answer(1, "", "squeue: fatal: Unable to process configuration file\n"),
        Answer(None, "", "squeue did not answer in 30 s"),
        Answer(None, "", "squeue cannot be started here: No such file or directory"),
    ],
)
def test_what_cannot_be_asked_is_unknown_and_nobody_else_is_asked(squeue: Answer) -> None:
    slurm = FakeSlurm(squeue=squeue, sacct_completion=Answer(0, "2|FAILED|7:0|2026-11-29T21:58:33|node1\n", ""))
    states = ask_queue(["2", "4_1"], slurm)
    assert {state.phase for state in states.values()} == {QueuePhase.UNKNOWN}
    assert not any(state.is_over for state in states.values())
    assert states["2"].reason == squeue.errors.strip()
    assert len(slurm.asked) == 1


def test_a_controller_that_goes_down_between_two_questions_is_unknown_too() -> None:
    slurm = FakeSlurm(squeue=Answer(0, "", ""), scontrol=Answer(1, "", DOWN))
    assert ask_queue(["2"], slurm)["2"].phase is QueuePhase.UNKNOWN


def test_a_known_unknown_is_gone() -> None:
    slurm = FakeSlurm(squeue=Answer(1, "", UNKNOWN_ID), scontrol=Answer(1, "", UNKNOWN_ID))
    state = ask_queue(["999"], slurm)["999"]
    assert (state.phase, state.is_over) == (QueuePhase.GONE, True)


def test_many_ids_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_IDS", 2)
    slurm = FakeSlurm(squeue=Answer(1, "", DOWN))
    assert len(ask_queue(["1", "2", "3"], slurm)) == 3
    assert len(slurm.asked) == 2
    assert ask_queue([], slurm) == {}


@pytest.mark.parametrize("foreign", ["abc", "4_[1-2]", "4_", "", "4,5", "--me"])
def test_only_single_jobs_and_tasks_are_ids(foreign: str) -> None:
    for action in (ask_queue, cancel):
        with pytest.raises(AssertionError, match="not ids"):
            action([foreign], FakeSlurm())


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("PartitionNodeLimit", True),
        ("PartitionTimeLimit", True),
        ("DependencyNeverSatisfied", True),
        ("BadConstraints", True),
        ("InvalidQOS", True),
        ("QOSMaxNodePerJobLimit", True),
        ("AssocMaxWallDurationPerJobLimit", True),
        ("QOSMinGRES", True),
        ("AssocMaxJobsLimit", False),
        ("AssocGrpCpuLimit", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("QOSGrpNodeLimit", False),
        ("Resources", False),
        ("Priority", False),
        ("Dependency", False),
        ("BeginTime", False),
        ("JobArrayTaskLimit", False),
        ("JobHeldUser", False),
        ("PartitionDown", False),
        ("ReqNodeNotAvail, UnavailableNodes:node4", False),
        ("", False),
    ],
)
def test_reasons_that_last_and_reasons_that_pass(reason: str, never: bool) -> None:
    assert never_starts(reason) is never


def test_cancel_takes_jobs_that_are_over_already_and_refuses_to_pretend() -> None:
    cancel(["999"], FakeSlurm(scancel=Answer(0, "", "")))
    over = "scancel: error: Kill job error on job id 2: Job/step already completing or completed\n"
    cancel(
        ["2", "999"], FakeSlurm(scancel=Answer(1, "", over + "scancel: error: Kill job error on job id 999: Invalid job id specified\n"))
    )
    down = "scancel: error: Kill job error on job id 1: Unable to contact slurm controller (connect failure)\n"
    for answer in (Answer(8, "", down), Answer(1, "", over + down), Answer(None, "", "scancel cannot be started here: No such file")):
        with pytest.raises(LaunchError, match="scancel"):
            cancel(["1", "2"], FakeSlurm(scancel=answer))


def test_cancel_names_array_tasks_one_by_one() -> None:
    slurm = FakeSlurm(scancel=Answer(0, "", ""))
    cancel_pending(["4_0", "4_2"], slurm)
    cancel(["4_0", "4_2"], slurm)
    assert slurm.asked == [("scancel", "--state=PENDING", "4_0", "4_2"), ("scancel", "4_0", "4_2")]


def test_jobs_are_found_by_name_unless_nobody_answers() -> None:
    slurm = FakeSlurm(squeue=Answer(0, f"{'17':48}{'train-x-1':256}\n", ""))
    assert find_by_name(["train-x-1", "plan-x-1"], slurm) == {"train-x-1": "17"}
    assert find_by_name(["train-x-1"], FakeSlurm(squeue=Answer(1, "", DOWN))) is None
    assert find_by_name([], FakeSlurm()) == {}


def test_a_command_is_bounded_and_its_absence_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "squeue"
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setattr(queue, "ANSWER_SECONDS", 0.3)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run_command(("squeue",)).errors == "squeue did not answer in 0 s"
    gone = run_command((str(tmp_path / "nothing"),))
    assert gone.code is None
    assert "No such file" in gone.why


def test_a_users_own_settings_do_not_change_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def fake(command: Sequence[str], **options: object) -> "subprocess.CompletedProcess[str]":
        environment = options["env"]
        assert isinstance(environment, dict)
        seen.append(environment)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake)
    kept = {"SLURM_CONF": "/a/slurm.conf", "SLURM_CLUSTERS": "one"}
    for name in ("SQUEUE_PARTITION", "SLURM_TIME_FORMAT", "SCANCEL_INTERACTIVE", *kept):
        monkeypatch.setenv(name, kept.get(name, "x"))
    run_command(("squeue",))
    assert {name: value for name, value in seen[0].items() if name.startswith(("SQUEUE", "SLURM", "SCANCEL"))} == kept
