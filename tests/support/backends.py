"""The device back ends that the contract suite runs on, and running things on their workers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from roundpipe.devices import CheckedPool, CpuChecks, DevicePool, open_cpu_pool, open_pool
from roundpipe.devices.accelerator import AcceleratorDevice
from roundpipe.devices.base import Device, Stream

T = TypeVar("T")


class Backend:
    """One kind of device: how to open a pool of it, and what a test may expect of it.

    Attributes:
        name: shown in test ids.
        is_async: copies run on their own; otherwise inside the call.
    """

    name: str
    is_async: bool

    def open(self, count: int) -> DevicePool:
        raise NotImplementedError

    def hold(self, device: Device, stream: Stream) -> AbstractContextManager[None] | None:
        """Within it no copy on ``stream`` runs; ``None`` where that cannot be had."""
        return None


class FastCpu(Backend):
    name = "cpu"
    is_async = False

    def open(self, count: int) -> DevicePool:
        return open_cpu_pool(count)


class CheckedCpu(Backend):
    name = "cpu-checked"
    is_async = True

    def __init__(self, checks: CpuChecks | None = None) -> None:
        self._checks = checks or CpuChecks()
        self.pools: list[CheckedPool] = []

    def open(self, count: int) -> DevicePool:
        self.pools.append(open_cpu_pool(count, self._checks))
        return self.pools[-1]

    def hold(self, device: Device, stream: Stream) -> AbstractContextManager[None] | None:
        pool = next(pool for pool in self.pools if device in pool.devices)
        return _held(pool, device, stream)


@contextlib.contextmanager
def _held(pool: CheckedPool, device: Device, stream: Stream) -> Iterator[None]:
    with pool.hold(stream, device.index):
        yield


class Accelerator(Backend):
    """The accelerators that are visible; several logical devices on the last if there are few.

    Attributes:
        is_fake: whether it is the fake accelerator, which can do what the tests want of it.
    """

    name = "accelerator"
    is_async = True

    def __init__(self) -> None:
        # The fake accelerator is global to a process and final: a process of its own loads it
        # before it collects tests; here it is only noticed.
        kind = torch.accelerator.current_accelerator()
        self.is_fake = kind is not None and kind.type == "fakeacc"
        self._fake: Any = sys.modules["support.fakeacc"] if self.is_fake else None

    def open(self, count: int) -> DevicePool:
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        last = torch.accelerator.device_count() - 1
        return open_pool([torch.device(kind.type, min(i, last)) for i in range(count)])

    def hold(self, device: Device, stream: Stream) -> AbstractContextManager[None] | None:
        if self._fake is None:
            return None
        assert isinstance(device, AcceleratorDevice)
        held: AbstractContextManager[None] = self._fake.hold(device.torch_stream(stream))
        return held

    def late(self, seed: int | None) -> AbstractContextManager[None]:
        """Within it kernels and copies take longer, at random; nothing where that cannot be had."""
        if seed is None:
            return contextlib.nullcontext()
        return self.slow(jitter_ms=0.3, seed=seed)

    def slow(self, **latency: float) -> AbstractContextManager[None]:
        """Within it kernels and copies take that much longer; nothing where that cannot be had."""
        if self._fake is None:
            return contextlib.nullcontext()
        slow: AbstractContextManager[None] = self._fake.latency(**latency)
        return slow


def with_accelerator(*cpu_kinds: T, accelerator: T) -> list[T]:
    """Parameters of a test: the CPU kinds, and the accelerator's where one is visible."""
    return [*cpu_kinds, *([accelerator] if torch.accelerator.is_available() else [])]


def run_on(pool: DevicePool, index: int, function: Callable[[], T]) -> Future[T]:
    """Run ``function`` on a device's worker; the future has its result or what it raised."""
    future: Future[T] = Future()

    def task() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)

    pool.workers[index].submit(task)
    return future
