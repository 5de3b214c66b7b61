"""Links between ranks: (who, how many bytes, sent when) -> when the message counts as arrived.

`EmulatedLinks` makes the MPI transport as slow as a described cluster (cluster.hardware.Link), so that a plan for two nodes can be run on
one machine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from alpa_hpc.cluster.hardware import Link


class AbstractLinks(ABC):
    """When a message counts as arrived."""

    @abstractmethod
    def due(self, sender: int, receiver: int, num_bytes: int, sent: float) -> float:
        """Earliest time (monotonic clock, seconds) at which a message that rank `sender` sent at `sent` may be handed out."""


@final
class DirectLinks(AbstractLinks):
    """Messages count as soon as they are there."""

    def due(self, sender: int, receiver: int, num_bytes: int, sent: float) -> float:
        """When it was sent: no delay is added."""
        return sent


@final
class EmulatedLinks(AbstractLinks):
    """Delays messages as the described links would; for ranks on one machine, which share a clock.

    `link_of` takes (sender, receiver), world ranks. Messages of one pair queue: start = max(sent, end of the one before), end = start +
    bytes / bandwidth, due = end + latency. Pairs do not disturb each other, so a path that several devices share is too fast here when they
    all use it.
    """

    def __init__(self, link_of: Callable[[int, int], Link]) -> None:
        self._link_of = link_of
        self._busy_until: dict[tuple[int, int], float] = {}

    def due(self, sender: int, receiver: int, num_bytes: int, sent: float) -> float:
        """When the described link would have delivered it, behind what the pair sent before."""
        link = self._link_of(sender, receiver)
        end = max(sent, self._busy_until.get((sender, receiver), sent)) + num_bytes / link.bandwidth
        self._busy_until[sender, receiver] = end
        return end + link.latency
