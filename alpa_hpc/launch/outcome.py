"""What became of a job that somebody waited for: a closed union, since each end calls for another answer."""

from dataclasses import dataclass

from alpa_hpc.launch.status import JobState, JobStatus


@dataclass(frozen=True, slots=True)
class Ended:
    """It did what it should."""


@dataclass(frozen=True, slots=True)
class Died:
    """It began and failed, or was killed; `reason` says how, in one or more lines."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotStarted:
    """It never ran a line of ours: refused by the queue, left in it too long, or cancelled there."""

    reason: str


JobOutcome = Ended | Died | NotStarted


def outcome_of(status: JobStatus | None) -> JobOutcome:
    """The outcome of a job that is gone, by its own account."""
    if status is None:
        return NotStarted("ended before it could report anything")
    match status.state:
        case JobState.DONE:
            return Ended()
        case JobState.FAILED:
            return Died(f"failed on {status.node}: {account(status)}")
        case JobState.RUNNING:
            return Died(f"(process {status.pid} on {status.node}) ended without a report. Killed, or out of memory?")


def account(status: JobStatus) -> str:
    """Why a job failed: the message of an error that speaks for itself, the traceback of any other."""
    return status.message if status.is_explained else status.traceback.strip()
