"""Accelerators through torch's device-generic interface: CUDA, ROCm, XPU and others alike.

Every stream, event, copy and ``record_stream`` of the package is in this file. Each of the places
where one thing waits for another says what breaks without it; docs/design.md has a table of them
and of those that ask for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from roundpipe.compat import total_memory_bytes
from roundpipe.errors import StateError
from roundpipe.trace import clock_ns, logger

from .base import Category, Device, Event, MemoryReport, Moment, Stream
from .layout import empty_like

_COMFORTABLE = 0.8  # of the memory; the rest is for temporaries and what the allocator rounds up


def open_accelerators(named: Sequence[torch.device]) -> list[Device]:
    """Devices for ``named``; a repeated one becomes several logical devices that share it."""
    current = torch.accelerator.current_device_index()
    placed = [torch.device(d.type, current if d.index is None else d.index) for d in named]
    times = Counter(placed)
    generators = {device: SharedGenerator(device, times[device]) for device in times}
    seen: Counter[torch.device] = Counter()
    devices: list[Device] = []
    for index, place in enumerate(placed):
        name = f"{place}#{seen[place]}" if seen[place] else str(place)
        seen[place] += 1
        devices.append(AcceleratorDevice(index, name, place, generators[place]))
    return devices


class SharedGenerator:
    """An accelerator's default generator, which its logical devices share.

    Attributes:
        lock: to be held from seeding until a layer has drawn; ``None`` if there is nobody to
            disturb.
    """

    def __init__(self, device: torch.device, users: int) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self.lock = threading.RLock() if users > 1 else None
        self._sandbox_lock = threading.Lock()
        self._sandboxes = 0
        self._before: torch.Tensor | None = None

    def seed(self, seed: int) -> None:
        """Seed it. On a thread whose current device is the generator's."""
        self._module.manual_seed(seed)

    @contextlib.contextmanager
    def sandbox(self) -> Iterator[None]:
        """The first to enter keeps the state, the last to leave puts it back.

        Each on its own would not do: who enters second would keep, and put back at the end, what
        the first had seeded.
        """
        with self._sandbox_lock:
            if self._sandboxes == 0:
                self._before = self._module.get_rng_state(self._device)
            self._sandboxes += 1
        try:
            yield
        finally:
            with self._sandbox_lock:
                self._sandboxes -= 1
                if self._sandboxes == 0:
                    self._module.set_rng_state(self._before, self._device)
                    self._before = None


