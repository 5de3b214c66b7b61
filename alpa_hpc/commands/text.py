"""Rows, times and figures -> text for a person: aligned columns, coloured on a terminal."""

import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from alpa_hpc.launch.evidence import JobPhase
from alpa_hpc.launch.views import RunPhase

_STYLES: Mapping[str, str] = {
    JobPhase.DONE.value: "green",
    JobPhase.RUNNING.value: "cyan",
    JobPhase.FAILED.value: "red",
    JobPhase.UNKNOWN.value: "yellow",
    JobPhase.CANCELLED.value: "magenta",
    RunPhase.PLANNING.value: "cyan",
    RunPhase.TRAINING.value: "cyan",
    RunPhase.CALIBRATING.value: "cyan",
}


def write_table(headers: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """Write rows as columns. Words that name a phase are coloured on a terminal, where long texts wrap; elsewhere a row is a line."""
    if stream.isatty():
        _write_for_terminal(headers, rows, stream)
        return
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    for row in (headers, *rows):
        stream.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def _write_for_terminal(headers: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    from rich.console import Console  # late: it takes as long to import as the rest together
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, ""), overflow="fold") for cell in row))
    Console(file=stream).print(table)


def duration(seconds: float) -> str:
    """`42 s`, `3 min`, `5 h 20 min`, `2 d 4 h`."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def ago(when: float | None) -> str:
    """How long ago a time (seconds since 1970) was; empty for None."""
    return "" if when is None else f"{duration(time.time() - when)} ago"
