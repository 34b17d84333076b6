"""Streams and events behave as those of a real accelerator, seen through torch alone."""

import threading

import pytest
import torch

from support import fakeacc


def test_it_is_the_accelerator_of_the_process() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator == torch.device("fakeacc")
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.is_available()
    dtypes = torch.accelerator.get_device_capability("fakeacc:1")["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool} <= dtypes


def test_a_kernel_runs_after_the_call_returns() -> None:
    stream = torch.accelerator.current_stream()
    x = torch.ones(4, device="fakeacc")
    with fakeacc.hold(stream):
        y = x + 1
        assert not stream.query()
    stream.synchronize()
    assert stream.query()
    assert y.tolist() == [2.0] * 4


def test_tasks_of_one_stream_run_in_order_and_of_two_streams_do_not_wait() -> None:
    first, second = torch.Stream("fakeacc:0"), torch.Stream("fakeacc:0")
    with fakeacc.hold(first):
        with first:
            slow = torch.zeros(1, device="fakeacc:0")
        with second:
            quick = torch.full((1,), 2.0, device="fakeacc:0")
            assert quick.item() == 2.0
        with first:
            slow = slow + 1
            slow = slow * 3
        assert not first.query()
    first.synchronize()
    assert slow.item() == 3.0


def test_current_device_and_stream_belong_to_the_thread() -> None:
    stream = torch.Stream("fakeacc:1")
    seen: list[object] = []

    def look() -> None:
        seen.append(torch.accelerator.current_device_index())
        seen.append(torch.accelerator.current_stream("fakeacc:1"))

    with stream:
        assert torch.accelerator.current_stream("fakeacc:1") == stream
        assert torch.accelerator.current_device_index() == 1
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen[0] == 0
    assert seen[1] != stream
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream("fakeacc:1") == seen[1]


def test_device_index_context_and_set_stream() -> None:
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device="fakeacc").device == torch.device("fakeacc:1")
    default = torch.accelerator.current_stream()
    stream = torch.Stream("fakeacc:0")
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == stream
    torch.accelerator.set_stream(default)


def test_new_streams_are_not_the_default_one_and_differ() -> None:
    streams = [torch.Stream("fakeacc:0") for _ in range(8)]
    default = torch.accelerator.current_stream("fakeacc:0")
    assert len({stream.stream_id for stream in [default, *streams]}) == 9


def test_an_event_is_done_when_its_stream_gets_there() -> None:
    stream = torch.Stream("fakeacc:0")
    event = torch.Event("fakeacc:0")
    assert event.query()  # never recorded: nothing to wait for
    event.synchronize()
    with fakeacc.hold(stream):
        event.record(stream)
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_a_wait_binds_to_the_record_it_saw() -> None:
    producer, consumer = torch.Stream("fakeacc:0"), torch.Stream("fakeacc:1")
    event = torch.Event("fakeacc:0")
    event.record(producer)
    producer.synchronize()
    consumer.wait_event(event)
    with fakeacc.hold(producer):
        event.record(producer)  # a later record, which the consumer does not wait for
        consumer.synchronize()
    event.synchronize()


def test_a_waiting_stream_stands_still() -> None:
    producer, consumer = torch.Stream("fakeacc:0"), torch.Stream("fakeacc:1")
    with fakeacc.hold(producer):
        consumer.wait_stream(producer)
        recorded = producer.record_event()
        consumer.wait_event(recorded)
        after = consumer.record_event()
        assert not after.query()
    after.synchronize()
    assert recorded.query()


def test_elapsed_time_needs_timing_and_completion() -> None:
    begin = torch.Event("fakeacc:0", enable_timing=True)
    end = torch.Event("fakeacc:0", enable_timing=True)
    x = torch.zeros(1, device="fakeacc:0")
    with fakeacc.latency(kernel_ms=5.0):
        begin.record()
        x.add_(1)
        end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 5.0
    untimed = torch.Event("fakeacc:0")
    untimed.record()
    untimed.synchronize()
    with pytest.raises(ValueError, match="enable_timing=True"):
        begin.elapsed_time(untimed)


def test_an_event_stays_with_its_device() -> None:
    event = torch.Event("fakeacc:0")
    event.record(torch.Stream("fakeacc:0"))
    with pytest.raises(RuntimeError, match="cannot be recorded on a stream of fakeacc:1"):
        event.record(torch.Stream("fakeacc:1"))


def test_synchronize_waits_for_every_stream_of_one_device() -> None:
    streams = [torch.Stream("fakeacc:0") for _ in range(3)]
    other = torch.Stream("fakeacc:1")
    with fakeacc.hold(other):
        held = other.record_event()
        events = [stream.record_event() for stream in streams]
        torch.accelerator.synchronize("fakeacc:0")
        assert all(event.query() for event in events)
        assert not held.query()


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"invalid device fakeacc:2: there are 2 devices"):
        torch.accelerator.set_device_index(2)
    with pytest.raises(RuntimeError, match=r"invalid device fakeacc:2"):
        torch.empty(1, device="fakeacc:2")


def test_copies_and_kernels_overlap() -> None:
    """Five copies and five kernels of 20 ms: one after the other they would take 200 ms."""
    copies, kernels = torch.Stream("fakeacc:0"), torch.Stream("fakeacc:0")
    host = torch.zeros(8, pin_memory=True)
    with copies:
        target = torch.empty(8, device="fakeacc:0")
    with kernels:
        x = torch.zeros(8, device="fakeacc:0")
    torch.accelerator.synchronize("fakeacc:0")
    begin = torch.Event("fakeacc:0", enable_timing=True)
    end = torch.Event("fakeacc:0", enable_timing=True)
    with fakeacc.latency(copy_ms=20.0, kernel_ms=20.0):
        begin.record(kernels)
        for _ in range(5):
            with copies:
                target.copy_(host, non_blocking=True)
            with kernels:
                x.add_(1)
        kernels.wait_stream(copies)
        end.record(kernels)
    end.synchronize()
    assert 100.0 <= begin.elapsed_time(end) < 190.0


def test_the_process_keeps_its_number_of_devices() -> None:
    assert fakeacc.load(2) is torch.get_device_module("fakeacc")
    with pytest.raises(RuntimeError, match="2 devices already, 4 are not to be had"):
        fakeacc.load(4)
