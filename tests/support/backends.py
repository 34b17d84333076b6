"""The device back ends that the contract suite runs on, and running things on their workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from roundpipe.devices import CheckedPool, CpuChecks, DevicePool, open_cpu_pool, open_pool
from roundpipe.devices.accelerator import AcceleratorDevice
from roundpipe.devices.base import Device, Stream

T = TypeVar("T")

HoldTorchStream = Callable[[torch.Stream], AbstractContextManager[None]]


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
    """The accelerators that are visible; several logical devices on the last if there are few."""

    name = "accelerator"
    is_async = True

    def __init__(self, hold: HoldTorchStream | None = None) -> None:
        self._hold = hold

    def open(self, count: int) -> DevicePool:
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        last = torch.accelerator.device_count() - 1
        return open_pool([torch.device(kind.type, min(i, last)) for i in range(count)])

    def hold(self, device: Device, stream: Stream) -> AbstractContextManager[None] | None:
        if self._hold is None:
            return None
        assert isinstance(device, AcceleratorDevice)
        return self._hold(device.torch_stream(stream))


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
