"""What runs of layers were solved to, by content: what one planning run has found out, the next one need not.

A key covers everything that the value follows from: the layers, how they are joined, the mesh and its links, the price of memory, and the
source of the rules themselves.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from alpa_hpc.sharding.build import SpecSpace

_DECIDING = ("cluster", "ir", "layers", "sharding")  # packages that decide what a sharding problem is, and how it is solved


@dataclass(frozen=True, slots=True)
class StageValue:
    """The optimum of one run of layers at one memory price: seconds an iteration and bytes a device."""

    seconds: float
    fixed_bytes: float
    inflight_bytes: float

    def __add__(self, other: "StageValue") -> "StageValue":
        """What two runs that follow each other cost together."""
        return StageValue(self.seconds + other.seconds, self.fixed_bytes + other.fixed_bytes, self.inflight_bytes + other.inflight_bytes)


@dataclass(frozen=True, slots=True)
class Solved:
    """A value, and among which specs it is the best."""

    value: StageValue
    space: SpecSpace


@dataclass(frozen=True, slots=True, eq=False)
class SolvedRuns:
    """What earlier planning runs have solved, and `new` what this one adds."""

    known: Mapping[str, Solved] = field(default_factory=dict[str, Solved])
    new: dict[str, Solved] = field(default_factory=dict[str, Solved])

    def find(self, key: str) -> Solved | None:
        """What is known of a run."""
        return self.known.get(key) or self.new.get(key)

    def add(self, key: str, solved: Solved) -> None:
        """Remember a run that was not known."""
        if key not in self.known:
            self.new[key] = solved


def run_key(parts: Iterable[str]) -> str:
    """The key (32 hex digits) of a run with these properties, under the present rules."""
    digest = hashlib.sha256(rules_key())
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:32]


def rules_key() -> bytes:
    """A digest of the source that decides values: another version of it knows nothing."""
    return source_key(_DECIDING)


@cache
def source_key(folders: tuple[str, ...]) -> bytes:
    """A digest of the source in some of the package's folders ("" = all of it)."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in folders:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(package)}:{path.stat().st_size}:".encode())
            digest.update(path.read_bytes())
    return digest.digest()
