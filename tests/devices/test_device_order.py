"""Streams and events: what comes after what, shown by holding streams back, never by sleeping."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from roundpipe.devices import DevicePool
from roundpipe.devices.base import Category, Device, Stream
from support.backends import Backend, run_on

COPY_STREAMS = [Stream.WEIGHTS, Stream.INWARD, Stream.OUTWARD]


def held(backend: Backend, device: Device, stream: Stream) -> AbstractContextManager[None]:
    hold = backend.hold(device, stream)
    if hold is None:
        pytest.skip(f"streams of {backend.name} cannot be held back")
    return hold


@pytest.fixture
def device(pool: DevicePool) -> Device:
    return pool.devices[0]


def put(device: Device, host: torch.Tensor, stream: Stream) -> torch.Tensor:
    there = device.empty(host, stream, Category.ACTIVATIONS)
    device.copy(there, host, stream)
    return there


def get(device: Device, there: torch.Tensor) -> torch.Tensor:
    back = device.host_empty(there)
    device.copy(back, there, Stream.OUTWARD)
    device.record(Stream.OUTWARD).synchronize()
    return back


@pytest.mark.parametrize("stream", COPY_STREAMS)
def test_an_event_passes_when_the_copies_before_it_have_run(
    backend: Backend, device: Device, stream: Stream
) -> None:
    with held(backend, device, stream):
        put(device, torch.ones(4), stream)
        event = device.record(stream)
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_an_event_does_not_wait_for_what_comes_after_it(backend: Backend, device: Device) -> None:
    before = put(device, torch.ones(4), Stream.INWARD)
    event = device.record(Stream.INWARD)
    event.synchronize()
    with held(backend, device, Stream.INWARD):
        after = put(device, torch.ones(4), Stream.INWARD)
        assert event.query()
        event.synchronize()
    device.synchronize()
    del before, after


def test_each_record_is_a_point_of_its_own(backend: Backend, device: Device) -> None:
    early = device.record(Stream.WEIGHTS)
    early.synchronize()
    with held(backend, device, Stream.WEIGHTS):
        there = put(device, torch.ones(4), Stream.WEIGHTS)
        late = device.record(Stream.WEIGHTS)
        assert early.query()
        assert not late.query()
    late.synchronize()
    del there


def test_copies_of_one_stream_run_in_order(device: Device) -> None:
    there = device.empty(torch.empty(8), Stream.INWARD, Category.ACTIVATIONS)
    for value in range(5):
        device.copy(there, torch.full((8,), float(value)), Stream.INWARD)
    device.wait(Stream.OUTWARD, device.record(Stream.INWARD))
    assert torch.equal(get(device, there), torch.full((8,), 4.0))
    device.wait(Stream.INWARD, device.record(Stream.OUTWARD))


def test_streams_do_not_wait_for_each_other_by_themselves(backend: Backend, device: Device) -> None:
    with held(backend, device, Stream.WEIGHTS):
        weights = put(device, torch.ones(4), Stream.WEIGHTS)
        activations = put(device, torch.ones(4), Stream.INWARD)
        device.record(Stream.INWARD).synchronize()
        assert not device.record(Stream.WEIGHTS).query()
    device.synchronize()
    del weights, activations


def test_a_stream_that_waits_reads_what_was_copied_late(backend: Backend, device: Device) -> None:
    with held(backend, device, Stream.INWARD):
        there = put(device, torch.arange(4.0), Stream.INWARD)
        device.wait(Stream.OUTWARD, device.record(Stream.INWARD))
        back = device.host_empty(there)
        device.copy(back, there, Stream.OUTWARD)
        home = device.record(Stream.OUTWARD)
        assert not home.query()
    home.synchronize()
    assert torch.equal(back, torch.arange(4.0))
    device.wait(Stream.INWARD, home)


def test_compute_that_waits_reads_what_was_copied_late(backend: Backend, pool: DevicePool) -> None:
    device = pool.devices[0]

    def compute() -> torch.Tensor:
        there = put(device, torch.arange(4.0), Stream.WEIGHTS)
        device.wait(Stream.COMPUTE, device.record(Stream.WEIGHTS))
        with device.compute_scope():
            result = there * 2
        device.mark_use(there, Stream.COMPUTE)
        return result

    with held(backend, device, Stream.WEIGHTS):
        # On CPU devices the wait blocks the worker, so the future is not asked in here.
        future = run_on(pool, 0, compute)
    result = future.result()
    device.wait(Stream.OUTWARD, device.record(Stream.COMPUTE))
    assert torch.equal(get(device, result), torch.arange(4.0) * 2)
    device.wait(Stream.COMPUTE, device.record(Stream.OUTWARD))


def test_a_copy_stream_waits_for_compute(pool: DevicePool) -> None:
    device = pool.devices[0]
    there = put(device, torch.ones(64, 64), Stream.WEIGHTS)
    device.wait(Stream.COMPUTE, device.record(Stream.WEIGHTS))
    with device.compute_scope():
        result = there
        for _ in range(10):
            result = result @ there / 64
    device.mark_use(there, Stream.COMPUTE)
    device.wait(Stream.OUTWARD, device.record(Stream.COMPUTE))
    assert torch.equal(get(device, result), torch.ones(64, 64))
    device.wait(Stream.COMPUTE, device.record(Stream.OUTWARD))


def test_a_device_waits_for_another_ones_event(backend: Backend, pool: DevicePool) -> None:
    first, second = pool.devices
    source = put(first, torch.arange(6.0), Stream.INWARD)
    first.wait(Stream.OUTWARD, first.record(Stream.INWARD))
    with held(backend, first, Stream.OUTWARD):
        host = first.host_empty(source)
        first.copy(host, source, Stream.OUTWARD)
        arrived = first.record(Stream.OUTWARD)
        second.wait(Stream.INWARD, arrived)
        there = put(second, host, Stream.INWARD)
        ready = second.record(Stream.INWARD)
        assert not ready.query()
    second.wait(Stream.OUTWARD, ready)
    assert torch.equal(get(second, there), torch.arange(6.0))
    first.wait(Stream.INWARD, arrived)
    second.wait(Stream.INWARD, second.record(Stream.OUTWARD))


def test_a_copy_from_device_to_device(pool: DevicePool) -> None:
    first, second = pool.devices
    source = put(first, torch.arange(6.0), Stream.INWARD)
    second.wait(Stream.INWARD, first.record(Stream.INWARD))
    target = put(second, source, Stream.INWARD)
    ready = second.record(Stream.INWARD)
    first.wait(Stream.INWARD, ready)
    second.wait(Stream.OUTWARD, ready)
    assert torch.equal(get(second, target), torch.arange(6.0))
    second.wait(Stream.INWARD, second.record(Stream.OUTWARD))


def test_waiting_for_compute_of_another_device(pool: DevicePool) -> None:
    first, second = pool.devices
    with first.compute_scope():
        made = first.empty(torch.empty(4), Stream.COMPUTE, Category.ACTIVATIONS)
        made.fill_(3.0)
    second.wait(Stream.INWARD, first.record(Stream.COMPUTE))
    target = put(second, made, Stream.INWARD)
    ready = second.record(Stream.INWARD)
    second.wait(Stream.COMPUTE, ready)
    first.wait(Stream.COMPUTE, ready)
    with second.compute_scope():
        doubled = target * 2
    second.mark_use(target, Stream.COMPUTE)
    second.wait(Stream.OUTWARD, second.record(Stream.COMPUTE))
    assert torch.equal(get(second, doubled), torch.full((4,), 6.0))
    second.wait(Stream.COMPUTE, second.record(Stream.OUTWARD))


def test_a_copy_on_the_compute_stream(device: Device) -> None:
    with device.compute_scope():
        made = device.empty(torch.empty(4), Stream.COMPUTE, Category.ACTIVATIONS)
        made.fill_(2.0)
        kept = device.empty(made, Stream.COMPUTE, Category.ACTIVATIONS)
        device.copy(kept, made, Stream.COMPUTE)
        made.fill_(5.0)
    device.wait(Stream.OUTWARD, device.record(Stream.COMPUTE))
    assert torch.equal(get(device, kept), torch.full((4,), 2.0))
    device.wait(Stream.COMPUTE, device.record(Stream.OUTWARD))


def test_synchronize_waits_for_every_stream(backend: Backend, device: Device) -> None:
    tensors = [put(device, torch.ones(1024), stream) for stream in COPY_STREAMS]
    events = [device.record(stream) for stream in Stream]
    device.synchronize()
    assert all(event.query() for event in events)
    assert len(tensors) == len(COPY_STREAMS)


def test_any_thread_may_ask_and_wait(pool: DevicePool) -> None:
    there = put(pool.devices[0], torch.ones(4), Stream.INWARD)
    event = pool.devices[0].record(Stream.INWARD)
    assert run_on(pool, 1, event.synchronize).result() is None
    assert run_on(pool, 1, event.query).result()
    del there
