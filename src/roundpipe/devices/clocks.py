"""Which work on which stream is known to be over: vector clocks.

Each stream numbers its operations. An event carries what was ordered before it; a stream that
waits for the event knows all of that from then on. Two operations on different streams are ordered
only if the later one's stream knows the earlier one. After L. Lamport, "Time, clocks, and the
ordering of events" (1978), and C. Fidge's vectors of such clocks (1988).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .base import Stream


class StreamKey(NamedTuple):
    """One stream of one device of a pool."""

    device: int
    stream: Stream

    def __str__(self) -> str:
        return f"cpu:{self.device} {self.stream.value}"


class Operation(NamedTuple):
    """One operation of a stream."""

    stream: StreamKey
    position: int
    name: str

    def __str__(self) -> str:
        return f"{self.stream} ({self.name})"


Clock = Mapping[StreamKey, int]
"""For each stream, the number of its last operation that is known to be over."""


class Clocks:
    """The clocks of a pool's streams, and one for the host. Not locked: its owner locks."""

    def __init__(self) -> None:
        self._position: dict[StreamKey, int] = {}
        self._known: dict[StreamKey, dict[StreamKey, int]] = {}
        self._host: dict[StreamKey, int] = {}

    def advance(self, stream: StreamKey) -> int:
        """Number the next operation of ``stream``."""
        position = self._position[stream] = self._position.get(stream, 0) + 1
        return position

    def snapshot(self, stream: StreamKey) -> Clock:
        """What is over once ``stream`` has passed its last operation so far."""
        clock = dict(self._known.get(stream, {}))
        clock[stream] = self._position.get(stream, 0)
        return clock

    def wait(self, stream: StreamKey, clock: Clock) -> None:
        """Later operations of ``stream`` start after ``clock``."""
        _join(self._known.setdefault(stream, {}), clock)

    def host_saw(self, clock: Clock) -> None:
        """The host knows that ``clock`` is over, hence whatever is enqueued later comes after it.

        There is one clock for all host threads: how they tell each other is not looked into.
        """
        _join(self._host, clock)

    def is_ordered(self, earlier: Operation, later: StreamKey) -> bool:
        """Whether what ``later`` does next comes after ``earlier``."""
        stream, position, _ = earlier
        if stream == later or self._host.get(stream, 0) >= position:
            return True
        return self._known.get(later, {}).get(stream, 0) >= position


def _join(into: dict[StreamKey, int], clock: Clock) -> None:
    for stream, position in clock.items():
        if position > into.get(stream, 0):
            into[stream] = position
