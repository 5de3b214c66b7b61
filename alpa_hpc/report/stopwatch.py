"""Named steps of planning -> their seconds, in the order in which they were taken; and, while a step is long, lines for who waits."""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

SILENT_SECONDS = 4.0  # a step that is done by then says nothing
SECONDS_BETWEEN = 10.0

Result = TypeVar("Result")
Tell = Callable[[str], None]


def tell_person(line: str) -> None:
    """Write a line to stderr, where it is seen at once and is no result."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times steps; a step taken several times adds up. What takes more than some seconds tells so now and then."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    tell: Tell = tell_person

    def time(self, name: str, step: Callable[[], Result]) -> Result:
        """Run `step`, note its seconds under `name`, and return what it gives."""
        began = time.perf_counter()
        with _telling(name, self.tell):
            result = step()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        return result


@contextmanager
def _telling(name: str, tell: Tell) -> Generator[None]:
    """While open, tell how far a step is, after SILENT_SECONDS and then every SECONDS_BETWEEN; and at last how long it took."""
    began, over = time.perf_counter(), threading.Event()

    def speak() -> None:
        pause = SILENT_SECONDS
        while not over.wait(pause):
            tell(f"planning: {name}, {time.perf_counter() - began:.0f} s so far")
            pause = SECONDS_BETWEEN

    speaker = threading.Thread(target=speak, name="stopwatch", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()
    seconds = time.perf_counter() - began
    if seconds > SILENT_SECONDS:
        tell(f"planning: {name} took {seconds:.0f} s")


def process_age_seconds() -> float:
    """Seconds since this process began, as Linux tells it: what interpreter and imports took, if asked first; elsewhere 0."""
    uptime = Path("/proc/uptime")
    if not uptime.exists():
        return 0.0
    began_ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return float(uptime.read_text(encoding="utf-8").split()[0]) - began_ticks / os.sysconf("SC_CLK_TCK")
