"""What became of a request to measure a stage: seconds, a failure, or nothing; and ProfileRow or exception -> outcome.

Two outcomes hold seconds, and they mean different things: `MeasuredWork` of a lone device leaves communication to the model,
`MeasuredTasks` of the whole mesh has it inside.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from alpa_hpc.profiling.options import Extent
from alpa_hpc.profiling.store import ProfileRow, median_seconds


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """Measured seconds of a lone device's own work: forward and backward of one microbatch, and one update."""

    forward: float
    backward: float
    update: float


@dataclass(frozen=True, slots=True)
class MeasuredTasks:
    """Measured seconds of whole tasks on their mesh, communication included: forward and backward of one microbatch, and one update."""

    forward: float
    backward: float
    update: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The stage cannot run: it did not compile, ran out of memory, or its task died. It costs infinity."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Nobody could try: no nodes came in time, say. The stage keeps its analytic cost."""

    reason: str


Measured = MeasuredWork | MeasuredTasks
Outcome = MeasuredWork | MeasuredTasks | Failed | Unmeasured


def measured(row: ProfileRow, extent: Extent) -> Measured:
    """The medians of a row that was measured on `extent`."""
    seconds = [median_seconds(repeats) for repeats in (row.seconds_forward, row.seconds_backward, row.seconds_update)]
    match extent:
        case Extent.LONE:
            return MeasuredWork(*seconds)
        case Extent.MESH:
            return MeasuredTasks(*seconds)


def _without_traceback(lines: Sequence[str]) -> str:
    """The first line; where a traceback follows it (of a callback of the model's, say), with the exception that this ends in."""
    head, begins, _ = lines[0].partition("Traceback (most recent call last)")
    raised = [line for line in lines[1:] if _EXCEPTION.match(line)]
    return f"{head}{raised[-1]}" if begins and raised else lines[0]


_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")


def explain_failure(error: BaseException) -> str:
    """What kept a stage from being measured, in one line, such as "out of device memory: ..."."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = _without_traceback(lines) if lines else "no message"
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in said:
        return f"out of device memory: {said.partition('RESOURCE_EXHAUSTED:')[2].strip() or said}"
    if isinstance(error, MemoryError):
        return f"out of host memory: {said}"
    return f"{type(error).__name__}: {said}"
