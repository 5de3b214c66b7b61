"""Frozen option classes -> the plain twins that OmegaConf composes against, and their values -> the classes again; which keys there are.

OmegaConf makes configs of frozen classes read-only and would spell Enum members in upper case; hence the twins.
"""

import dataclasses
import difflib
import enum
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from alpa_hpc.errors import ConfigError
from alpa_hpc.training.model import Model

MISSING = "???"  # OmegaConf's word for a value that has to be given

_KEY = re.compile(r"(\+{0,2})([A-Za-z_]\w*(?:\.\w+)*)=")


def option_fields(kind: type) -> list[tuple[str, Any]]:
    """Names and types of what an option class is made from."""
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind) if field.init]


def twin(kind: type) -> type:
    """A plain dataclass with the fields and defaults of `kind`, each field of a type that OmegaConf has."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    fields = [(name, _plain_type(hint), _plain_default(defaults[name])) for name, hint in option_fields(kind) if name != "resolved"]
    return dataclasses.make_dataclass(kind.__name__, fields)


def check_keys(words: Sequence[str], kind: type) -> None:
    """ConfigError for a KEY=VALUE or +KEY=VALUE among the words of a command line whose key `kind` does not have."""
    for word in words:
        found = _KEY.match(word)
        if found is not None and (found[2] != "experiment" and not (found[1] and "." not in found[2])):
            refuse_unknown_key(found[2], kind)


def refuse_unknown_key(key: str, kind: type) -> None:
    """ConfigError if a dotted key is none of `kind`, with those that there are; what stands below a mapping is free."""
    parts = key.split(".")
    if parts[0] == "hydra":
        return
    for depth, part in enumerate(parts):
        if not dataclasses.is_dataclass(kind):
            return
        known = dict(option_fields(cast(type, kind)))
        if part not in known:
            raise ConfigError(_unknown_words(parts[:depth], part, sorted(known)))
        kind = known[part]


def _unknown_words(above: Sequence[str], part: str, known: Sequence[str]) -> str:
    full = {name: ".".join((*above, name)) for name in known}
    near = difflib.get_close_matches(part, known, 1)
    hint = f"did you mean {full[near[0]]}? There are" if near else "there are"
    return f"{'.'.join((*above, part))} is no key: {hint} {', '.join(full[name] for name in known if name != 'resolved')}"


def _plain_default(value: Any) -> Any:
    if value is dataclasses.MISSING:
        return dataclasses.field(default=MISSING)
    if isinstance(value, tuple):
        return dataclasses.field(default_factory=lambda: list(value))
    return dataclasses.field(default=value.value if isinstance(value, enum.Enum) else value)


def _plain_type(hint: Any) -> Any:
    if hint is Model or get_origin(hint) is dict:
        return dict[str, Any]
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]
    if dataclasses.is_dataclass(hint):
        return twin(cast(type, hint))
    return str if issubclass(hint, enum.Enum | Path) else hint


def build(hint: Any, value: Any, key: str) -> Any:
    """`value` (plain data of the twin's type) as an object of type `hint`; `key` says in errors where it stood."""
    if get_origin(hint) is tuple:
        return _build_texts(value, key)
    if get_origin(hint) is dict:
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return _build_options(cast(type, hint), value, key)
    if issubclass(hint, enum.Enum):
        return _build_member(hint, value, key)
    return hint(value)


def _build_texts(values: Sequence[Any], key: str) -> tuple[str, ...]:
    odd = [value for value in values if not isinstance(value, str)]
    if odd:
        raise ConfigError(f"{key} has {odd[0]!r}, expected a list of texts alone, such as {key}=[a,b]: put one with commas in quotes")
    return tuple(values)


def _build_options(kind: type, values: Mapping[str, Any], key: str) -> Any:
    built = {field: build(hint, values[field], f"{key}.{field}") for field, hint in option_fields(kind)}
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _build_member(kind: type[enum.Enum], word: str, key: str) -> enum.Enum:
    for member in kind:
        if member.value == word:
            return member
    raise ConfigError(f"{key}={word} is not a known choice, expected one of: {', '.join(str(member.value) for member in kind)}")
