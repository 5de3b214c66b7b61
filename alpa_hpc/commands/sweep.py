"""Sweep + run folders -> one table: a row a run with its plan's simulated step, PFLOPS and memory, or why it has none; and a count."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from alpa_hpc.commands.find import all_roots
from alpa_hpc.commands.text import write_table
from alpa_hpc.errors import AlpaError
from alpa_hpc.launch.files import fields_of, read_json
from alpa_hpc.launch.paths import Origin, open_run, run_origin
from alpa_hpc.launch.queue import QueueState
from alpa_hpc.launch.sweeps import Refused, Sweep
from alpa_hpc.launch.views import RunPhase, RunView, view_run
from alpa_hpc.report.words import chosen_plan, seconds_words
from alpa_hpc.units import bytes_words

HEADERS = ("experiment", "search", "state", "step", "PFLOPS", "memory", "stages", "microbatches", "trained", "id", "overrides", "reason")
NO_MEMORY, NO_PLAN, REFUSED, RUNNING = "out of memory", "infeasible", "refused", "running"

Ask = Callable[[Sequence[str]], Mapping[str, QueueState]]
Figures = tuple[str, str, str, str, str, str]  # step, PFLOPS, memory, stages, microbatches, trained
NO_FIGURES: Figures = ("", "", "", "", "", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a sweep in words; figures are empty where there are none."""

    experiment: str
    search: str
    state: str
    figures: Figures
    id: str
    overrides: tuple[str, ...]
    reason: str

    def cells(self, common: Sequence[str]) -> tuple[str, ...]:
        """The row in the order of HEADERS, without the overrides that all rows have."""
        own = " ".join(word for word in self.overrides if word not in common and not word.startswith(("search=", "+experiment=", "runs=")))
        return (self.experiment, self.search, self.state, *self.figures, self.id, own, self.reason)


def write_sweep(sweep: Sweep, runs: Path, ask: Ask, stream: TextIO) -> None:
    """Write the table of a sweep, in the order of its runs, and how many of them came to what."""
    rows = sweep_rows(sweep, runs, ask)
    ordered = [rows[number] for number in sorted(rows)]
    common = [word for word in ordered[0].overrides if all(word in row.overrides for row in ordered)] if ordered else []
    stream.write(f"sweep {sweep.id}{' with ' + ' '.join(common) if common else ''}\n\n")
    write_table(HEADERS, [row.cells(common) for row in ordered], stream)
    stream.write(f"\n{counts_words(sweep.total, [row.state for row in ordered])}\n")


def sweep_rows(sweep: Sweep, runs: Path, ask: Ask) -> dict[int, Row]:
    """The rows by their numbers in the sweep; those that were not begun have none."""
    rows = {number: _refused_row(refused) for number, refused in sweep.refused.items()}
    for root in all_roots(runs):
        origin = _origin(root)
        if origin is not None and origin.sweep == sweep.id:
            rows[origin.number] = _run_row(root, origin.overrides, ask)
    return rows


def counts_words(total: int, states: Sequence[str]) -> str:
    """`8 runs: 5 done, 1 out of memory, 1 failed, 1 still running`."""
    counts = Counter(states)
    words = [f"{counts.pop(state)} {state}" for state in (RunPhase.DONE.value, NO_MEMORY) if state in counts]
    still = counts.pop(RUNNING, 0)
    words += [f"{count} {state}" for state, count in sorted(counts.items())]
    words += [f"{still} still running"] if still else []
    words += [f"{total - len(states)} not begun"] if total > len(states) else []
    return f"{total} runs: {', '.join(words)}"


def _origin(root: Path) -> Origin | None:
    """How a run came about; None where its marker cannot be read: then it is a part of no sweep."""
    try:
        return run_origin(open_run(root))
    except AlpaError:
        return None


def _refused_row(refused: Refused) -> Row:
    words = {word.partition("=")[0]: word.partition("=")[2] for word in refused.overrides}
    state, reason = (NO_MEMORY, _missing(refused.missing_bytes)) if refused.missing_bytes else (REFUSED, refused.reason.partition("\n")[0])
    return Row(words.get("+experiment", words.get("name", "")), words.get("search", ""), state, NO_FIGURES, "", refused.overrides, reason)


def _run_row(root: Path, overrides: tuple[str, ...], ask: Ask) -> Row:
    try:
        view = view_run(open_run(root), ask)
        result: dict[str, Any] = read_json(view.paths.result) if view.paths.result.exists() else {}
        with fields_of(view.paths.result):
            state, reason = _state(view, result)
            figures = _figures(result) if "planning" in result else NO_FIGURES
    except AlpaError as error:
        return Row(root.parent.name, "", RunPhase.UNKNOWN.value, NO_FIGURES, root.name, overrides, str(error).partition("\n")[0])
    return Row(root.parent.name, view.settings.search, state, figures, root.name, overrides, reason)


def _state(view: RunView, result: Mapping[str, Any]) -> tuple[str, str]:
    """In a word, and why."""
    if "infeasible" in result:
        missing = result["infeasible"]["missing_bytes"]
        return (NO_MEMORY, _missing(missing)) if missing else (NO_PLAN, result["infeasible"]["reason"].partition("\n")[0])
    match view.phase:
        case RunPhase.PLANNING | RunPhase.TRAINING | RunPhase.CALIBRATING:
            return RUNNING, view.phase.value
        case RunPhase.DONE:
            return view.phase.value, ""
        case RunPhase.FAILED | RunPhase.CANCELLED | RunPhase.UNKNOWN:
            return view.phase.value, view.reason


def _missing(num_bytes: float) -> str:
    return f"{bytes_words(num_bytes)} a device are missing at least"


def _figures(result: Mapping[str, Any]) -> Figures:
    planning = result["planning"]
    memory = f"{bytes_words(max(planning['stage_bytes']))} of {bytes_words(planning['memory_bytes'])}"
    step, pflops = seconds_words(planning["predicted_step_seconds"]), f"{planning['predicted_pflops']:.4g}"
    trained = seconds_words(result["training"]["step_seconds"]) if "training" in result else ""
    stages = str(len(chosen_plan(planning)["stages"]))
    return step, pflops, memory, stages, str(planning["num_microbatches"]), trained
