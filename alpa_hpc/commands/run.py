"""The command line without a verb, `+experiment=NAME [overrides]`, -> a run. Hydra reads it: --help, --cfg job, -m, --config-dir."""

import difflib
import os
import re
import shlex
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import NoReturn

from alpa_hpc.commands import VERBS
from alpa_hpc.commands.verb import STOPPED
from alpa_hpc.config import Composed, compose_command_line, current_origin, current_overrides, current_place, outranked, to_config
from alpa_hpc.errors import AlpaError
from alpa_hpc.launch.sweeps import SweepPlace, as_part_of

CLOSED = 141  # the exit status of a shell's SIGPIPE: 128 + SIGPIPE


def run_command_line() -> int:
    """Run what the arguments say; 1 after any AlpaError. In a sweep the other runs go on after one has failed, and the end names its table.

    Ctrl-C, SIGTERM and SIGHUP stop the processes that were started here, and then this one, with status 130; jobs in a queue go on.
    """
    _refuse_odd_verb(sys.argv[1:])
    failed: list[AlpaError] = []
    places: list[SweepPlace] = []
    _stop_jobs_on_signals()

    def task(composed: Composed) -> None:
        place = current_place()
        places.extend([place] if place else [])
        with _reported(failed), as_part_of(place, current_overrides()) if place else nullcontext():
            sys.stderr.writelines(f"warning: {words}\n" for words in outranked(composed))
            config = to_config(composed)
            from alpa_hpc.experiment import run  # late: it needs jax, which --help, --cfg and a wrong number do not

            run(config, current_origin())

    with _reported(failed):
        compose_command_line(task)
    if places:
        sys.stderr.write(f"all {places[0].total} runs in one table: {table_command(places[0])}\n")
    return 1 if failed else 0


def _refuse_odd_verb(words: Sequence[str]) -> None:
    """End with status 1 where the first word is neither a verb nor KEY=VALUE nor a flag: Hydra would miss an EQUAL at EOF."""
    if words and re.fullmatch(r"[\w-]*\w", words[0]) and not words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], VERBS, 1)
        hint = f"did you mean {near[0]}? Expected" if near else "expected"
        sys.stderr.write(f"error: found {words[0]!r}, {hint} one of {', '.join(VERBS)}, or +experiment=NAME and other KEY=VALUE (--help)\n")
        sys.exit(1)


def table_command(place: SweepPlace) -> str:
    """What to type for the table of a sweep."""
    runs = place.folder.parent.parent
    where = "" if runs == Path("runs").absolute() else f" --runs {shlex.quote(str(runs))}"
    return f"python -m alpa_hpc list --sweep {place.folder.name}{where}"


@contextmanager
def _reported(failed: list[AlpaError]) -> Generator[None]:
    try:
        yield
    except AlpaError as error:
        if _wants_traceback():
            raise
        sys.stderr.write(f"error: {error}\n")
        failed.append(error)
    except BrokenPipeError:  # whoever read the output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python would fail once more when it flushes
        sys.exit(CLOSED)
    except KeyboardInterrupt as stop:
        if _wants_traceback():
            raise
        sys.stderr.write(f"error: stopped by {str(stop) or 'Ctrl-C'}\n")
        sys.exit(STOPPED)


def _wants_traceback() -> bool:
    return "1" in map(os.environ.get, ("ALPA_HPC_TRACEBACK", "HYDRA_FULL_ERROR"))


def _stop_jobs_on_signals() -> None:
    """Have the signals that would end this process at once do what Ctrl-C does: the `finally` blocks on the way stop what was started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and means it
            signal.signal(number, _raise_stopped)


def _raise_stopped(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
