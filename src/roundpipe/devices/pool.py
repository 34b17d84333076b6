"""A pool of devices, each with its worker thread."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

from roundpipe.errors import StateError
from roundpipe.workers import Task, Worker

from .base import Device

P = TypeVar("P", bound="DevicePool")


class DevicePool:
    """Devices and their workers. Closing, garbage collection and interpreter exit end the threads.

    Attributes:
        devices: the devices; ``devices[i].index == i``.
        workers: ``workers[i]`` runs tasks on ``devices[i]``, inside its ``worker_scope``.
        cursor: the device that takes the next stage; advanced round-robin by the dispatcher.
    """

    devices: tuple[Device, ...]
    workers: tuple[Worker, ...]
    cursor: int

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.cursor = 0
        self._submit_lock = threading.Lock()
        entered = [Future[None]() for _ in self.devices]
        self.workers = tuple(
            Worker(f"roundpipe-{device.name}", _scope_of(device, future))
            for device, future in zip(self.devices, entered, strict=True)
        )
        # The finalizer holds devices and workers, never the pool: a forgotten pool is collected.
        self._close = weakref.finalize(self, _close_all, self.workers, self.devices)
        try:
            # A worker that cannot enter its device says so here, not in the first run.
            for future in entered:
                future.result()
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return not self._close.alive

    def submit(self, tasks: Mapping[int, Task]) -> None:
        """Give each named device its task, all at one moment.

        Two runs from two threads then stand in the same order in every worker's queue; otherwise
        each could hold one device and wait for the other's.

        Args:
            tasks: for a device's index, what its worker shall run.

        Raises:
            StateError: the pool was closed.
        """
        if self.closed:
            raise StateError("the devices were closed; make a new RoundPipe (or pool)")
        with self._submit_lock:
            for index, task in tasks.items():
                self.workers[index].submit(task)

    def close(self) -> None:
        """End all threads after the tasks submitted so far. May be called twice, by any thread."""
        self._close()

    def __enter__(self: P) -> P:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _scope_of(
    device: Device, entered: Future[None]
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(device.worker_scope())
            except BaseException as error:  # noqa: BLE001 - the opener raises it
                # The worker stays to be closed in the usual way; nobody gives it a task.
                entered.set_exception(error)
            else:
                entered.set_result(None)
            yield

    return scope


def _close_all(workers: Sequence[Worker], devices: Sequence[Device]) -> None:
    # Workers first: their tasks may still use the devices' streams.
    for worker in workers:
        worker.close()
    for device in devices:
        device.close()
