"""The door to numba: `kernel` compiles a function of flat arrays to machine code at its first call and keeps it on disk.

Where no folder beside the source can be written, numba keeps it in the user's cache folder; where that cannot be, or a disk is full, each
process compiles for itself. Kernels draw no random numbers of their own: seeds come in as arguments. `compile_seconds` tells how long
this process has compiled, which a cold start pays once a machine.
"""

import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core.caching import FunctionCache
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


# A disk that is full or fails, files that another user may read alone, files that a crash has left empty.
UNUSABLE = (OSError, EOFError, pickle.UnpicklingError)


class _Cache(FunctionCache):
    """numba's cache of one function, which is no obstacle where its files cannot be read or written."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return FunctionCache.load_overload(self, sig, target_context)
        except UNUSABLE:
            return None  # numba's word for what is not kept

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            FunctionCache.save_overload(self, sig, data)
        except UNUSABLE as error:
            self._forget()
            _tell_once(self.cache_path, str(error.strerror) if isinstance(error, OSError) else "what is there cannot be read")

    def _forget(self) -> None:
        """The index is written first: without its code, it would name the code of an older source that has the same file name."""
        private: Any = self
        with suppress(OSError):  # what cannot be removed could not be written
            Path(private._cache_file._index_path).unlink()


@cache
def _tell_once(folder: str, reason: str) -> None:
    sys.stderr.write(
        f"compiled code cannot be kept in {folder} ({reason}): each process compiles it anew; NUMBA_CACHE_DIR names another folder\n"
    )


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function as compiled code; it runs without the interpreter's lock."""
    compiled: Any = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):  # no folder can be written, neither beside the source nor the user's
        compiled._cache = _Cache(function)
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
