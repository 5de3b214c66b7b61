"""What goes wrong while a user's function is traced -> TraceError with the user's own line: file, number and text.

A user's line is the innermost one that belongs neither to an installed package, nor to Python, nor to alpa_hpc (its models count as
a user's); where there is none, the innermost one outside jax and alpa_hpc.
"""

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.extend.core import JaxprEqn

from alpa_hpc.errors import AlpaError, TraceError

_PACKAGE = Path(__file__).parents[1]
_MODELS = (str(_PACKAGE / "models"),)
_NEVER = (str(Path(jax.__file__).parent), str(_PACKAGE))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))

Line = tuple[str, int]  # file, number of the line


@contextmanager
def faults_of(what: str) -> Generator[None]:
    """Turn what the user's function `what` raises into a TraceError that says where; errors of ours pass."""
    try:
        yield
    except AlpaError:
        raise
    except Exception as error:
        raise TraceError(f"{what} raises {type(error).__name__}: {first_line(error)}{place_of(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or nothing."""
    return (str(error).strip().splitlines() or [""])[0]


def place_of(error: Exception) -> str:
    """The user's line that an exception came from, as " (FILE, line NUMBER: TEXT)"; nothing where no such line is on its way."""
    return _described([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def calling_place() -> str:
    """The user's line from which this function was reached, in the same form."""
    return _described([(frame.f_code.co_filename, number) for frame, number in traceback.walk_stack(inspect.currentframe())][::-1])


def place_of_equation(equation: JaxprEqn) -> str:
    """The user's line that made an equation, in the same form."""
    trace = equation.source_info.traceback
    return "" if trace is None else _described([(frame.file_name, frame.line_num) for frame in trace.frames][::-1])


def _described(outermost_first: Sequence[Line]) -> str:
    mine = [line for line in outermost_first if _is_in(line, _MODELS) or not _is_in(line, (*_NEVER, *_INSTALLED))]
    others = [line for line in outermost_first if not _is_in(line, _NEVER)]
    for file, number in (mine or others)[-1:]:
        text = linecache.getline(file, number).strip()
        return f" ({file}, line {number}{': ' if text else ''}{text})"
    return ""


def _is_in(line: Line, folders: Iterable[str]) -> bool:
    return any(line[0].startswith(folder + os.sep) for folder in folders)
