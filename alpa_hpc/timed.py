"""How pure steps let whoever calls them take their seconds: each step goes through a `Timed` under its name."""

from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Timed(Protocol):
    """Runs a step that has a name, and gives what it gives; who calls may want its seconds."""

    def __call__(self, name: str, step: Callable[[], Result]) -> Result:
        """Run `step`."""
        ...


def untimed(name: str, step: Callable[[], Result]) -> Result:
    """Run a step whose seconds nobody wants."""
    del name
    return step()
