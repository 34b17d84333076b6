"""Pools, workers and random numbers."""

from __future__ import annotations

import threading

import pytest
import torch

from roundpipe.devices import DevicePool
from roundpipe.devices.accelerator import AcceleratorDevice
from roundpipe.devices.cpu import CpuDevice
from support.backends import Backend, run_on


def test_devices_know_their_place_and_have_names_of_their_own(backend: Backend) -> None:
    with backend.open(3) as pool:
        assert [device.index for device in pool.devices] == [0, 1, 2]
        assert len({device.name for device in pool.devices}) == 3
        assert len(pool.workers) == 3
        assert pool.cursor == 0


def test_each_worker_is_one_thread(pool: DevicePool) -> None:
    threads = [{run_on(pool, i, threading.get_ident).result() for _ in range(3)} for i in (0, 1)]
    assert [len(idents) for idents in threads] == [1, 1]
    assert threads[0] != threads[1]
    assert threading.get_ident() not in threads[0] | threads[1]


def test_a_worker_runs_inside_its_devices_scope(pool: DevicePool) -> None:
    device = pool.devices[1]
    if isinstance(device, CpuDevice):
        assert run_on(pool, 1, torch.get_num_threads).result() == device.intraop_threads
    else:
        current = run_on(pool, 1, torch.accelerator.current_device_index).result()
        assert current == device.torch_device.index


def test_compute_makes_its_tensors_on_the_compute_stream(pool: DevicePool) -> None:
    device = pool.devices[0]
    if not isinstance(device, AcceleratorDevice):
        pytest.skip("CPU devices have no current stream")
    from roundpipe.devices.base import Stream

    place = device.torch_device
    before = torch.accelerator.current_stream(place)
    with device.compute_scope():
        assert torch.accelerator.current_stream(place) == device.torch_stream(Stream.COMPUTE)
        with device.compute_scope():
            pass
        assert torch.accelerator.current_stream(place) == device.torch_stream(Stream.COMPUTE)
    assert torch.accelerator.current_stream(place) == before


def draw(pool: DevicePool, seed: int | None) -> list[float]:
    device = pool.devices[0]

    def function() -> torch.Tensor:
        with device.compute_scope():
            if seed is not None:
                device.seed(seed)
            return torch.rand(4, device=device.torch_device)

    drawn = run_on(pool, 0, function).result()
    device.synchronize()
    values: list[float] = drawn.tolist()
    return values


def test_a_seed_decides_what_the_device_draws(backend: Backend, pool: DevicePool) -> None:
    if backend.name != "accelerator":
        state = torch.get_rng_state()
        pool.devices[0].seed(5)
        assert torch.equal(torch.get_rng_state(), state)
        return
    assert draw(pool, 5) == draw(pool, 5)
    assert draw(pool, 5) != draw(pool, 6)
    host = torch.get_rng_state()
    draw(pool, 7)
    assert torch.equal(torch.get_rng_state(), host)


def test_a_sandbox_leaves_the_generator_as_it_was(backend: Backend, pool: DevicePool) -> None:
    device = pool.devices[0]
    if backend.name != "accelerator":
        state = torch.get_rng_state()
        with device.random_sandbox():
            pass
        assert torch.equal(torch.get_rng_state(), state)
        return
    draw(pool, 3)
    want = draw(pool, None)
    draw(pool, 3)
    with device.random_sandbox():
        draw(pool, 99)
    assert draw(pool, None) == want


def test_sandboxes_of_logical_devices_that_share_a_generator_may_overlap(backend: Backend) -> None:
    if backend.name != "accelerator":
        pytest.skip("CPU devices have no generator of their own")
    with backend.open(torch.accelerator.device_count() + 1) as pool:
        first, second = pool.devices[-2:]
        assert isinstance(first, AcceleratorDevice)
        assert isinstance(second, AcceleratorDevice)
        assert second.name == f"{first.name}#1"
        assert first.random_lock is not None
        assert first.random_lock is second.random_lock
        module = torch.get_device_module(first.torch_device)
        before = module.get_rng_state(first.torch_device)
        outer, inner = first.random_sandbox(), second.random_sandbox()
        outer.__enter__()
        with torch.accelerator.device_index(first.torch_device.index):
            first.seed(1)
            inner.__enter__()
            second.seed(2)
        outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        assert torch.equal(module.get_rng_state(first.torch_device), before)
