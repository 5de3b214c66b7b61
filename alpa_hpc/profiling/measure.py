"""A function and its arguments -> seconds of compilation and of each run, on this process's device."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds to compile once, and of each repeat."""

    compile_seconds: float
    seconds: tuple[float, ...]


def time_function(function: Callable[..., object], arguments: tuple[object, ...], repeats: int) -> Timing:
    """Compile and run `function`; a repeat ends when its results are there."""
    began = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - began
    for _ in range(WARM_UP_RUNS):
        jax.block_until_ready(compiled(*arguments))
    seconds: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - began)
    return Timing(compile_seconds, tuple(seconds))
