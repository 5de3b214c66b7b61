"""metrics.jsonl -> the last step of a training, read from the file's end: a long run has millions of lines."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Progress:
    """The last step that is on record, of so many (0: not known), with its figures."""

    step: int
    num_steps: int
    figures: dict[str, float]

    def describe(self) -> str:
        """`step 40/160  loss 2.41`; empty before the first step."""
        if not self.step:
            return ""
        total = f"/{self.num_steps}" if self.num_steps else ""
        loss = f"  loss {self.figures['loss']:.4g}" if "loss" in self.figures else ""
        return f"step {self.step}{total}{loss}"


def read_progress(metrics: Path, num_steps: int) -> Progress:
    """The last whole line of a metrics file; step 0 where there is none, or the line is not one of ours."""
    try:
        with metrics.open("rb") as stream:
            stream.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            whole, _, _ = stream.read().rpartition(b"\n")  # what stands after it is still being written
        figures: dict[str, Any] = json.loads(whole.rpartition(b"\n")[2])
        numbers = {name: float(value) for name, value in figures.items() if name != "step"}
        return Progress(int(figures["step"]), num_steps, numbers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Progress(0, num_steps, {})
