"""Figures of a training step -> one JSON line in `metrics.jsonl`, and a progress bar or plain lines for a person.

One rank writes; readers may follow the file while it grows, since each line is written at once and whole.
"""

import json
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MetricsWriter:
    """Appends to a metrics file; at most one writer a file."""

    stream: TextIO

    def write(self, step: int, figures: Figures) -> None:
        """Append {"step": step, ...figures} as one line and flush it."""
        self.stream.write(json.dumps({"step": step, **figures}) + "\n")
        self.stream.flush()


@contextmanager
def open_metrics(path: Path) -> Generator[MetricsWriter]:
    """A writer that appends to `path`, so that a restarted run keeps its history."""
    with path.open("a", encoding="utf-8") as stream:
        yield MetricsWriter(stream)


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """All whole lines of a metrics file, in order; a last line without its newline is still being written and left out."""
    if not path.exists():
        return ()
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return tuple(json.loads(line) for line in whole.splitlines())


class ProgressDisplay(Protocol):
    """What a person sees of a loop of known length."""

    def advance(self, step: int, figures: Figures) -> None:
        """Show that `step` (counted from 1) is done, with its figures."""
        ...


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """A moving bar, for a terminal."""

    bar: Progress
    task: int

    def advance(self, step: int, figures: Figures) -> None:
        """Move the bar to `step`."""
        self.bar.update(self.bar.task_ids[self.task], completed=step, figures=_as_text(figures))


@dataclass(slots=True)
class ProgressLines:
    """One line now and then, for logs and pipes: the first step, the last, and at most one in `seconds_between`."""

    stream: TextIO
    title: str
    total: int
    seconds_between: float
    _last: float = field(default=float("-inf"))

    def advance(self, step: int, figures: Figures) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        if step not in (1, self.total) and now - self._last < self.seconds_between:
            return
        self._last = now
        self.stream.write(f"{self.title} {step}/{self.total}  {_as_text(figures)}\n")
        self.stream.flush()


@contextmanager
def show_progress(title: str, total: int, stream: TextIO, seconds_between: float = 5.0) -> Generator[ProgressDisplay]:
    """A bar if `stream` is a terminal, plain lines otherwise."""
    if not stream.isatty():
        yield ProgressLines(stream, title, total, seconds_between)
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=Console(file=stream)) as bar:
        bar.add_task(title, total=total, figures="")
        yield ProgressBar(bar, task=0)


def _as_text(figures: Figures) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
