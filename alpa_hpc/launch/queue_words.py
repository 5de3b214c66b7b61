"""What squeue, scontrol and sacct print -> QueueState: pure parsers, and what the words mean for somebody who waits.

A state word stands in one table (`_PHASES`); a word that is not there is UNKNOWN, never an end.
"""

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime


class QueuePhase(enum.Enum):
    """Where Slurm says that a job is."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    NODE_FAILED = "node failed"
    PREEMPTED = "preempted"
    GONE = "gone"
    """Slurm was asked, and knows the job no longer: it is over, and how it ended is not on record there"""
    UNKNOWN = "unknown"
    """Slurm could not be asked, or said nothing that we know: neither alive nor over"""


@dataclass(frozen=True, slots=True)
class QueueState:
    """Slurm's account of one job or array task.

    reason:    Slurm's word for why it waits or failed; for UNKNOWN, why it could not be asked
    exit_code: of the batch script, 0 where there is none
    signal:    that ended the batch script; Slurm also counts causes of its own here (53: no log file, 125: out of memory)
    nodes:     as Slurm writes a list of them, such as node[1-2]
    ended:     seconds since 1970; None where Slurm names no end
    name:      of the job; empty where it was not told
    """

    phase: QueuePhase
    reason: str = ""
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""
    ended: float | None = None
    name: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job can do nothing any more."""
        return self.phase not in (QueuePhase.PENDING, QueuePhase.RUNNING, QueuePhase.UNKNOWN)

    def of(self, job_name: str) -> "QueueState":
        """This word for a job of that name: GONE where a controller that lost its state gave the number to another job."""
        return self if self.name in ("", job_name) else QueueState(QueuePhase.GONE, "its number is another job's now")

    def describe(self) -> str:
        """What a person should know, in one line without a full stop."""
        return _describe(self)


JOB_FIELDS = ("JobArrayID", "State", "Reason", "exit_code", "EndTime", "NodeList", "Name")  # of `squeue --Format`
_WIDTHS = (48, 32, 160, 16, 32, 256, 256)  # fixed: older versions of squeue know no separators here
JOB_FORMAT = ",".join(f"{name}:{width}" for name, width in zip(JOB_FIELDS, _WIDTHS, strict=True))
NAME_FORMAT = "JobArrayID:48,Name:256"
ACCOUNTING_FIELDS = "JobID,State,ExitCode,End,NodeList"  # of `sacct -o`

LOG_FOLDER_UNSEEN = 53  # a "signal" by which Slurm says that the node could not open the log file
OUT_OF_MEMORY_SIGNAL = 125  # the same for a job that its memory limit ended
KILL_SIGNAL = 9
KILLED_EXIT_CODE = 128 + KILL_SIGNAL

_PHASES: Mapping[str, QueuePhase] = {
    "PENDING": QueuePhase.PENDING,
    "CONFIGURING": QueuePhase.PENDING,
    "REQUEUED": QueuePhase.PENDING,
    "REQUEUE_FED": QueuePhase.PENDING,
    "REQUEUE_HOLD": QueuePhase.PENDING,
    "RESV_DEL_HOLD": QueuePhase.PENDING,
    "SPECIAL_EXIT": QueuePhase.PENDING,
    "RUNNING": QueuePhase.RUNNING,
    "COMPLETING": QueuePhase.RUNNING,
    "RESIZING": QueuePhase.RUNNING,
    "SIGNALING": QueuePhase.RUNNING,
    "STAGE_OUT": QueuePhase.RUNNING,
    "STOPPED": QueuePhase.RUNNING,
    "SUSPENDED": QueuePhase.RUNNING,
    "COMPLETED": QueuePhase.COMPLETED,
    "FAILED": QueuePhase.FAILED,
    "CANCELLED": QueuePhase.CANCELLED,
    "TIMEOUT": QueuePhase.TIMED_OUT,
    "DEADLINE": QueuePhase.TIMED_OUT,
    "OUT_OF_MEMORY": QueuePhase.OUT_OF_MEMORY,
    "NODE_FAIL": QueuePhase.NODE_FAILED,
    "BOOT_FAIL": QueuePhase.NODE_FAILED,
    "PREEMPTED": QueuePhase.PREEMPTED,
}

_NEVER = frozenset(
    (
        "AccountNotAllowed",
        "BadConstraints",
        "DeadLine",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "JobHoldMaxRequeue",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "ReservationDeleted",
    )
)
# The job itself is larger than an account or a QOS allows for one job; limits on all of a user's jobs (Grp, PerUser, MaxJobs) pass.
_NEVER_BY_LIMIT = re.compile(r"(Assoc|QOS)Max\w*Per(Job|Node)(Limit)?|QOSMin\w+")


def never_starts(reason: str) -> bool:
    """Whether a job that is pending for this reason stays so for ever; false for a job held by a person, who can let it go."""
    word = reason.partition(",")[0].strip()
    return word in _NEVER or _NEVER_BY_LIMIT.fullmatch(word) is not None


def parse_squeue(text: str) -> dict[str, QueueState]:
    """States by id from `squeue --noheader --array --Format=JOB_FORMAT`."""
    rows = (_columns(line) for line in text.splitlines() if line.strip())
    return {row["JobArrayID"]: _named_state(row) for row in rows}


