"""Fast CPU devices: threads per worker, and what costs nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from roundpipe.devices.base import Category, Stream
from roundpipe.devices.cpu import CpuDevice, set_own_intraop_threads, visible_cores


def on_new_thread(function: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_a_worker_sets_its_own_number_of_threads_and_nobody_elses() -> None:
    started, finish = threading.Event(), threading.Event()
    asked_late: list[int] = []

    def idle() -> None:
        # A thread that exists already and has never asked.
        started.set()
        finish.wait()
        asked_late.append(torch.get_num_threads())

    bystander = threading.Thread(target=idle)
    bystander.start()
    started.wait()

    def worker() -> int:
        set_own_intraop_threads(5)
        _ = torch.ones(8, 8) @ torch.ones(8, 8)
        return torch.get_num_threads()

    assert on_new_thread(worker) == 5
    assert torch.get_num_threads() == 3
    assert on_new_thread(torch.get_num_threads) == 3
    finish.set()
    bystander.join()
    assert asked_late == [3]


@pytest.mark.usefixtures("three_threads")
def test_the_workers_scope_gives_the_worker_its_share() -> None:
    device = CpuDevice(1, intraop_threads=2)

    def worker() -> int:
        with device.worker_scope():
            return torch.get_num_threads()

    assert on_new_thread(worker) == 2
    assert torch.get_num_threads() == 3


def test_cores_are_those_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert visible_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert visible_cores() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert visible_cores() == 1


def test_a_copy_is_over_when_the_call_returns() -> None:
    device = CpuDevice(0, 1)
    assert device.shares_host_memory
    target = device.empty(torch.empty(3), Stream.INWARD, Category.ACTIVATIONS)
    device.copy(target, torch.arange(3.0), Stream.INWARD)
    assert torch.equal(target, torch.arange(3.0))
    assert device.record(Stream.INWARD).query()


def test_a_copy_into_a_leaf_is_no_operation_of_autograd() -> None:
    device = CpuDevice(0, 1)
    leaf = torch.zeros(3, requires_grad=True)
    device.copy(leaf, torch.ones(3, requires_grad=True), Stream.WEIGHTS)
    assert leaf.is_leaf
    assert torch.equal(leaf.detach(), torch.ones(3))
