"""A search at each number of microbatches -> the number whose plan is the fastest: B, searched jointly with stages, meshes and strategies.

How many rows a microbatch has decides what can be split, what every operator costs and what fits, so each number is traced, cut and
searched by itself, by modelled costs. A number is given up as soon as its bound (Eq. 2, nothing pruned) says that it cannot win.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alpa_hpc.errors import InfeasibleError, TraceError
from alpa_hpc.planner.refine import WHOLE, Interest
from alpa_hpc.planner.search import SimulatedPlan

SIMULATED_WITHIN = 1.05  # a plan is at most that much slower by Eq. 2, relative to another one, than it is in simulation

SearchAt = Callable[[int, Interest], SimulatedPlan]
Tell = Callable[[str], None]


def silent(line: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class TriedNumber:
    """What a number of microbatches gives: the simulated seconds of an iteration, infinity where it has no plan for `reason`."""

    num_microbatches: int
    seconds: float
    reason: str


def numbers_for(num_rows: int, num_devices: int) -> tuple[int, ...]:
    """All numbers of equal microbatches of a batch, first those that promise most: some for each stage, and rows enough to split."""
    halves = [number for number in range(1, math.isqrt(num_rows) + 1) if num_rows % number == 0]
    numbers = {*halves, *(num_rows // number for number in halves)}
    return tuple(sorted(numbers, key=lambda number: (abs(math.log(number / num_devices)), number)))


def try_numbers(numbers: Sequence[int], search_at: SearchAt, tell: Tell = silent) -> tuple[TriedNumber, ...]:
    """Search at each of the numbers, in their order.

    Raises InfeasibleError or TraceError where no number has a plan: that of the number which lacks the least memory, told in full.
    """
    tried: list[TriedNumber] = []
    refusals: dict[int, InfeasibleError | TraceError] = {}
    best = math.inf
    for number in numbers:
        try:
            plan = search_at(number, Interest(best * SIMULATED_WITHIN, tells_why=False))
        except (InfeasibleError, TraceError) as error:
            refusals[number] = error
            tried.append(TriedNumber(number, math.inf, str(error).partition("\n")[0]))
        else:
            best = min(best, plan.partition.objective_seconds)
            tried.append(TriedNumber(number, plan.timeline.seconds, ""))
        tell(f"planning: {words(tried[-1])}")
    if len(refusals) == len(numbers):
        search_at(min(refusals, key=lambda number: (_missing(refusals[number]), -number)), WHOLE)
    return tuple(tried)


def best_number(tried: Sequence[TriedNumber]) -> int:
    """The number with the fastest plan; of equals the least."""
    return min(tried, key=lambda one: (one.seconds, one.num_microbatches)).num_microbatches


def words(one: TriedNumber) -> str:
    """A number that was tried, for people."""
    count = f"{one.num_microbatches} microbatch{'' if one.num_microbatches == 1 else 'es'}"
    return f"{count}: {one.reason}" if one.reason else f"{count}: {one.seconds:.4g} s"


def _missing(error: InfeasibleError | TraceError) -> float:
    return error.missing_bytes or math.inf if isinstance(error, InfeasibleError) else math.inf
