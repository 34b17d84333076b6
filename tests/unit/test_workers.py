"""Counters, scopes and workers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import pytest

from roundpipe.errors import Cancelled
from roundpipe.trace import logger
from roundpipe.workers import Counter, Scope, Worker, wait_log_s
from support.faults import InjectedError, no_thread_left


def test_a_counter_only_grows() -> None:
    counter = Counter("c")
    counter.advance()
    counter.advance(2)
    counter.advance_to(2)
    assert counter.value == 3
    counter.advance_to(5)
    assert counter.value == 5
    counter.wait(5, "nobody")


def test_a_wait_ends_when_the_number_is_reached_and_not_before() -> None:
    counter, seen = Counter("c"), list[int]()
    with no_thread_left():
        worker = Worker("waiter")
        worker.submit(lambda: counter.wait(2, "waiter"))
        worker.submit(lambda: seen.append(counter.value))
        counter.advance()
        counter.advance()
        worker.close()
    assert seen == [2]


def test_a_failed_scope_wakes_who_waits_and_lets_nobody_begin() -> None:
    counter, scope, ended = Counter("c"), Scope(), list[str]()

    def wait() -> None:
        with pytest.raises(Cancelled, match="the run was ended by a failure elsewhere"):
            counter.wait(1, "waiter", scope)
        ended.append("waiter")

    with no_thread_left():
        worker = Worker("waiter")
        worker.submit(wait)
        first, second = InjectedError("first"), InjectedError("second")
        assert scope.fail(first)
        assert not scope.fail(second)
        worker.close()
    assert ended == ["waiter"]
    assert scope.error is first
    assert scope.cancelled
    with pytest.raises(Cancelled, match="ended by a failure elsewhere"):
        scope.check()
    # What is there already needs no wait, also in a run that is over.
    counter.advance()
    counter.wait(1, "late", scope)


def test_a_long_wait_says_who_waits_for_what(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROUNDPIPE_WAIT_LOG_S", "0.001")
    counter, logged = Counter("uploads of layer 3"), threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    handler = Handler()
    logger.addHandler(handler)
    try:
        worker = Worker("w")
        worker.submit(logged.wait)  # type: ignore[arg-type]
        worker.submit(lambda: counter.advance(2))
        counter.wait(2, "cpu:1, stage 2")
        worker.close()
    finally:
        logger.removeHandler(handler)
    message = caplog.records[0].getMessage()
    assert message.startswith("cpu:1, stage 2 has waited ")
    assert message.endswith(" s for uploads of layer 3 to reach 2 (it is at 0)")


def test_how_long_a_wait_may_be_silent_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROUNDPIPE_WAIT_LOG_S", raising=False)
    assert wait_log_s() == 60.0
    monkeypatch.setenv("ROUNDPIPE_WAIT_LOG_S", "2.5")
    assert wait_log_s() == 2.5


def test_a_worker_runs_tasks_in_order_inside_its_scope() -> None:
    order: list[str] = []

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        order.append("in")
        yield
        order.append("out")

    with no_thread_left():
        worker = Worker("w", scope)
        for number in range(3):
            worker.submit(lambda number=number: order.append(str(number)))  # type: ignore[misc]
        worker.submit(lambda: order.append(str(worker.is_current())))
        worker.close()
        worker.close()
    assert order == ["in", "0", "1", "2", "True", "out"]
    assert not worker.is_current()


def test_a_worker_outlives_a_task_that_raises_and_logs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise InjectedError("a bug")

    worker = Worker("w")
    worker.submit(fail)
    worker.submit(lambda: ran.append(1))
    worker.close()
    assert ran == [1]
    assert caplog.records[0].getMessage() == "a task of w failed outside a run"
    assert caplog.records[0].exc_info is not None


def test_a_worker_closed_by_its_own_task_ends_without_waiting_for_itself() -> None:
    with no_thread_left():
        worker = Worker("w")
        worker.submit(worker.close)
        worker._thread.join()
