"""How long memory has to live, how failures travel, and how devices end."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from roundpipe.devices import DevicePool
from roundpipe.devices.base import Category, Stream
from roundpipe.errors import StateError
from support.backends import Backend, CheckedCpu, run_on


def threads_of_pools() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("roundpipe-")}


def test_memory_marked_as_used_outlives_its_tensor(backend: Backend, pool: DevicePool) -> None:
    device = pool.devices[0]
    with device.compute_scope():
        made = device.empty(torch.empty(1024), Stream.COMPUTE, Category.GRADIENTS)
        made.fill_(7.0)
    back = device.host_empty(made)
    device.wait(Stream.OUTWARD, device.record(Stream.COMPUTE))
    hold = backend.hold(device, Stream.OUTWARD)
    if hold is None:
        pytest.skip(f"streams of {backend.name} cannot be held back")
    with hold:
        device.copy(back, made, Stream.OUTWARD)
        device.mark_use(made, Stream.OUTWARD)
        home = device.record(Stream.OUTWARD)
        del made
        with device.compute_scope():
            # An allocator would hand out the same memory, were it not marked.
            other = device.empty(torch.empty(1024), Stream.COMPUTE, Category.GRADIENTS)
            other.fill_(-1.0)
    home.synchronize()
    assert torch.equal(back, torch.full((1024,), 7.0))


def test_memory_may_go_once_its_stream_has_waited_for_the_use(pool: DevicePool) -> None:
    device = pool.devices[0]
    there = device.empty(torch.empty(1024), Stream.WEIGHTS, Category.WEIGHTS)
    device.copy(there, torch.ones(1024), Stream.WEIGHTS)
    device.wait(Stream.COMPUTE, device.record(Stream.WEIGHTS))
    with device.compute_scope():
        total = there.sum()
    device.wait(Stream.WEIGHTS, device.record(Stream.COMPUTE))
    del there
    again = device.empty(torch.empty(1024), Stream.WEIGHTS, Category.WEIGHTS)
    device.copy(again, torch.zeros(1024), Stream.WEIGHTS)
    device.wait(Stream.OUTWARD, device.record(Stream.COMPUTE))
    back = device.host_empty(total)
    device.copy(back, total, Stream.OUTWARD)
    device.record(Stream.OUTWARD).synchronize()
    assert back.item() == 1024


def test_memory_may_be_dropped_at_once_if_only_its_own_stream_uses_it(
    backend: Backend, pool: DevicePool
) -> None:
    device = pool.devices[0]
    home = device.host_empty(torch.empty(1024))
    hold = backend.hold(device, Stream.OUTWARD)
    if hold is None:
        pytest.skip(f"streams of {backend.name} cannot be held back")
    with hold:
        for value in (1.0, 2.0):
            staged = device.empty(home, Stream.OUTWARD, Category.ACTIVATIONS)
            device.copy(staged, torch.full((1024,), value), Stream.OUTWARD)
            if value == 1.0:
                device.copy(home, staged, Stream.OUTWARD)
            del staged
    device.synchronize()
    assert torch.equal(home, torch.ones(1024))


def test_host_memory_may_be_dropped_at_once(backend: Backend, pool: DevicePool) -> None:
    device = pool.devices[0]
    there = device.empty(torch.empty(1024), Stream.INWARD, Category.ACTIVATIONS)
    host = device.host_empty(torch.empty(1024))
    host.fill_(4.0)
    hold = backend.hold(device, Stream.INWARD)
    if hold is None:
        pytest.skip(f"streams of {backend.name} cannot be held back")
    with hold:
        device.copy(there, host, Stream.INWARD)
        del host
        other = device.host_empty(torch.empty(1024))
        other.fill_(-1.0)
    back = device.host_empty(there)
    device.wait(Stream.OUTWARD, device.record(Stream.INWARD))
    device.copy(back, there, Stream.OUTWARD)
    home = device.record(Stream.OUTWARD)
    home.synchronize()
    device.wait(Stream.INWARD, home)
    assert torch.equal(back, torch.full((1024,), 4.0))


def test_a_copy_that_fails_comes_home_as_the_same_object(backend: Backend) -> None:
    if not isinstance(backend, CheckedCpu):
        pytest.skip(f"copies of {backend.name} cannot be made to fail")
    failure = OSError("the cable was pulled")
    with backend.open(2) as pool:
        device = pool.devices[0]
        backend.pools[-1].fail_copy(failure, Stream.INWARD, device=0, after=1)
        targets = [
            device.empty(torch.empty(4), Stream.INWARD, Category.ACTIVATIONS) for _ in range(3)
        ]
        events = []
        for value, target in enumerate(targets):
            device.copy(target, torch.full((4,), float(value)), Stream.INWARD)
            events.append(device.record(Stream.INWARD))
        events[0].synchronize()
        for event in events[1:]:
            with pytest.raises(OSError, match="cable") as synchronized:
                event.synchronize()
            assert synchronized.value is failure
            with pytest.raises(OSError, match="cable") as waited:
                run_on(pool, 0, lambda e=event: device.wait(Stream.COMPUTE, e)).result()  # type: ignore[misc]
            assert waited.value is failure
        # The copies behind it ran, and the failure is dealt with: what comes now is clean.
        assert targets[1].isnan().all()
        assert torch.equal(targets[2], torch.full((4,), 2.0))
        device.record(Stream.INWARD).synchronize()
        device.synchronize()


def test_no_room_is_an_out_of_memory_error_and_the_device_lives_on(
    backend: Backend, pool: DevicePool
) -> None:
    device = pool.devices[0]
    total = device.memory().total_bytes
    if total is None:
        pytest.skip(f"{backend.name} has no limit")
    with pytest.raises(torch.OutOfMemoryError):
        device.empty(torch.empty(2 * total, device="meta"), Stream.WEIGHTS, Category.WEIGHTS)
    there = device.empty(torch.empty(4), Stream.WEIGHTS, Category.WEIGHTS)
    device.copy(there, torch.ones(4), Stream.WEIGHTS)
    device.synchronize()


def test_closing_ends_every_thread(backend: Backend) -> None:
    before = threads_of_pools()
    pool = backend.open(2)
    assert threads_of_pools() > before
    pool.close()
    assert threads_of_pools() == before
    pool.close()


def test_closing_lets_what_was_enqueued_run(backend: Backend) -> None:
    host = torch.zeros(4)
    with backend.open(1) as pool:
        device = pool.devices[0]
        with device.compute_scope():
            made = device.empty(host, Stream.COMPUTE, Category.ACTIVATIONS)
            made.fill_(5.0)
        device.wait(Stream.OUTWARD, device.record(Stream.COMPUTE))
        device.copy(host, made, Stream.OUTWARD)
        device.wait(Stream.COMPUTE, device.record(Stream.OUTWARD))
    assert torch.equal(host, torch.full((4,), 5.0))


def test_a_closed_device_says_so(backend: Backend) -> None:
    with backend.open(1) as pool:
        device = pool.devices[0]
    if backend.is_async:
        with pytest.raises(StateError, match="was closed; open a new pool"):
            device.empty(torch.empty(4), Stream.WEIGHTS, Category.WEIGHTS)
        with pytest.raises(StateError, match="was closed; open a new pool"):
            device.record(Stream.OUTWARD)
    device.synchronize()
    device.close()


def test_a_forgotten_pool_ends_its_threads(backend: Backend) -> None:
    before = threads_of_pools()
    pool = backend.open(2)
    if isinstance(backend, CheckedCpu):
        backend.pools.clear()
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert threads_of_pools() == before
