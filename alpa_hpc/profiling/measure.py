"""A compiled function and fresh arguments -> seconds of each run, on the devices that its arguments lie on."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from alpa_hpc.compiler import compiled

WARM_UP_RUNS = 2

Arguments = tuple[object, ...]
Synchronise = Callable[[], None]  # returns on every process of a group once all have called it


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds to compile once, and of each repeat."""

    compile_seconds: float
    seconds: tuple[float, ...]


def time_function(function: Callable[..., object], arguments: Arguments, repeats: int) -> Timing:
    """Compile and run `function` on this process's device; a repeat ends when its results are there."""
    return time_compiled(
        lambda: compiled(jax.jit(function).lower(*arguments), jax.local_devices()), lambda: arguments, repeats, lambda: None
    )


def time_compiled(
    compile_function: Callable[[], Callable[..., object]], fresh: Callable[[], Arguments], repeats: int, synchronise: Synchronise
) -> Timing:
    """Compile, then run on what `fresh` gives for each run; a repeat begins when all processes have its arguments."""
    began = time.perf_counter()
    program = compile_function()
    compile_seconds = time.perf_counter() - began
    seconds = [_time_run(program, fresh, synchronise) for _ in range(WARM_UP_RUNS + repeats)]
    return Timing(compile_seconds, tuple(seconds[WARM_UP_RUNS:]))


def _time_run(compiled: Callable[..., object], fresh: Callable[[], Arguments], synchronise: Synchronise) -> float:
    arguments = jax.block_until_ready(fresh())
    synchronise()
    began = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - began
