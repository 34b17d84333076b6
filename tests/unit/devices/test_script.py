"""Holding copies back, delaying them, letting them fail."""

from __future__ import annotations

import threading

import pytest

from roundpipe.devices.base import Stream
from roundpipe.devices.clocks import StreamKey
from roundpipe.devices.script import CopyInfo, CopyScript, CpuChecks

WEIGHTS = StreamKey(0, Stream.WEIGHTS)


def copies_that_fail(script: CopyScript, stream: StreamKey, count: int) -> list[int]:
    failed = []
    for number in range(count):
        try:
            script.before_copy(stream, ())
        except ValueError:
            failed.append(number)
    return failed


def test_the_nth_copy_fails_and_no_other() -> None:
    script = CopyScript(CpuChecks())
    script.fail(ValueError("no"), Stream.WEIGHTS, 0, after=2)
    assert copies_that_fail(script, StreamKey(0, Stream.INWARD), 4) == []
    assert copies_that_fail(script, StreamKey(1, Stream.WEIGHTS), 4) == []
    assert copies_that_fail(script, WEIGHTS, 5) == [2]


def test_without_a_device_copies_of_all_devices_count() -> None:
    script = CopyScript(CpuChecks())
    script.fail(ValueError("no"), Stream.WEIGHTS, None, after=3)
    assert copies_that_fail(script, WEIGHTS, 2) == []
    assert copies_that_fail(script, StreamKey(1, Stream.WEIGHTS), 4) == [1]


def test_a_hold_lets_copies_pass_and_then_holds() -> None:
    script = CopyScript(CpuChecks())
    hold = script.hold(Stream.WEIGHTS, 0, after=1)
    script.before_copy(WEIGHTS, ())
    assert not hold.is_reached
    passed = threading.Event()

    def late() -> None:
        script.before_copy(WEIGHTS, ())
        passed.set()

    thread = threading.Thread(target=late)
    with hold:
        thread.start()
        hold.wait_reached()
        assert hold.is_reached
        assert not passed.is_set()
    thread.join()
    assert passed.is_set()


def test_a_closed_script_holds_nothing() -> None:
    script = CopyScript(CpuChecks())
    earlier = script.hold(Stream.WEIGHTS, None, after=0)
    script.close()
    script.hold(Stream.WEIGHTS, None, after=0)
    script.before_copy(WEIGHTS, ())
    assert earlier.is_reached


def test_the_hook_hears_of_each_copy_and_may_fail_it() -> None:
    heard: list[CopyInfo] = []

    def hook(copy: CopyInfo) -> None:
        heard.append(copy)
        if copy.number == 1:
            raise KeyError("second")

    script = CopyScript(CpuChecks(on_copy=hook))
    script.before_copy(WEIGHTS, (2, 3))
    with pytest.raises(KeyError, match="second"):
        script.before_copy(WEIGHTS, ())
    script.before_copy(StreamKey(1, Stream.WEIGHTS), ())
    assert heard == [
        CopyInfo(0, Stream.WEIGHTS, 0, (2, 3)),
        CopyInfo(0, Stream.WEIGHTS, 1, ()),
        CopyInfo(1, Stream.WEIGHTS, 0, ()),
    ]


def test_delays_are_the_same_in_every_run_whatever_the_order_of_the_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def delays(seed: int, order: list[Stream]) -> dict[Stream, list[float]]:
        slept: dict[Stream, list[float]] = {stream: [] for stream in order}
        script = CopyScript(CpuChecks(delay_seed=seed, max_delay_s=0.5))
        for stream in order:
            monkeypatch.setattr("time.sleep", slept[stream].append)
            script.before_copy(StreamKey(0, stream), ())
        return slept

    order = [Stream.WEIGHTS, Stream.INWARD, Stream.WEIGHTS, Stream.OUTWARD, Stream.INWARD]
    first = delays(1, order)
    assert first == delays(1, order[::-1])
    assert first != delays(2, order)
    drawn = [delay for stream in first.values() for delay in stream]
    assert len(set(drawn)) == len(order)
    assert all(0 <= delay <= 0.5 for delay in drawn)
