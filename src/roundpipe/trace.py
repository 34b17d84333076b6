"""Logging, and an in-memory event log that tests and pictures read."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

logger = logging.getLogger("roundpipe")

clock_ns = time.perf_counter_ns


class Span(NamedTuple):
    """Something that took time on a device.

    Attributes:
        phase: ``forward``, ``fused``, ``backward``, ``upload``, ``download`` or ``step``.
        device: name of the device; of the model for steps.
        call: number of the call within the model.
        stage: position of the stage within the call, or -1.
        microbatch: index of the microbatch, or -1.
        begin_ns: start, from :data:`clock_ns`.
        end_ns: end. On accelerators both times are those of issuing the work.
    """

    phase: str
    device: str
    call: int
    stage: int
    microbatch: int
    begin_ns: int
    end_ns: int


class EventLog:
    """The latest spans of one model. Appending is safe from any thread and takes no lock.

    Args:
        capacity: spans kept; older ones are forgotten.
    """

    def __init__(self, capacity: int = 16384) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)

    def add(self, span: Span) -> None:
        """Keep a span."""
        self._spans.append(span)

    def __iter__(self) -> Iterator[Span]:
        return iter(list(self._spans))

    def __len__(self) -> int:
        return len(self._spans)

    def clear(self) -> None:
        """Forget all spans."""
        self._spans.clear()
