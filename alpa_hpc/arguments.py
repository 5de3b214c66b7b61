"""What a caller of the library gives, held against what was asked for: a wrong kind of value is told before anything is made of it."""

import dataclasses
import enum
from collections.abc import Callable
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from alpa_hpc.errors import ConfigError

WORDS: dict[Any, str] = {str: "a text", bool: "True or False", type(None): "None", Callable: "a function"}
NUMBERS: dict[type, tuple[type, str]] = {int: (Integral, "a whole number"), float: (Real, "a number")}


def check_fields(instance: Any, owner: str = "") -> None:
    """Raise ConfigError where a field of a dataclass holds another kind of value than it declares; `owner` is what it is of, for people.

    Numbers of numpy become Python's: plans are written as JSON, and keys of searches and steps are made of what values look like.
    """
    for name, kind in _fields(type(instance)):
        value = getattr(instance, name)
        check_argument(f"{owner or type(instance).__name__}: {name}", value, kind)
        if kind in NUMBERS and type(value) not in NUMBERS:
            object.__setattr__(instance, name, int(value) if isinstance(value, Integral) else float(value))


def check_argument(name: str, value: object, kind: Any) -> None:
    """Raise ConfigError where `value` is none of `kind`, a class or a union; for a tuple of a class, its entries are looked at."""
    if get_origin(kind) is tuple:
        check_argument(name, value, tuple)
        for entry in value:  # pyright: ignore[reportGeneralTypeIssues]  # a tuple, as has just been seen
            check_argument(f"{name} has an entry that", entry, get_args(kind)[0])
        return
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (get_origin(kind) or kind,)
    if not any(_is(value, one) for one in kinds):
        raise ConfigError(f"{name} is {value!r}, expected {' or '.join(map(_words, kinds))}")


@cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(kind))


def _is(value: object, kind: type) -> bool:
    if kind in NUMBERS:
        return isinstance(value, NUMBERS[kind][0]) and not isinstance(value, bool)  # True is a 1 to Python, and a slip to us
    return isinstance(value, kind)


def _words(kind: type) -> str:
    if kind in NUMBERS:
        return NUMBERS[kind][1]
    if issubclass(kind, enum.Enum):
        return f"one of {', '.join(map(str, kind))}"
    return WORDS.get(kind, f"a {kind.__name__}")
