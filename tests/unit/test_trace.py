"""The event log: what is kept, who listens, what a recording holds."""

from __future__ import annotations

from roundpipe.trace import EventLog, Span


def span(call: int) -> Span:
    return Span("forward", "cpu:0", call, 0, 0, 10 * call, 10 * call + 5)


def test_the_latest_spans_are_kept() -> None:
    log = EventLog(capacity=3)
    for call in range(5):
        log.add(span(call))
    assert [each.call for each in log] == [2, 3, 4]
    assert len(log) == 3
    log.clear()
    assert list(log) == []


def test_a_recording_holds_everything_of_its_time_however_much() -> None:
    log = EventLog(capacity=2)
    log.add(span(0))
    with log.recording() as outer:
        log.add(span(1))
        with log.recording() as inner:
            log.add(span(2))
            log.add(span(3))
        log.add(span(4))
    log.add(span(5))
    assert [each.call for each in outer] == [1, 2, 3, 4]
    assert [each.call for each in inner] == [2, 3]


def test_a_listener_hears_every_span() -> None:
    log, heard = EventLog(), list[Span]()
    log.listen(heard.append)
    with log.recording():
        log.add(span(1))
    log.add(span(2))
    assert [each.call for each in heard] == [1, 2]
