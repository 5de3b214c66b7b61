"""An exception on a rank -> `failures/JOB/NODE-PID.json`, and the first of them in time -> its job's own account of the failure.

When one rank fails, its peers soon fail too, with tracebacks about closed connections; which one came first is what a person must see.
A rank that was killed says nothing, and the first to speak is a peer of it: then what mpirun saw is told before what the peer did.
"""

import os
import re
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from alpa_hpc.errors import AlpaError, LaunchError, StoreError
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.launch.mpirun import RankKilledError
from alpa_hpc.launch.status import this_node

_LOST = re.compile(r"(reset|closed) by peer|Broken pipe", re.IGNORECASE)  # what a rank sees of the end of another one


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What a rank says about its end; `time` in seconds since 1970, by its node's clock; `kind`: the name of the exception's class."""

    time: float
    rank: str
    node: str
    kind: str
    message: str
    is_explained: bool
    traceback: str


@contextmanager
def recording_failure(folder: Path) -> Generator[None]:
    """Put an exception that leaves the block on record in `folder` (RunPaths.failures); it goes on its way."""
    try:
        yield
    except BaseException as error:
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "?")  # for people; what a rank does never depends on it
        text = "".join(traceback.format_exception(error))
        failure = RankFailure(time.time(), rank, this_node(), type(error).__name__, str(error).strip(), isinstance(error, AlpaError), text)
        write_json(folder / f"{failure.node}-{os.getpid()}.json", asdict(failure))
        raise


@contextmanager
def explained_by_ranks(folder: Path) -> Generator[None]:
    """Turn "mpirun ended with exit code 1" into the first failure that a rank put on record in `folder`, where one did."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    try:
        yield
    except LaunchError as error:
        first = first_failure(folder)
        if first is None:
            raise
        raise LaunchError(_told_with(error, first)) from error


def first_failure(folder: Path) -> RankFailure | None:
    """The earliest failure on record in `folder`, or None; one that tells of a lost connection only where none tells more."""
    return min((_read(path) for path in folder.glob("*.json")), key=lambda failure: (_is_of_a_peer(failure), failure.time), default=None)


def _is_of_a_peer(failure: RankFailure) -> bool:
    return not failure.is_explained and _LOST.search(failure.message) is not None


def _read(path: Path) -> RankFailure:
    fields = read_json(path)
    try:
        return RankFailure(**fields)
    except TypeError as error:
        raise StoreError(f"{path} is not a rank's account of this version ({error})") from error


def _told_with(error: LaunchError, first: RankFailure) -> str:
    """The first failure; behind the word of mpirun where that saw a rank killed, and the failure is none that speaks for itself."""
    if first.is_explained or not isinstance(error, RankKilledError):
        return _told(first, _SILENT if _is_of_a_peer(first) else "")
    return f"{error}. Of its peers the first to fail: {_told(first)}"


_SILENT = "; so another rank ended before it, without a word: killed, perhaps out of host memory"


def _told(failure: RankFailure, more: str = "") -> str:
    text = failure.message if failure.is_explained else f"{_summary(failure)}{more}\n{failure.traceback.strip()}"
    return f"rank {failure.rank} on {failure.node} failed: {text}"


def _summary(failure: RankFailure) -> str:
    """`ValueError: odd`, the first line of what went wrong: views of a run have room for a line."""
    first_line = (failure.message.splitlines() or [""])[0]
    return f"{failure.kind}: {first_line}".removesuffix(": ")
