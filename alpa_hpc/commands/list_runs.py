"""`python -m alpa_hpc list [--runs FOLDER] [--all | --sweep [ID]]` -> all runs, the newest first, or those of one command with -m.

Exit status: 0, or 2 where there is no such sweep.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from alpa_hpc.commands.find import add_runs_argument, all_roots
from alpa_hpc.commands.progress import read_progress
from alpa_hpc.commands.sweep import Ask, write_sweep
from alpa_hpc.commands.text import ago, write_table
from alpa_hpc.errors import AlpaError
from alpa_hpc.launch.paths import open_run, run_origin
from alpa_hpc.launch.queue import QueuePhase, QueueState, ask_queue
from alpa_hpc.launch.sweeps import find_sweep
from alpa_hpc.launch.views import RunPhase, view_run

HEADERS = ("id", "experiment", "state", "training", "begun", "overrides", "reason")
NUM_SHOWN = 20


def main(arguments: Sequence[str]) -> int:
    """Print the runs."""
    parser = argparse.ArgumentParser(prog="python -m alpa_hpc list", description=__doc__)
    add_runs_argument(parser)
    parser.add_argument("--all", action="store_true", help=f"all of them, not only the last {NUM_SHOWN}")
    parser.add_argument(
        "--sweep", nargs="?", const="", metavar="ID", help="the runs of one command with -m, with their plans (default: the newest)"
    )
    asked = parser.parse_args(arguments)
    ask = asking_until_refused(ask_queue)
    if asked.sweep is not None:
        write_sweep(find_sweep(asked.sweep, asked.runs), asked.runs, ask, sys.stdout)
        return 0
    roots = all_roots(asked.runs)
    shown = roots if asked.all else roots[:NUM_SHOWN]
    if not roots:
        sys.stdout.write(f"there are no runs in {asked.runs.absolute()}\n")
        return 0
    write_table(HEADERS, [_row(root, ask) for root in shown], sys.stdout)
    if len(roots) > len(shown):
        sys.stdout.write(f"and {len(roots) - len(shown)} older ones (--all)\n")
    return 0


def asking_until_refused(ask: Ask) -> Ask:
    """`ask`, but no more after a question that Slurm did not answer: each of them takes as long as a controller that is down."""
    refused: list[QueueState] = []

    def ask_once_more(ids: Sequence[str]) -> Mapping[str, QueueState]:
        if refused:
            return dict.fromkeys(ids, refused[0])
        states = ask(ids)
        refused.extend(state for state in states.values() if state.phase is QueuePhase.UNKNOWN)
        return states

    return ask_once_more


def _row(root: Path, ask: Ask) -> tuple[str, ...]:
    """A line for a run, also for one that cannot be read: it must not hide the others."""
    begun = ago((root / "run.json").stat().st_mtime)
    try:
        view = view_run(open_run(root), ask)
        overrides = " ".join(run_origin(view.paths).overrides)
    except AlpaError as error:
        return (root.name, root.parent.name, RunPhase.UNKNOWN.value, "", begun, "", str(error).partition("\n")[0])
    progress = read_progress(view.paths.metrics, view.settings.num_steps)
    return (root.name, root.parent.name, view.phase.value, progress.describe(), begun, overrides, view.reason)
