"""Logging, and an in-memory event log that tests and pictures read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

logger = logging.getLogger("roundpipe")

clock_ns = time.perf_counter_ns


class Span(NamedTuple):
    """Something that took time on a device.

    Attributes:
        phase: ``forward``, ``fused``, ``recompute`` or ``backward`` of a stage on a microbatch (on
            devices whose memory is the host's, ``backward`` contains the recompute); ``upload`` of
            weights or ``download`` of gradients; ``step`` and ``publish`` of the optimizer thread;
            ``step_wait`` of a device that waits for parameters, or of the caller for a step.
        device: name of the device; of the model for steps and the caller's waits.
        call: number of the call within the model; -1 for steps.
        stage: position of the stage within the call, or -1.
        microbatch: index of the microbatch, or -1.
        begin_ns: start, from :data:`clock_ns`. On accelerators both times are those at which the
            device's streams got there.
        end_ns: end.
        iteration: how many steps the model had been given before.
        layers: the stage.
        nbytes: bytes moved by a transfer.
    """

    phase: str
    device: str
    call: int
    stage: int
    microbatch: int
    begin_ns: int
    end_ns: int
    iteration: int = 0
    layers: range = range(0)
    nbytes: int = 0


class EventLog:
    """The latest spans of one model. Appending is safe from any thread and takes no lock.

    Args:
        capacity: spans kept; older ones are forgotten.
    """

    def __init__(self, capacity: int = 16384) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        # Replaced as a whole, never changed: `add` on other threads reads it without a lock.
        self._listeners: tuple[Callable[[Span], None], ...] = ()

    def add(self, span: Span) -> None:
        """Keep a span."""
        self._spans.append(span)
        for listener in self._listeners:
            listener(span)

    def listen(self, listener: Callable[[Span], None]) -> None:
        """From now on, ``listener`` hears every span, on the thread that adds it."""
        self._listeners = (*self._listeners, listener)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Within it, all spans also go into the list that it gives, however many they are.

        To be entered and left by one thread at a time.
        """
        spans: list[Span] = []
        add = spans.append
        self.listen(add)
        try:
            yield spans
        finally:
            self._listeners = tuple(each for each in self._listeners if each is not add)

    def __iter__(self) -> Iterator[Span]:
        return iter(list(self._spans))

    def __len__(self) -> int:
        return len(self._spans)

    def clear(self) -> None:
        """Forget all spans."""
        self._spans.clear()
