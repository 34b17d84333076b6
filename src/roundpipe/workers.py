"""Threads and how they wait: counters that only grow, scopes that fail once, workers.

Every fence of the engine is "wait until this counter is at least n". Such a wait cannot be lost by
clearing a flag at the wrong time, and a stuck one can say who waits for what.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

from .errors import Cancelled
from .trace import logger

Task = Callable[[], None]

# Who waits looks around this often. Python notices a signal that comes just before its thread
# blocks only when that thread runs again: a Ctrl-C would then have to wait as long as the caller.
WAKE_S = 1.0


def wait_log_s() -> float:
    """Seconds after which a wait is logged: ``ROUNDPIPE_WAIT_LOG_S``, default 60."""
    return float(os.environ.get("ROUNDPIPE_WAIT_LOG_S", "60"))


class Scope:
    """The life of one run over several threads: its first failure, and waking up who waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._cancelled = False
        self._waited_on: dict[int, threading.Condition] = {}
        self._followers: list[Scope] = []

    @property
    def error(self) -> BaseException | None:
        """The first failure, if there was one."""
        return self._error

    @property
    def cancelled(self) -> bool:
        """Whether the run is over before its end: nobody starts anything more."""
        return self._cancelled

    def fail(self, error: BaseException) -> bool:
        """Keep ``error`` if it is the first and end the run. Returns whether it was the first."""
        with self._lock:
            first = not self._cancelled
            if first:
                self._error = error
            self._cancelled = True
            conditions = list(self._waited_on.values())
            followers = list(self._followers) if first else []
        # A waiter registers its condition before it looks at `cancelled`, and looks while it holds
        # the condition: so it either sees the flag or is already waiting and hears this notify.
        for condition in conditions:
            with condition:
                condition.notify_all()
        for follower in followers:
            follower.fail(error)
        return first

    def follow(self, other: Scope) -> None:
        """If ``other`` fails, or has failed, so does this run, with the same error.

        Called by a run that waits for what the other one makes.
        """
        with other._lock:
            other._followers.append(self)
            error = other._error
        if error is not None:
            self.fail(error)

    def check(self) -> None:
        """Raise :class:`Cancelled` if the run is over."""
        if self._cancelled:
            raise Cancelled("the run was ended by a failure elsewhere")

    def enter_wait(self, condition: threading.Condition) -> None:
        """Called by a thread about to wait: ``fail`` will notify ``condition``."""
        with self._lock:
            self._waited_on[threading.get_ident()] = condition

    def leave_wait(self) -> None:
        """The thread no longer waits."""
        with self._lock:
            self._waited_on.pop(threading.get_ident(), None)


class Counter:
    """A number that only grows; threads wait until it is large enough."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._value = 0
        self._condition = threading.Condition()

    @property
    def value(self) -> int:
        """The number now."""
        return self._value

    def advance(self, by: int = 1) -> None:
        """Grow by ``by`` and wake whoever waits."""
        with self._condition:
            self._value += by
            self._condition.notify_all()

    def advance_to(self, value: int) -> None:
        """Grow to ``value``; nothing if it is there already."""
        with self._condition:
            if value > self._value:
                self._value = value
                self._condition.notify_all()

    def wait(self, value: int, who: str, scope: Scope | None = None) -> None:
        """Block until the number is at least ``value``.

        Args:
            value: what to wait for.
            who: the waiter, for the log line of a wait that takes long.
            scope: a run whose failure ends the wait.

        Raises:
            Cancelled: ``scope`` failed.
        """
        if self._value >= value:
            return
        if scope is not None:
            scope.enter_wait(self._condition)
        begin_s = logged_s = time.monotonic()
        log_s = wait_log_s()
        try:
            with self._condition:
                while self._value < value:
                    if scope is not None:
                        scope.check()
                    self._condition.wait(min(log_s, WAKE_S))
                    now_s = time.monotonic()
                    if now_s - logged_s >= log_s and self._value < value:
                        logged_s = now_s
                        logger.warning(
                            "%s has waited %.0f s for %s to reach %d (it is at %d)",
                            who, now_s - begin_s, self.name, value, self._value,
                        )  # fmt: skip
        finally:
            if scope is not None:
                scope.leave_wait()


class Uninterrupted:
    """Ctrl-C waits until the block is over: all of it happens, or nothing.

    For a few steps of bookkeeping that others rely on, never around a wait. May be nested. On other
    threads than the main one, where Python raises no ``KeyboardInterrupt``, it does nothing.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._pressed: list[FrameType | None] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # Others than Python functions (SIG_IGN, SIG_DFL, a library's own) raise nothing here.
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._remember)

    def _remember(self, _number: int, frame: FrameType | None) -> None:
        self._pressed.append(frame)

    def __exit__(self, *_exc: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._pressed:
                self._handler(signal.SIGINT, self._pressed.pop())


class Worker:
    """One thread that runs tasks in order, inside ``scope`` (a device's ``worker_scope``).

    Tasks report their failures themselves; one that lets an exception out is a bug of ours, logged.
    """

    def __init__(
        self, name: str, scope: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        self.name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closed = False
        # The thread holds the queue, never the worker's owner: a forgotten owner can be collected.
        self._thread = threading.Thread(
            target=_work, args=(self._tasks, scope, name), name=name, daemon=True
        )
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Run ``task`` after those submitted before."""
        self._tasks.put(task)

    def is_current(self) -> bool:
        """Whether the calling thread is this worker's."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """End the thread after the tasks submitted so far. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._tasks.put(None)
        # A garbage collection may run on the worker itself, which cannot join itself.
        if not self.is_current():
            self._thread.join()


def _work(
    tasks: queue.SimpleQueue[Task | None],
    scope: Callable[[], AbstractContextManager[None]] | None,
    name: str,
) -> None:
    if scope is None:
        _serve(tasks, name)
    else:
        with scope():
            _serve(tasks, name)


def _serve(tasks: queue.SimpleQueue[Task | None], name: str) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        try:
            task()
        except BaseException:  # noqa: BLE001 - logged with its traceback
            logger.exception("a task of %s failed outside a run", name)
        # Dropped before the next wait: an idle worker keeps no run, model or tensor alive.
        del task
