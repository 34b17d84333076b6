"""Seeing that a thread waits, without waiting for time to pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from unittest import mock

from roundpipe.workers import Counter, Scope


class Waits:
    """Tells when a thread comes to a wait that blocks, by the name of the counter."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._names: list[str] = []
        self._over = False

    def note(self, name: str) -> None:
        with self._condition:
            self._names.append(name)
            self._condition.notify_all()

    def end(self) -> None:
        with self._condition:
            self._over = True
            self._condition.notify_all()

    def blocked_on(self, part: str) -> bool:
        """Block until somebody waits for a counter of that name, or the work is over instead."""
        with self._condition:
            self._condition.wait_for(lambda: self._over or any(part in n for n in self._names))
            return any(part in name for name in self._names)


@contextlib.contextmanager
def watched_waits() -> Iterator[Waits]:
    """Within it, every wait for a counter that blocks is noticed."""
    seen, original = Waits(), Counter.wait

    def wait(self: Counter, value: int, who: str, scope: Scope | None = None) -> None:
        if self.value < value:
            seen.note(self.name)
        original(self, value, who, scope)

    with mock.patch.object(Counter, "wait", wait):
        yield seen


def start(waits: Waits, function: Callable[[], object]) -> Future[object]:
    """Run something that shall wait on a thread of its own."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        finally:
            waits.end()

    threading.Thread(target=run, daemon=True).start()
    return future