class AcceleratorEvent(Event):
    """A point in a stream of an accelerator."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def query(self) -> bool:
        """Whether the stream has passed this point."""
        return self.event.query()

    def synchronize(self) -> None:
        """Block until the stream has passed this point."""
        # Host wait: without it the host reads memory that a copy is still filling.
        self.event.synchronize()


class AcceleratorMoment(Moment):
    """A timed point in a stream, told on the host's clock.

    Args:
        event: the point.
        start: a point that was passed when the host's clock showed ``start_ns``.
        start_ns: see above.
    """

    __slots__ = ("_event", "_start", "_start_ns")

    def __init__(self, event: torch.Event, start: torch.Event, start_ns: int) -> None:
        self._event, self._start, self._start_ns = event, start, start_ns

    def ns(self) -> int:
        """When the stream reached the point; blocks until it has."""
        # Host wait: runtimes refuse to tell the time of a point that is still to come.
        self._event.synchronize()
        return self._start_ns + round(1e6 * self._start.elapsed_time(self._event))


class AcceleratorDevice(Device):
    """One logical device on an accelerator, with streams of its own.

    Attributes:
        random_lock: held from seeding until a layer has drawn, where several logical devices share
            the accelerator and hence its generator; ``None`` elsewhere.
    """

    def __init__(
        self, index: int, name: str, torch_device: torch.device, generator: SharedGenerator
    ) -> None:
        self.index = index
        self.name = name
        self.torch_device = torch_device
        self.shares_host_memory = False
        self.random_lock = generator.lock
        self._generator = generator
        # Streams of the worker's own: on the default stream, two logical devices would queue behind
        # each other and behind the user's work.
        self._streams = {stream: torch.Stream(device=torch_device) for stream in Stream}
        self._clock: tuple[torch.Event, int] | None = None

    @contextlib.contextmanager
    def worker_scope(self) -> Iterator[None]:
        """The accelerator is the thread's current one."""
        torch.accelerator.set_device_index(self.torch_device)
        yield

    def compute_scope(self) -> AbstractContextManager[None]:
        """The compute stream is current."""
        return self._on(Stream.COMPUTE)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        # torch.Stream is a context manager, too, but one that cannot be entered while it is.
        before = torch.accelerator.current_stream(self.torch_device)
        torch.accelerator.set_stream(self.torch_stream(stream))
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def torch_stream(self, stream: Stream) -> torch.Stream:
        """The runtime's stream, for profilers and tests.

        Raises:
            StateError: the device was closed.
        """
        try:
            return self._streams[stream]
        except KeyError:
            raise StateError(f"{self.name} was closed; open a new pool") from None

    def empty(self, like: torch.Tensor, stream: Stream, category: Category) -> torch.Tensor:
        """A new tensor that belongs to ``stream``.

        Raises:
            torch.OutOfMemoryError: no room.
        """
        # The allocator ties memory to the stream that is current, and hands it out again in that
        # stream's order.
        with self._on(stream):
            return empty_like(like, self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Enqueue the copy on ``stream``; the host waits only if its memory is pageable or strided.

        Pageable memory stays correct: runtimes take its content at the call on the way in, and the
        events behind the copy cover it on the way out.
        """
        with self._on(stream), torch.no_grad():
            target.copy_(source, non_blocking=not needs_host_pass(target, source))

    def record(self, stream: Stream) -> Event:
        """An event after everything enqueued on ``stream`` so far."""
        # A new event each time: recording one again would move the point others wait for.
        event = torch.Event(device=self.torch_device)
        event.record(self.torch_stream(stream))
        return AcceleratorEvent(event)

    def start_clock(self) -> None:
        """Compare the device's clock with the host's; device times are 32-bit floats, so often."""
        start = self._timed_event(Stream.COMPUTE)
        # Host wait, on a stream that is idle when a run begins.
        start.synchronize()
        self._clock = start, clock_ns()

    def moment(self, stream: Stream) -> Moment:
        """When ``stream`` gets here, from a timed event on it."""
        if self._clock is None:
            self.start_clock()
        assert self._clock is not None
        return AcceleratorMoment(self._timed_event(stream), *self._clock)

    def _timed_event(self, stream: Stream) -> torch.Event:
        event = torch.Event(device=self.torch_device, enable_timing=True)
        event.record(self.torch_stream(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Later work of ``stream`` starts after ``event``; the host does not wait."""
        # What CPU devices hand to accelerators, from one model to the next, is complete: it comes
        # without an event.
        assert isinstance(event, AcceleratorEvent)
        # Stream wait: without it the stream reads or overwrites memory that another stream has not
        # finished with. Which memory, the caller says.
        self.torch_stream(stream).wait_event(event.event)

    def mark_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The allocator keeps the tensor's memory, once dropped, until ``stream`` is through."""
        if tensor.device.type != "cpu":
            # record_stream: without it the memory of a dropped tensor goes to the next allocation
            # of its own stream, whose work overwrites it while `stream` still uses it.
            tensor.record_stream(self.torch_stream(stream))

    def account(self, tensor: torch.Tensor, category: Category) -> None:
        """Nothing: the allocator counts, without categories."""

    def host_empty(self, like: torch.Tensor) -> torch.Tensor:
        """A new page-locked host tensor, dense, in the dimension order of ``like``."""
        with torch.inference_mode(False):
            return torch.empty_like(like, device="cpu", pin_memory=True, requires_grad=False)

    def seed(self, seed: int) -> None:
        """Seed the accelerator's generator; with ``random_lock`` held, where there is one."""
        self._generator.seed(seed)

    def random_sandbox(self) -> AbstractContextManager[None]:
        """The accelerator's generator is afterwards as before, whoever shares it."""
        return self._generator.sandbox()

    def has_room(self, wanted_bytes: int) -> bool:
        """Whether at most 80% of the memory would be allocated; no, where its size is unknown."""
        total = total_memory_bytes(self.torch_device)
        allocated = torch.accelerator.memory_allocated(self.torch_device)
        return total is not None and allocated + wanted_bytes <= _COMFORTABLE * total

    def memory(self) -> MemoryReport:
        """The allocator's figures, of all logical devices on the accelerator together."""
        return MemoryReport(
            total_bytes=total_memory_bytes(self.torch_device),
            allocated_bytes=torch.accelerator.memory_allocated(self.torch_device),
            peak_bytes=torch.accelerator.max_memory_allocated(self.torch_device),
        )

    def reset_peak(self) -> None:
        """Start a new peak, of all logical devices on the accelerator together."""
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        """Block until this device's streams are idle; those of others on the accelerator run on."""
        # Host wait: without it a drained run's copies could still read or write host memory.
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait until the streams are idle and drop them. May be called twice."""
        try:
            # Host wait: memory that the user page-locked is not kept by any allocator, and could be
            # gone before the last copy is through.
            self.synchronize()
        except RuntimeError as error:
            # A device in error stays so; whoever used it was told. Closing goes on.
            logger.warning("%s reported an error while it was closed: %s", self.name, error)
        self._streams.clear()


def needs_host_pass(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the runtime fills ``target``, in host memory, through a dense temporary there.

    It copies from the temporary right after enqueuing the transfer into it: with a transfer that
    does not block, that copy takes what was in the temporary before.
    """
    if target.device.type != "cpu" or target.is_contiguous():
        return False
    same_layout = target.stride() == source.stride() and target.dtype == source.dtype
    dense = target.untyped_storage().nbytes() == target.numel() * target.element_size()
    return not (same_layout and dense)
