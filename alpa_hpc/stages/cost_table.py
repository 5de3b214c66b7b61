"""Priced stage candidates -> CostTable: what each run of layers costs on each submesh, as Pareto points of time and memory.

This is the paper's t_intra (section 5.2) before memory decides: the number of microbatches in flight, and so which option fits,
is known only to the stage DP, so options that trade seconds for bytes stay side by side (`partition.py` chooses).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_hpc.cluster.hardware import MeshShape, Submesh

BY_FLOP, BY_LAYERS = -2, -1  # StageOption.variant of bounds: by the FLOP of contractions; by the optima of layers, each by itself

Cell = tuple[int, int, Submesh]  # layers [start, stop) on a submesh


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage. Seconds of its mesh, bytes a device; `variant` numbers the Pareto points of one shape and remat choice.

    A negative variant is a bound: no way to run the stage with this shape and remat choice takes less of anything (see `planner.opening`).

    seconds:         forward and backward of one microbatch
    seconds_once:    gradient synchronisation and update, once an iteration
    fixed_bytes:     state, accumulators: held all iteration
    inflight_bytes:  residuals and inputs: held a microbatch in flight
    workspace_bytes: the most that one task needs on top
    measured:        timed on devices, not modelled
    """

    shape: MeshShape
    remat: bool
    variant: int
    seconds: float
    seconds_once: float
    fixed_bytes: float
    inflight_bytes: float
    workspace_bytes: float
    measured: bool

    def __post_init__(self) -> None:
        numbers = (self.seconds, self.seconds_once, self.fixed_bytes, self.inflight_bytes, self.workspace_bytes)
        assert all(number >= 0 for number in numbers), f"seconds and bytes are never negative (or NaN): {self}"

    @property
    def is_bound(self) -> bool:
        """Whether it stands for options that are not priced yet."""
        return self.variant < 0

    def peak_bytes(self, num_in_flight: int) -> float:
        """Bytes a device needs at most while `num_in_flight` microbatches are between their forward and their backward."""
        return self.fixed_bytes + num_in_flight * self.inflight_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class CostTable:
    """Options of each cell (start, stop, submesh); a missing cell cannot be run.

    `boundary_bytes[k]` crosses the cut before layer k, forward, a microbatch; boundary_bytes[0] is 0.
    """

    num_layers: int
    options: Mapping[Cell, tuple[StageOption, ...]]
    boundary_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.boundary_bytes) == self.num_layers, f"{len(self.boundary_bytes)} cuts for {self.num_layers} layers"
        assert self.boundary_bytes[0] == 0, "nothing crosses into the first layer"
        for (start, stop, submesh), options in self.options.items():
            assert 0 <= start < stop <= self.num_layers, f"layers [{start}, {stop}) of {self.num_layers}"
            assert all(option.shape.num_devices == submesh.num_devices for option in options), f"an option of {submesh} has another size"

    def updated(self, options: Mapping[Cell, tuple[StageOption, ...]]) -> "CostTable":
        """A table in which the cells of `options` are replaced and the others are as here."""
        return replace(self, options={**self.options, **options})


def pareto(options: Sequence[StageOption]) -> tuple[StageOption, ...]:
    """The options of one cell that can be best for some number of microbatches and limit, by seconds; of equals the first stays.

    A stage's time is seconds + seconds_once / B, its memory fixed + k * inflight + workspace with B, k >= 1. Both are linear, so an
    option no better at B = 1, B = infinity, k = 1 and k = infinity is never better.
    """
    kept: list[StageOption] = []
    corners: list[tuple[float, float, float, float]] = []
    for option in sorted(options, key=_corners):
        corner = _corners(option)
        if not any(all(a <= b for a, b in zip(other, corner, strict=True)) for other in corners):
            kept.append(option)
            corners.append(corner)
    return tuple(kept)


def _corners(option: StageOption) -> tuple[float, float, float, float]:
    return (option.seconds, option.seconds + option.seconds_once, option.peak_bytes(1), option.inflight_bytes)
