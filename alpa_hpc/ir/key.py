"""ClosedJaxpr -> a key of its content: equal for the same program under other variable names, in any process.

It covers primitives, parameters, avals, how variables are wired, and the bytes of constants; never an id, a memory address, a source line.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")
_NAMES_ONLY = frozenset({"name", "jvp", "debug_info", "ctx", "bwd", "fwd"})


def content_key(*parts: object) -> str:
    """Key of jaxprs, arrays and plain values, in order."""
    return _digest(_text(part) for part in parts)


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def jaxpr_text(jaxpr: Jaxpr) -> str:
    """A jaxpr with its variables numbered in order of appearance."""
    names: dict[Var, str] = {}

    def name(atom: Var | Literal) -> str:
        if isinstance(atom, Literal):
            return _array_text(np.asarray(atom.val))
        if atom not in names:
            names[atom] = f"{len(names)}:{aval_text(atom.aval)}"
        return names[atom]

    lines = [" ".join(map(name, (*jaxpr.constvars, *jaxpr.invars)))]
    for equation in jaxpr.eqns:
        operands = " ".join(map(name, equation.invars))
        results = " ".join(map(name, equation.outvars))
        lines.append(f"{results} = {equation_text(equation)} {operands}")
    lines.append(" ".join(map(name, jaxpr.outvars)))
    return "\n".join(lines)


def equation_text(equation: JaxprEqn) -> str:
    """The primitive and parameters of an equation, without its variables."""
    params = sorted((key, value) for key, value in equation.params.items() if key not in _NAMES_ONLY)
    return equation.primitive.name + "".join(f" {key}={_text(value)}" for key, value in params)


def aval_text(aval: object) -> str:
    """Shape and dtype of an aval (weak types are the same program)."""
    return _shape_text(getattr(aval, "dtype", type(aval).__name__), getattr(aval, "shape", ()))


@lru_cache(maxsize=4096)
def _shape_text(dtype: object, shape: tuple[int, ...]) -> str:
    """Kept, since numpy takes long to write a dtype."""
    return f"{dtype}{list(shape)}"


def _text(value: object) -> str:
    match value:
        case ClosedJaxpr():
            return jaxpr_text(value.jaxpr) + "".join(_text(np.asarray(const)) for const in value.consts)
        case Jaxpr():
            return jaxpr_text(value)
        case np.ndarray() | np.generic() | jax.Array():
            return _array_text(np.asarray(value))
        case tuple() | list():
            return f"({','.join(map(_text, value))})"
        case dict():
            return f"{{{','.join(f'{_text(key)}:{_text(value[key])}' for key in sorted(value, key=repr))}}}"
        case set() | frozenset():
            return f"{{{','.join(sorted(map(_text, value)))}}}"
        case type():
            return value.__qualname__
        case Callable():
            return f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"
        case _:
            return _ADDRESS.sub("", repr(value))


def _array_text(array: np.ndarray) -> str:
    if array.size <= 1:
        return f"{_shape_text(array.dtype, array.shape)}{array.tolist()!r}"
    return f"{_shape_text(array.dtype, array.shape)}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
