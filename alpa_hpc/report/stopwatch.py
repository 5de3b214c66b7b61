"""Seconds of named steps, in the order in which they were taken."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times steps; a step taken several times adds up."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def time(self, name: str, step: Callable[[], Result]) -> Result:
        """Run `step`, note its seconds under `name`, and return what it gives."""
        began = time.perf_counter()
        result = step()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        return result


def process_age_seconds() -> float:
    """Seconds since this process began, as Linux tells it: what interpreter and imports took, if asked first; elsewhere 0."""
    uptime = Path("/proc/uptime")
    if not uptime.exists():
        return 0.0
    began_ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return float(uptime.read_text(encoding="utf-8").split()[0]) - began_ticks / os.sysconf("SC_CLK_TCK")
