"""Copy streams of checked CPU devices: in-order queues, each with its thread, and their events."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from roundpipe.workers import Counter

from .base import Event
from .clocks import Clock, StreamKey
from .tracking import Tracker


class Deliveries:
    """How often a failed copy's exception was handed to somebody; orders failures and events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def deliver(self, failure: Failure) -> None:
        """Note that the exception was raised to somebody."""
        with self._lock:
            if failure.delivered_at is None:
                failure.delivered_at = self.count
                self.count += 1


@dataclass(eq=False)
class Failure:
    """A copy that failed.

    Every event recorded behind it raises its exception, until somebody has been told; events
    recorded after that are clean, so that a pool is usable once a failure was dealt with.
    """

    error: BaseException
    delivered_at: int | None = None

    @property
    def is_untold(self) -> bool:
        """Whether nobody was told yet."""
        return self.delivered_at is None

    def concerns(self, event: CopyEvent) -> bool:
        """Whether ``event``, behind the failure on its stream, raises it."""
        return self.delivered_at is None or event.born <= self.delivered_at


class CopyEvent(Event):
    """A point in a copy stream.

    Attributes:
        clock: what is over once it has passed, in the numbers of ``tracker``.
        tracker: the bookkeeping of its pool.
        born: number of failures told when it was recorded.
    """

    def __init__(self, stream: CopyStream, position: int, clock: Clock, tracker: Tracker) -> None:
        self._passed = stream.passed
        self._position = position
        self.tracker = tracker
        self._deliveries = stream.deliveries
        self.clock = clock
        self.born = stream.deliveries.count
        self.failures: list[Failure] = []

    def query(self) -> bool:
        """Whether the stream has passed this point."""
        if self._passed.value < self._position:
            return False
        with self.tracker.locked():
            self.tracker.clocks.host_saw(self.clock)
        return True

    def synchronize(self) -> None:
        """Block until the stream has passed this point.

        Raises:
            BaseException: what a copy before this point failed with.
        """
        self.wait_passed()
        with self.tracker.locked():
            self.tracker.clocks.host_saw(self.clock)
        self.raise_failure()

    def wait_passed(self) -> None:
        """Block until the stream has passed this point; nothing more."""
        self._passed.wait(self._position, threading.current_thread().name)

    def raise_failure(self) -> None:
        """Raise what failed before this point, if anything did and the point has passed."""
        for failure in self.failures:
            self._deliveries.deliver(failure)
            raise failure.error


class ComputePoint(Event):
    """A point in a device's compute, which runs eagerly: passed when it was recorded.

    Attributes:
        clock: what is over, in the numbers of ``tracker``.
        tracker: the bookkeeping of its pool.
    """

    def __init__(self, clock: Clock, tracker: Tracker) -> None:
        self.clock = clock
        self.tracker = tracker

    def query(self) -> bool:
        """True."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Return at once."""
        with self.tracker.locked():
            self.tracker.clocks.host_saw(self.clock)


@dataclass
class _Operation:
    """What the thread runs; a position of 0 is none, for work that no event waits for."""

    run: Callable[[], None]
    position: int = 0


@dataclass
class _State:
    """What the thread holds: never the stream, so that a forgotten one can be collected."""

    operations: queue.SimpleQueue[_Operation | None]
    passed: Counter
    failures: list[Failure] = field(default_factory=list)


class CopyStream:
    """A queue of copies, records and waits, run in order by a thread of its own.

    Enqueuing happens with the tracker's lock held, so that the queue's order is that of the clocks.

    Attributes:
        key: which stream it is.
        passed: number of the last operation that is over.
    """

    def __init__(self, key: StreamKey, deliveries: Deliveries) -> None:
        self.key = key
        self.deliveries = deliveries
        self.passed = Counter(str(key))
        self._state = _State(queue.SimpleQueue(), self.passed)
        self._is_closed = False
        self._thread = threading.Thread(
            target=_serve, args=(self._state,), name=f"roundpipe-{key}", daemon=True
        )
        self._thread.start()

    def enqueue_copy(self, position: int, copy: Callable[[], None]) -> None:
        """Run ``copy``; what it raises belongs to the events recorded behind it."""
        self._state.operations.put(_Operation(_copy_of(self._state, copy), position))

    def enqueue_record(self, position: int, event: CopyEvent) -> None:
        """Let ``event`` pass."""
        self._state.operations.put(_Operation(_record_of(self._state, event), position))

    def enqueue_wait(self, position: int, event: CopyEvent) -> None:
        """Run nothing more before ``event`` has passed."""
        self._state.operations.put(_Operation(_wait_of(self._state, event), position))

    def enqueue_untold(self, work: Callable[[], None]) -> None:
        """Run ``work`` in order, as what no event waits for. Any thread, at any moment.

        A closed stream forgets it: what is enqueued there would never run, nor go.
        """
        if self._is_closed:
            return
        self._state.operations.put(_Operation(work))

    def close(self) -> None:
        """End the thread after what is enqueued. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._state.operations.put(None)
        # A garbage collection may run on the stream's own thread.
        if self._thread is not threading.current_thread():
            self._thread.join()


def _copy_of(state: _State, copy: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            copy()
        except BaseException as error:  # noqa: BLE001 - it goes home with the next events
            state.failures.append(Failure(error))

    return run


def _record_of(state: _State, event: CopyEvent) -> Callable[[], None]:
    def run() -> None:
        # What does not concern this event concerns none behind it.
        state.failures = [failure for failure in state.failures if failure.concerns(event)]
        event.failures = list(state.failures)

    return run


def _wait_of(state: _State, event: CopyEvent) -> Callable[[], None]:
    def run() -> None:
        event.wait_passed()
        # What follows builds on what failed there.
        state.failures += [f for f in event.failures if f not in state.failures]

    return run


def _serve(state: _State) -> None:
    while True:
        operation = state.operations.get()
        if operation is None:
            return
        operation.run()
        if operation.position:
            state.passed.advance_to(operation.position)
        # Dropped before the next wait: an idle stream keeps no tensor alive.
        del operation
