"""What searches found <-> a file each, named by what was asked: what was searched for before is not searched for again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa_hpc.errors import PlanError
from alpa_hpc.plan.codec import plan_from_json, plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.report.kept import keep, path_of, read_kept

FORMAT = "alpa_hpc known plan"


@dataclass(frozen=True, slots=True, eq=False)
class FoundPlan:
    """A plan, and planning.json but for what differs from run to run; `searched_by` = folder of the run that searched."""

    plan: ParallelPlan
    planning: dict[str, Any]
    searched_by: str


def read_known(folder: Path, key: str) -> FoundPlan | None:
    """What the search of a key found, if that is known."""
    document = read_kept(folder, key)
    if document is None or document.get("format") != FORMAT:
        return None
    try:
        return FoundPlan(plan_from_json(document["plan"], str(path_of(folder, key))), document["planning"], document["searched_by"])
    except PlanError:
        return None


def write_known(folder: Path, key: str, found: FoundPlan) -> None:
    """Keep what a search found, if the folder can be written."""
    keep(folder, key, {"format": FORMAT, "plan": plan_to_json(found.plan), "planning": found.planning, "searched_by": found.searched_by})
