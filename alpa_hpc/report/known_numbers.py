"""What a number of microbatches gives <-> a file each, named by what was asked: a number that was tried before is not searched again."""

import math
from pathlib import Path

from alpa_hpc.planner.microbatches import TriedNumber
from alpa_hpc.report.kept import keep, read_kept

FORMAT = "alpa_hpc tried number of microbatches"


def read_number(folder: Path, key: str) -> TriedNumber | None:
    """What the search of a key found, if that is known."""
    document = read_kept(folder, key)
    if document is None or document.get("format") != FORMAT:
        return None
    seconds, objective, missing = (
        math.inf if document[name] is None else float(document[name]) for name in ("seconds", "objective_seconds", "missing_bytes")
    )
    return TriedNumber(int(document["num_microbatches"]), seconds, objective, str(document["reason"]), missing)


def write_number(folder: Path, key: str, found: TriedNumber) -> None:
    """Keep what a search found, if it was made to its end: a plan, or the memory that is missing for one."""
    figures = {"seconds": found.seconds, "objective_seconds": found.objective_seconds, "missing_bytes": found.missing_bytes}
    if math.isinf(min(found.seconds, found.missing_bytes)):
        return  # given up beside a faster number, or without a word on why
    known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    keep(folder, key, {"format": FORMAT, "num_microbatches": found.num_microbatches, "reason": found.reason, **known})
