"""Looks and measurements -> Evidence: how each option of the analytic table stands by all that is known (DESIGN, "Costs").

A measured option has the seconds that were measured, one that failed costs infinity and is dropped, and every other one keeps its modelled
seconds at the pace of the measured ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.planner.requests import ProfileRequest
from alpa_hpc.profiling.outcome import Failed, Measured, MeasuredTasks, MeasuredWork, Unmeasured
from alpa_hpc.sharding.breakdown import StageSeconds, TaskSeconds
from alpa_hpc.sharding.wiring import LayerWiring
from alpa_hpc.stages.cost_table import StageOption


@dataclass(frozen=True, slots=True)
class Signature:
    """What an option is, wherever its layers stand in the model."""

    wiring: tuple[LayerWiring, ...]
    submesh: Submesh
    shape: MeshShape
    remat: bool
    variant: int


@dataclass(frozen=True, slots=True)
class Look:
    """An option looked at closely: modelled seconds of its tasks, and the bytes a device of its temporary arrays."""

    seconds: StageSeconds
    workspace_bytes: float


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A request that gave no seconds, and why."""

    request: ProfileRequest
    outcome: Failed | Unmeasured


@dataclass(frozen=True, slots=True)
class Pace:
    """How many times as long as modelled a device's own work and its communication take."""

    work: float = 1.0
    communication: float = 1.0

    @property
    def least(self) -> float:
        """No task takes fewer times its modelled seconds."""
        return min(self.work, self.communication)

    def of(self, modelled: StageSeconds) -> StageSeconds:
        """Modelled seconds at this pace."""
        forward, backward, update = (
            TaskSeconds(task.compute * self.work, task.communication * self.communication)
            for task in (modelled.forward, modelled.backward, modelled.update)
        )
        return StageSeconds(forward, backward, update)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What is known beyond the analytic table: looks at options, measured seconds of some, and why others have none.

    `pace` is that of the measured options; as modelled where there are none.
    """

    looks: Mapping[Signature, Look]
    measured: Mapping[Signature, StageSeconds]
    not_measured: Mapping[Signature, NotMeasured]
    pace: Pace

    @property
    def failed(self) -> frozenset[Signature]:
        """What cannot run, and so is in no partition."""
        return frozenset(one for one, found in self.not_measured.items() if isinstance(found.outcome, Failed))

    def correct(self, one: Signature, option: StageOption) -> StageOption:
        """An option as it stands by this evidence; one not looked at yet has the least seconds that it may turn out to take."""
        look = self.looks.get(one)
        if look is None:
            return replace(option, seconds=option.seconds * self.pace.least)
        looked = replace(option, workspace_bytes=look.workspace_bytes)
        if not self.measured:
            return looked
        seconds = self.seconds(one, look.seconds)
        return replace(looked, seconds=seconds.microbatch, seconds_once=seconds.update.total, measured=one in self.measured)

    def seconds(self, one: Signature, modelled: StageSeconds) -> StageSeconds:
        """Measured seconds, else modelled ones at the pace of the measured ones."""
        found = self.measured.get(one)
        return self.pace.of(modelled) if found is None else found


NO_EVIDENCE = Evidence({}, {}, {}, Pace())


def measured_seconds(modelled: StageSeconds, found: Measured) -> StageSeconds:
    """Modelled seconds with what was measured put in their place.

    Work of a lone device replaces work alone. Seconds of whole tasks replace work and communication; what each of them had of it was not
    seen, and is taken to be as modelled.
    """
    pairs = ((modelled.forward, found.forward), (modelled.backward, found.backward), (modelled.update, found.update))
    match found:
        case MeasuredWork():
            tasks = [TaskSeconds(seconds, task.communication) for task, seconds in pairs]
        case MeasuredTasks():
            tasks = [_shared_out(task, seconds) for task, seconds in pairs]
    return StageSeconds(*tasks)


def _shared_out(modelled: TaskSeconds, seconds: float) -> TaskSeconds:
    work = seconds * (modelled.compute / modelled.total) if modelled.total else seconds
    return TaskSeconds(work, seconds - work)


def pace_of(looks: Mapping[Signature, Look], measured: Mapping[Signature, StageSeconds], num_microbatches: int) -> Pace:
    """The median ratios of measured to modelled seconds of an iteration, of work and of communication, each where there is some."""

    def ratio(part: Callable[[TaskSeconds], float]) -> float:
        modelled = {one: _iteration(looks[one].seconds, part, num_microbatches) for one in measured}
        ratios = [_iteration(found, part, num_microbatches) / modelled[one] for one, found in measured.items() if modelled[one]]
        return median(ratios) if ratios else 1.0

    return Pace(ratio(lambda task: task.compute), ratio(lambda task: task.communication))


def _iteration(seconds: StageSeconds, part: Callable[[TaskSeconds], float], num_microbatches: int) -> float:
    return num_microbatches * (part(seconds.forward) + part(seconds.backward)) + part(seconds.update)
