"""A search at each number of microbatches -> the number whose plan is the fastest: B, searched jointly with stages, meshes and strategies.

How many rows a microbatch has decides what can be split, what every operator costs and what fits, so each number is traced, cut and
searched by itself, by modelled costs. A number is given up as soon as its bound (Eq. 2, nothing pruned) says that it cannot win.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from alpa_hpc.errors import InfeasibleError, TraceError
from alpa_hpc.planner.refine import Interest
from alpa_hpc.planner.search import SimulatedPlan

SIMULATED_WITHIN = 1.15  # a plan is at most that much slower by Eq. 2, relative to another one, than in simulation; 1.12 was seen


@dataclass(frozen=True, slots=True)
class TriedNumber:
    """What a number of microbatches gives: seconds of an iteration, simulated and by Eq. 2; infinity where it has no plan for `reason`.

    `missing_bytes`: of memory, a device, where that is what it has no plan for.
    """

    num_microbatches: int
    seconds: float = math.inf
    objective_seconds: float = math.inf
    reason: str = ""
    missing_bytes: float = math.inf


TryAt = Callable[[int, float], TriedNumber]  # (number, seconds by Eq. 2 beyond which it is of no interest)
Tell = Callable[[str], None]


def silent(line: str) -> None:
    """Tell nobody."""


def numbers_for(num_rows: int, num_devices: int) -> tuple[int, ...]:
    """All numbers of equal microbatches of a batch, first those that promise most: some for each stage, and rows enough to split."""
    halves = [number for number in range(1, math.isqrt(num_rows) + 1) if num_rows % number == 0]
    numbers = {*halves, *(num_rows // number for number in halves)}
    return tuple(sorted(numbers, key=lambda number: (abs(math.log(number / num_devices)), number)))


def tried(number: int, most_seconds: float, search: Callable[[Interest], SimulatedPlan]) -> TriedNumber:
    """What the search at a number gives, in a few figures."""
    try:
        plan = search(Interest(most_seconds, tells_why=False))
    except (InfeasibleError, TraceError) as error:
        return refused(number, error)
    return TriedNumber(number, plan.timeline.seconds, plan.partition.objective_seconds)


def refused(number: int, error: InfeasibleError | TraceError) -> TriedNumber:
    """A number that has no plan, or cannot be traced."""
    missing = error.missing_bytes if isinstance(error, InfeasibleError) else 0.0
    return TriedNumber(number, reason=str(error).partition("\n")[0], missing_bytes=missing or math.inf)


def try_numbers(numbers: Sequence[int], try_at: TryAt, tell: Tell = silent, num_parallel: int = 1) -> tuple[TriedNumber, ...]:
    """Try each of the numbers, `num_parallel` at a time, and begin with the first ones."""
    found: list[TriedNumber] = []

    def one(number: int) -> None:
        best = min((known.objective_seconds for known in found), default=math.inf)
        this = try_at(number, best * SIMULATED_WITHIN)
        found.append(this)
        tell(f"planning: {words(this)}")

    pool = ThreadPoolExecutor(num_parallel)
    try:
        for begun in [pool.submit(one, number) for number in numbers]:
            begun.result()
    finally:  # after a fault or Ctrl-C what was not begun is not begun any more, and nobody waits for the others
        pool.shutdown(wait=False, cancel_futures=True)
    return tuple(sorted(found, key=lambda known: known.num_microbatches))


def best_number(found: Sequence[TriedNumber]) -> int:
    """The number with the fastest plan, of equals the least; where none has one, the number that lacks the least memory."""
    return min(found, key=lambda one: (one.seconds, one.missing_bytes, one.num_microbatches)).num_microbatches


def words(one: TriedNumber) -> str:
    """A number that was tried, for people."""
    count = f"{one.num_microbatches} microbatch{'' if one.num_microbatches == 1 else 'es'}"
    return f"{count}: {one.reason}" if one.reason else f"{count}: {one.seconds:.4g} s"
