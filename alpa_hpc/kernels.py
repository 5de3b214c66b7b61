"""The door to numba: `kernel` compiles a function of flat arrays to machine code at its first call and keeps it on disk.

Where no folder beside the source can be written, numba keeps it in the user's cache folder. Kernels draw no random numbers of their own:
seeds come in as arguments. `compile_seconds` tells how long this process has compiled, which a cold start pays once a machine.
"""

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core.event import Event, Listener, register
from numpy.typing import NDArray

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Number = TypeVar("Number", np.int64, np.float64)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
# Numbers in kernels: what indexing gives is a number, but an array to the type checker.
Whole = int | Ints
Real = float | Floats
Truth = bool | np.bool_ | Flags


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function as compiled code; it runs without the interpreter's lock."""
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder can be written, neither beside the source nor the user's: compile in each process
        compiled = numba.njit(nogil=True)(function)
    return cast(Callable[Parameters, Result], compiled)


def inner(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function as compiled code for other kernels alone: without a way in from Python it compiles much faster."""
    njit: Any = numba.njit
    return cast(Callable[Parameters, Result], njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


@inner
def copy_into(into: NDArray[Number], source: NDArray[Number]) -> None:
    """Fill an array from the beginning of another: what `into[:] = source` does, which takes two seconds to compile."""
    for i in range(len(into)):
        into[i] = source[i]


class _CompileClock(Listener):
    """Adds up the outermost compilations of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._started = 0.0

    def on_start(self, event: Event) -> None:
        if self._depth == 0:
            self._started = time.perf_counter()
        self._depth += 1

    def on_end(self, event: Event) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._started


_clock = _CompileClock()
register("numba:compile", _clock)


def compile_seconds() -> float:
    """Seconds that this process has spent on compiling kernels; reading them from disk is not counted."""
    return _clock.seconds
