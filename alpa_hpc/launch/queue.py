"""Slurm ids -> QueueState, and the way to cancel them: the one door to squeue, scontrol, sacct and scancel.

Asked in this order, each only for what the one before did not know: squeue (all ids at once), scontrol, sacct. "Slurm cannot be asked"
(no command, no controller, no answer in time) is UNKNOWN; only a controller that answered makes a job GONE.
"""

import functools
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.queue_words import (
    ACCOUNTING_FIELDS,
    JOB_FORMAT,
    NAME_FORMAT,
    QueuePhase,
    QueueState,
    never_starts,
    parse_names,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
)

__all__ = ["Answer", "QueuePhase", "QueueState", "ask_queue", "cancel", "cancel_pending", "find_by_name", "never_starts"]

ANSWER_SECONDS = 30.0  # a controller under load answers late; one that is down lets squeue (22.05) try for 9 s
MAX_IDS = 500  # on one command line
MAX_SCONTROL = 8  # which is asked for one id at a time

# What a user's settings would change in the answers: filters, formats, questions before a cancellation.
_SETTINGS = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SLURM_TIME_FORMAT")
_NOT_KNOWN = re.compile(r"Invalid job id specified|Job \S+ not found")
_ALREADY_OVER = re.compile(r"Invalid job id specified|already completing or completed|Job/step already")
_ID = re.compile(r"\d+(_\d+)?")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command of Slurm said; `code` is its exit status, or None where it did not run or did not end in time."""

    code: int | None
    output: str
    errors: str

    @property
    def why(self) -> str:
        """The command's own complaint, in one line; scontrol complains of a task to stdout."""
        said = [line.strip() for line in (self.output + self.errors).splitlines() if line.strip()]
        return said[-1] if said else f"ended with status {self.code}"

    @property
    def is_not_known(self) -> bool:
        """Whether the controller answered that it has no such job."""
        return self.code not in (0, None) and _NOT_KNOWN.search(self.output + self.errors) is not None


Command = Callable[[Sequence[str]], Answer]


def run_command(command: Sequence[str]) -> Answer:
    """Run a command of Slurm, for at most ANSWER_SECONDS."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    try:
        done = subprocess.run(
            command,
            env=environment | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"{command[0]} did not answer in {ANSWER_SECONDS:.0f} s")
    except OSError as error:
        return Answer(None, "", f"{command[0]} cannot be started here: {error.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)


def ask_queue(ids: Sequence[str], run: Command = run_command) -> Mapping[str, QueueState]:
    """Slurm's account of each id ("123", or "123_4" for element 4 of an array), for every id that is asked for."""
    _check_ids(ids)
    states: dict[str, QueueState] = {}
    for first in range(0, len(ids), MAX_IDS):
        states |= _ask(ids[first : first + MAX_IDS], run)
    return states


def find_by_name(names: Sequence[str], run: Command = run_command) -> Mapping[str, str] | None:
    """The numbers of this user's jobs by their names, as far as the controller knows them; None where it cannot be asked."""
    if not names:
        return {}
    answer = run(("squeue", "--noheader", "--me", "--states=all", f"--name={','.join(names)}", f"--Format={NAME_FORMAT}"))
    return parse_names(answer.output) if answer.code == 0 else None


def cancel(ids: Sequence[str], run: Command = run_command) -> None:
    """Have Slurm end jobs, pending or running; what is over already stays so. LaunchError if Slurm cannot be asked or refuses."""
    _cancel(ids, (), run)


def cancel_pending(ids: Sequence[str], run: Command = run_command) -> None:
    """The same for those of `ids` that have not started: first, so that no job starts in the place of one that ends."""
    _cancel(ids, ("--state=PENDING",), run)


def _cancel(ids: Sequence[str], options: Sequence[str], run: Command) -> None:
    _check_ids(ids)
    for first in range(0, len(ids), MAX_IDS):
        answer = run(("scancel", *options, *ids[first : first + MAX_IDS]))
        refused = [line for line in answer.errors.splitlines() if line.strip() and not _ALREADY_OVER.search(line)]
        if answer.code is None or (answer.code != 0 and refused):
            raise LaunchError(f"scancel did not do its work: {answer.why}. Is the Slurm controller up (`scontrol ping`)? Try again then.")


def _check_ids(ids: Sequence[str]) -> None:
    foreign = [one for one in ids if _ID.fullmatch(one) is None]
    assert not foreign, f"not ids of jobs: {foreign}"


def _ask(ids: Sequence[str], run: Command) -> dict[str, QueueState]:
    answer = run(("squeue", "--noheader", "--array", "--all", "--states=all", f"--jobs={','.join(ids)}", f"--Format={JOB_FORMAT}"))
    if answer.code != 0 and not answer.is_not_known:
        return dict.fromkeys(ids, QueueState(QueuePhase.UNKNOWN, answer.why))
    states = _picked(parse_squeue(answer.output), ids)
    states |= _ask_scontrol(_missing(ids, states), run)
    states |= _ask_accounting(_missing(ids, states), run)
    return states | dict.fromkeys(_missing(ids, states), QueueState(QueuePhase.GONE))


def _ask_scontrol(ids: Sequence[str], run: Command) -> dict[str, QueueState]:
    states: dict[str, QueueState] = {}
    for job_id in ids[:MAX_SCONTROL]:  # squeue reads the same memory of the controller, so of many ids it rarely knows one more
        answer = run(("scontrol", "--all", "--oneliner", "show", "job", job_id))
        if answer.code == 0:
            states |= _picked(parse_scontrol(answer.output), (job_id,))
        elif not answer.is_not_known:
            states[job_id] = QueueState(QueuePhase.UNKNOWN, answer.why)
    return states


def _ask_accounting(ids: Sequence[str], run: Command) -> dict[str, QueueState]:
    """What the accounting database knows of jobs that the controller has forgotten; where there is none, the log of ended jobs."""
    if not ids:
        return {}
    ask = functools.partial(_sacct, run=run)
    answer = ask(("--allocations",), ids)
    if answer.code == 0:
        return _picked(parse_sacct(answer.output), ids)
    # That log has no array tasks: asked for 4_1 it tells of the array's last one.
    single = [job_id for job_id in ids if "_" not in job_id]
    return _picked(parse_sacct(ask(("--completion",), single).output), single) if single else {}


def _sacct(options: Sequence[str], ids: Sequence[str], run: Command) -> Answer:
    return run(("sacct", *options, "--noheader", "--parsable2", f"--jobs={','.join(ids)}", f"--format={ACCOUNTING_FIELDS}"))


def _picked(states: Mapping[str, QueueState], ids: Sequence[str]) -> dict[str, QueueState]:
    return {job_id: states[job_id] for job_id in ids if job_id in states}


def _missing(ids: Sequence[str], states: Mapping[str, QueueState]) -> list[str]:
    return [job_id for job_id in ids if job_id not in states]
