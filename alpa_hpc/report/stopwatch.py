"""Seconds of named steps, in the order in which they were taken."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
