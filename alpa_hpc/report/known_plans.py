"""What searches found <-> a file each, named by what was asked: what was searched for before is not searched for again.

A cache beside the solved runs of layers: a file that is torn, changed, or of another version of the program is as good as none.
"""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from alpa_hpc.errors import PlanError, StoreError
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.plan.codec import plan_from_json, plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.profiling.cache import keeping
from alpa_hpc.sharding.solved import source_key

FORMAT = "alpa_hpc known plan"
MOST_KNOWN = 256  # files; those written longest ago go first


@dataclass(frozen=True, slots=True, eq=False)
class FoundPlan:
    """A plan, and planning.json but for what differs from run to run; `searched_by` = folder of the run that searched."""

    plan: ParallelPlan
    planning: dict[str, Any]
    searched_by: str


def search_key(asked: Sequence[object]) -> str:
    """The key (32 hex digits) of a search that depends on `asked` (values with telling reprs), under the present program."""
    digest = hashlib.sha256(source_key(("",)))
    for part in (jax.__version__, platform.python_version(), *asked):
        digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()[:32]


def read_known(folder: Path, key: str) -> FoundPlan | None:
    """What the search of a key found, if that is known."""
    path = folder / f"{key}.json"
    try:
        document = read_json(path)
        if not isinstance(document, dict) or document.get("sha256") != _digest(document):
            return None
        return FoundPlan(plan_from_json(document["plan"], str(path)), document["planning"], document["searched_by"])
    except (StoreError, PlanError):
        return None


def write_known(folder: Path, key: str, found: FoundPlan) -> None:
    """Keep what a search found, if the folder can be written; the oldest of too many files go."""
    document = {"format": FORMAT, "plan": plan_to_json(found.plan), "planning": found.planning, "searched_by": found.searched_by}
    with keeping(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{key}.json", document | {"sha256": _digest(document)})
        by_age = sorted(folder.glob("*.json"), key=_written, reverse=True)
        for path in by_age[MOST_KNOWN:]:
            path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another run has just dropped it
        return 0.0


def _digest(document: dict[str, Any]) -> str:
    content = {name: document.get(name) for name in ("format", "plan", "planning", "searched_by")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
