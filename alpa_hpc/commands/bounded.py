"""A command line and a bound -> how it ended and what it printed; nothing that it started is left when time is up."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STOP_SECONDS = 6.0  # mpirun gives its ranks 5 s between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class Ended:
    """The command came to its end; `output` is all it printed."""

    code: int
    output: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The command was stopped after its time; `output` is what it had printed by then."""

    seconds: float
    output: str


def run_bounded(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Ended | TimedOut:
    """Run a command in a session of its own; after `seconds` it is asked to stop, and then made to."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return Ended(process.returncode, output)
    except subprocess.TimeoutExpired:
        return TimedOut(seconds, _stop(process))
    finally:
        _signal_session(process, signal.SIGKILL)


def _stop(process: "subprocess.Popen[str]") -> str:
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal_session(process, number)
        try:
            return process.communicate(timeout=STOP_SECONDS)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""


def _signal_session(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # all of it has ended
