"""One command with `-m` -> RUNS/.sweeps/ID: how many runs it has, and why some of them came to no folder of their own.

Each run of a sweep notes the sweep's id in its own marker (`paths.Origin`), so that runs that jobs carry on are found as well.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alpa_hpc.errors import AlpaError, InfeasibleError, LaunchError
from alpa_hpc.launch.files import fields_of, read_json, write_json

SWEEPS = ".sweeps"
MAX_SHOWN = 6


@dataclass(frozen=True, slots=True)
class SweepPlace:
    """Which run of a sweep this is: `folder` is RUNS/.sweeps/ID, absolute; runs are numbered from 0 to `total` - 1."""

    folder: Path
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A run that ended with an error of ours in the command itself. `missing_bytes`: of a device's memory, where that is the error."""

    overrides: tuple[str, ...]
    reason: str
    missing_bytes: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep's folder tells; `refused` by number."""

    id: str
    total: int
    refused: Mapping[int, Refused]


@contextmanager
def as_part_of(place: SweepPlace, overrides: Sequence[str]) -> Generator[None]:
    """Note how many runs the sweep has, and with which error the block ends, if it ends with one of ours."""
    write_json(place.folder / "sweep.json", {"total": place.total})
    try:
        yield
    except AlpaError as error:
        missing = error.missing_bytes if isinstance(error, InfeasibleError) else 0.0
        note = {"overrides": list(overrides), "reason": str(error), "missing_bytes": missing}
        write_json(place.folder / f"refused-{place.number:04d}.json", note)
        raise


def find_sweep(name: str, runs: Path) -> Sweep:
    """The sweep whose id starts with `name`; an empty one means the newest. LaunchError where it is none, or not one."""
    folder = runs.expanduser().absolute() / SWEEPS
    known = sorted((path.parent for path in folder.glob("*/sweep.json")), reverse=True)
    found = [path for path in known if path.name.startswith(name)]
    if not found or (name and len(found) > 1):
        shown = ", ".join(path.name for path in (found or known)[:MAX_SHOWN]) or "none"
        what = f"is the start of {len(found)} sweeps" if found else "is no sweep"
        raise LaunchError(f"{name!r} {what} in {runs.absolute()}; the newest are: {shown}. A command with -m starts one and tells its id.")
    return _read(found[0])


def _read(folder: Path) -> Sweep:
    refused: dict[int, Refused] = {}
    for path in folder.glob("refused-*.json"):
        note = read_json(path)
        with fields_of(path):
            overrides, missing = tuple(map(str, note["overrides"])), float(note["missing_bytes"])
            refused[int(path.stem.removeprefix("refused-"))] = Refused(overrides, str(note["reason"]), missing)
    path = folder / "sweep.json"
    sweep = read_json(path)
    with fields_of(path):
        return Sweep(folder.name, int(sweep["total"]), refused)
