"""What a simulation gives: when every mesh computes, sends and waits, and how much memory its buffers take meanwhile."""

import enum
from dataclasses import dataclass


class EventKind(enum.Enum):
    """What a mesh (or, for SEND, its outgoing link) is busy with."""

    RUN = "run"
    SEND = "send"
    WAIT = "wait"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Event:
    """A span of time, in seconds from the iteration's begin; `name` is the task or buffer, `microbatch` may be ITERATION."""

    mesh: int
    kind: EventKind
    name: str
    microbatch: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes a device holds in buffers from a time on, until the mesh's next sample."""

    start: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration: its seconds, all events (mesh after mesh, in program order), and per mesh its memory and idle fraction.

    `peak_bytes` counts buffers and, while a task runs, its workspace; `bubble_fractions` is the part of the iteration in which a mesh runs
    no task.
    """

    seconds: float
    events: tuple[Event, ...]
    memory: tuple[tuple[MemorySample, ...], ...]
    peak_bytes: tuple[int, ...]
    bubble_fractions: tuple[float, ...]
