"""CPU devices: workers on the host, in the plain and fast form.

Compute runs eagerly on the device's worker thread and copies run inline, so every stream is always
idle, every event has passed, and host memory is device memory. :mod:`.checked` has the form for
tests, with copy threads, poison, a byte ledger and scripts.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from roundpipe.trace import clock_ns

from .base import Category, Device, Event, HostMoment, MemoryReport, Moment, Stream
from .layout import empty_like

T = TypeVar("T")

# Serialises the read-change-restore of torch's process-wide default below; holds no state.
_THREAD_COUNT_LOCK = threading.Lock()


def visible_cores() -> int:
    """Cores that this process may run on (affinity and cpusets, not the machine's number)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_own_intraop_threads(count: int) -> None:
    """``torch.set_num_threads`` for the calling thread and nobody else.

    torch keeps the number per thread, but each call also becomes the default that every thread
    takes over at its first parallel operation. The default is therefore set back, by a short-lived
    thread, because the setter also changes whoever calls it.
    """
    # A thread's first question or parallel operation gives it the default; asked later than the
    # setting, it would undo it.
    torch.get_num_threads()
    with _THREAD_COUNT_LOCK:
        default = _on_new_thread(torch.get_num_threads)
        torch.set_num_threads(count)
        _on_new_thread(lambda: torch.set_num_threads(default))


def _on_new_thread(function: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()), name="roundpipe-threads")
    thread.start()
    thread.join()
    return results[0]


class PassedEvent(Event):
    """A point that was passed when it was recorded."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class CpuDevice(Device):
    """A worker on the host.

    Attributes:
        intraop_threads: how many threads one operation on its worker uses.
    """

    def __init__(self, index: int, intraop_threads: int) -> None:
        self.index = index
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self.shares_host_memory = True
        self.intraop_threads = intraop_threads

    @contextlib.contextmanager
    def worker_scope(self) -> Iterator[None]:
        """Give the worker its share of the cores, so that N devices do not oversubscribe them."""
        set_own_intraop_threads(self.intraop_threads)
        yield

    def compute_scope(self) -> AbstractContextManager[None]:
        """Nothing to enter."""
        return contextlib.nullcontext()

    def empty(self, like: torch.Tensor, stream: Stream, category: Category) -> torch.Tensor:
        """A new host tensor."""
        return empty_like(like, self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy now, on the calling thread."""
        with torch.no_grad():
            target.copy_(source)

    def record(self, stream: Stream) -> Event:
        """An event that has passed."""
        return PassedEvent()

    def start_clock(self) -> None:
        """Nothing: moments are the host's own."""

    def moment(self, stream: Stream) -> Moment:
        """Now. For compute that is right; copies of checked devices may still be on their way."""
        return HostMoment(clock_ns())

    def wait(self, stream: Stream, event: Event) -> None:
        """Block until ``event`` has passed."""
        event.synchronize()

    def mark_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Nothing: a stream that is idle uses nothing."""

    def account(self, tensor: torch.Tensor, category: Category) -> None:
        """Nothing: no ledger."""

    def host_empty(self, like: torch.Tensor) -> torch.Tensor:
        """A new host tensor, pageable, laid out as ``like`` so that kernels treat it alike."""
        return empty_like(like, self.torch_device)

    def seed(self, seed: int) -> None:
        """Nothing: host layers draw from the process's generator, which the engine seeds."""

    def random_sandbox(self) -> AbstractContextManager[None]:
        """Nothing to restore."""
        return contextlib.nullcontext()

    def has_room(self, wanted_bytes: int) -> bool:
        """Always: what stays here would otherwise lie in the same memory as a host tensor."""
        return True

    def memory(self) -> MemoryReport:
        """Zeros: device memory is host memory here and is not counted."""
        return MemoryReport(total_bytes=None, allocated_bytes=0, peak_bytes=0)

    def reset_peak(self) -> None:
        """Nothing to reset."""

    def synchronize(self) -> None:
        """Return at once: all streams are idle."""

    def close(self) -> None:
        """Nothing to end."""
