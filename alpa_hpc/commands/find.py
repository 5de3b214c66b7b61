"""(what a person calls a run, the folder of runs) -> RunPaths: a run folder, an id, the start of an id, or nothing for the newest run."""

import argparse
from pathlib import Path

from alpa_hpc.errors import AlpaError, LaunchError
from alpa_hpc.launch.paths import RunPaths, open_run

MAX_SHOWN = 6


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments RUN and --runs, by which all verbs name a run."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder, or a run's id or the start of it (default: the newest run)")
    add_runs_argument(parser)


def add_runs_argument(parser: argparse.ArgumentParser) -> None:
    """The argument --runs."""
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="the folder of the runs (default: runs)")


def find_run(name: str | None, runs: Path) -> RunPaths:
    """The run that is meant; LaunchError where it is none, not one, or another user's, StoreError where it is of another version."""
    if name is None:
        newest = all_roots(runs)[:1]
        if not newest:
            raise LaunchError(f"there are no runs in {runs.absolute()}: name a run folder, or the folder of runs by --runs")
        return open_run(newest[0])
    folder = Path(name).expanduser()
    if (folder / "run.json").is_file():
        return open_run(folder)
    return open_run(_by_id(name, folder, runs))


def all_roots(runs: Path) -> tuple[Path, ...]:
    """The folders of all runs, the newest first."""
    roots = (marker.parent for marker in runs.expanduser().glob("*/*/run.json"))
    return tuple(sorted(roots, key=lambda root: root.name, reverse=True))


def _by_id(name: str, folder: Path, runs: Path) -> Path:
    """The one run whose id, or EXPERIMENT/id, begins with `name`, or whose jobs squeue shows under it."""
    found = [root for root in all_roots(runs) if _is_meant(name, root)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(f"{root.parent.name}/{root.name}" for root in found[:MAX_SHOWN])
        more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        raise LaunchError(f"{name!r} is the start of {len(found)} runs in {runs.absolute()}: {shown}{more}. Say more of the id.")
    raise _unknown(name, folder, runs)


def _is_meant(name: str, root: Path) -> bool:
    starts = root.name.startswith(name) or f"{root.parent.name}/{root.name}".startswith(name)
    return starts or root.name.rpartition("-")[2] == name.rpartition("-")[2]


def _unknown(name: str, folder: Path, runs: Path) -> AlpaError:
    if folder.is_dir():
        return LaunchError(f"{folder.absolute()} is not a run folder: it has no run.json. One is called RUNS/EXPERIMENT/ID.")
    return LaunchError(f"no run is called {name!r}: there is no such folder, and no such id in {runs.absolute()} (`list` shows them)")