def _named_state(row: Mapping[str, str]) -> QueueState:
    state = _state(row["State"], row["Reason"], row["exit_code"], row["EndTime"], row["NodeList"])
    return replace(state, name=row["Name"])


def parse_names(text: str) -> dict[str, str]:
    """Job numbers by job name from `squeue --noheader --Format=NAME_FORMAT`: of an array, its own; of several with one name, the last."""
    rows = sorted((int(line[:48].partition("_")[0]), line[48:].strip()) for line in text.splitlines() if line.strip())
    return {name: str(number) for number, name in rows}


def parse_scontrol(text: str) -> dict[str, QueueState]:
    """States by id from `scontrol --oneliner show job ID`: a line for each task of an array, if it was asked for all."""
    return dict(_scontrol_states(text))


def parse_sacct(text: str) -> dict[str, QueueState]:
    """States by id from `sacct --noheader --parsable2 --format=ACCOUNTING_FIELDS`; only of jobs that have ended.

    Accounting that says RUNNING of a job that the controller does not know has missed its end.
    """
    rows = (line.split("|") for line in text.splitlines() if line.count("|") == ACCOUNTING_FIELDS.count(","))
    states = {job_id: _state(state, "", code, end, nodes) for job_id, state, code, end, nodes in rows}
    return {job_id: state for job_id, state in states.items() if state.is_over}


def _columns(line: str) -> dict[str, str]:
    ends = [sum(_WIDTHS[: index + 1]) for index in range(len(_WIDTHS))]
    values = (line[end - width : end].strip() for end, width in zip(ends, _WIDTHS, strict=True))
    return dict(zip(JOB_FIELDS, values, strict=True))


def _scontrol_states(text: str) -> Iterator[tuple[str, QueueState]]:
    for line in text.splitlines():
        fields = dict(re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", line))
        if "JobState" not in fields:
            continue
        job_id = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}" if "ArrayTaskId" in fields else fields["JobId"]
        state = _state(fields["JobState"], fields["Reason"], fields["ExitCode"], fields["EndTime"], fields.get("NodeList", ""))
        yield job_id, replace(state, name=fields.get("JobName", ""))


def _state(word: str, reason: str, code: str, end: str, nodes: str) -> QueueState:
    phase = _PHASES.get(word.partition(" ")[0].rstrip("+"), QueuePhase.UNKNOWN)  # sacct: "CANCELLED by 1000"
    said = "" if reason in ("None", "(null)") else reason
    if phase is QueuePhase.UNKNOWN:
        said = f"Slurm's state {word!r} is not one that alpa_hpc knows"
    exit_code, signal = _exit(code)
    state = QueueState(phase, said, exit_code, signal, "" if nodes in ("(null)", "None assigned") else nodes)
    return replace(state, ended=_seconds(end)) if state.is_over else state  # of a job that runs, Slurm names the end of its time


def _exit(code: str) -> tuple[int, int]:
    """Exit code and signal from "7:0" (scontrol, sacct) or from a wait status such as 1792 (squeue)."""
    if ":" in code:
        exit_code, _, signal = code.partition(":")
        return int(exit_code), int(signal)
    status = int(code) if code.isdecimal() else 0
    return status >> 8, status & 0x7F


def _seconds(when: str) -> float | None:
    """Seconds since 1970 of a time as Slurm's commands print it: in this machine's zone, without naming it."""
    try:
        return datetime.fromisoformat(when).timestamp()
    except ValueError:
        return None  # "Unknown", "N/A"


_SAID: Mapping[QueuePhase, str] = {
    QueuePhase.COMPLETED: "ended with exit code 0",
    QueuePhase.CANCELLED: "was cancelled",
    QueuePhase.TIMED_OUT: "reached its time limit and was stopped: give it more by launcher.slurm.time_minutes",
    QueuePhase.OUT_OF_MEMORY: "was killed, out of host memory: give it more by launcher.slurm.memory",
    QueuePhase.PREEMPTED: "was preempted by a job of higher priority",
    QueuePhase.GONE: "is over, and Slurm no longer knows how it ended",
}


def _describe(state: QueueState) -> str:
    match state.phase:
        case QueuePhase.PENDING:
            return f"waits in the queue{_bracketed(state.reason)}"
        case QueuePhase.RUNNING:
            return f"runs on {state.nodes}"
        case QueuePhase.NODE_FAILED:
            return f"lost a node that failed{_bracketed(state.nodes)}"
        case QueuePhase.UNKNOWN:
            return f"cannot be told{_bracketed(state.reason)}"
        case QueuePhase.FAILED:
            return _describe_failure(state)
        case _:
            return _SAID[state.phase]


def _describe_failure(state: QueueState) -> str:
    if state.signal == LOG_FOLDER_UNSEEN:
        return "could not start: its log folder is not visible from the node. Is the run folder on a file system that all nodes share?"
    if state.signal in (KILL_SIGNAL, OUT_OF_MEMORY_SIGNAL) or state.exit_code == KILLED_EXIT_CODE:
        return f"was killed, probably out of host memory (exit {state.exit_code}:{state.signal})"
    how = f"by signal {state.signal}" if state.signal else f"with exit code {state.exit_code}"
    word = "" if state.reason == "NonZeroExitCode" else state.reason  # which says nothing more
    return f"failed {how}{_bracketed(word)}"


def _bracketed(word: str) -> str:
    return f" ({word})" if word else ""
