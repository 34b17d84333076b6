"""Failures on copy streams: whom they reach, and until when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from roundpipe.devices import CheckedPool, CpuChecks, open_cpu_pool
from roundpipe.devices.base import Category, Device, Event, Stream


@pytest.fixture
def pool() -> Iterator[CheckedPool]:
    with open_cpu_pool(2, CpuChecks()) as opened:
        yield opened


def copy_something(device: Device, stream: Stream) -> Event:
    there = device.empty(torch.empty(4), stream, Category.ACTIVATIONS)
    device.copy(there, torch.ones(4), stream)
    return device.record(stream)


def test_a_failure_does_not_get_lost_when_the_first_event_behind_it_does(
    pool: CheckedPool,
) -> None:
    device = pool.devices[0]
    pool.fail_copy(OSError("lost"), Stream.INWARD)
    copy_something(device, Stream.INWARD)
    later = copy_something(device, Stream.INWARD)
    with pytest.raises(OSError, match="lost"):
        later.synchronize()


def test_asking_raises_nothing(pool: CheckedPool) -> None:
    pool.fail_copy(OSError("lost"), Stream.INWARD)
    event = copy_something(pool.devices[0], Stream.INWARD)
    with pytest.raises(OSError, match="lost"):
        event.synchronize()
    assert event.query()


def test_a_failure_follows_waits_to_other_streams_and_devices(pool: CheckedPool) -> None:
    first, second = pool.devices
    failure = OSError("far away")
    pool.fail_copy(failure, Stream.OUTWARD, device=0)
    second.wait(Stream.INWARD, copy_something(first, Stream.OUTWARD))
    event = copy_something(second, Stream.INWARD)
    with pytest.raises(OSError, match="far away") as caught:
        second.wait(Stream.COMPUTE, event)
    assert caught.value is failure
    # Told once, it concerns neither stream's later work.
    copy_something(second, Stream.INWARD).synchronize()
    copy_something(first, Stream.OUTWARD).synchronize()


def test_streams_that_do_not_wait_for_it_do_not_hear_of_a_failure(pool: CheckedPool) -> None:
    device = pool.devices[0]
    pool.fail_copy(OSError("here"), Stream.OUTWARD)
    failed = copy_something(device, Stream.OUTWARD)
    copy_something(device, Stream.INWARD).synchronize()
    copy_something(device, Stream.WEIGHTS).synchronize()
    with pytest.raises(OSError, match="here"):
        failed.synchronize()


def test_synchronize_raises_what_nobody_was_told_and_clears_the_rest(pool: CheckedPool) -> None:
    device = pool.devices[0]
    pool.fail_copy(OSError("first"), Stream.WEIGHTS)
    pool.fail_copy(OSError("second"), Stream.OUTWARD)
    copy_something(device, Stream.WEIGHTS)
    copy_something(device, Stream.OUTWARD)
    with pytest.raises(OSError, match="first"):
        device.synchronize()
    device.synchronize()
    copy_something(device, Stream.OUTWARD).synchronize()


def test_any_exception_object_will_do(pool: CheckedPool) -> None:
    pool.fail_copy(KeyboardInterrupt(), Stream.WEIGHTS)
    event = copy_something(pool.devices[0], Stream.WEIGHTS)
    with pytest.raises(KeyboardInterrupt):
        event.synchronize()
