"""CPU devices for tests: what is asynchronous on an accelerator is asynchronous here, and watched.

* Each copy stream is a queue with a thread of its own. The target of a copy holds poison until the
  copy has run, and so does memory that was dropped (see :func:`.memory.poison`).
* Copies can be held back, delayed at random (seeded), or fail (:mod:`.script`).
* A ledger counts the storages on each device by category, temporaries and what autograd saves
  included, and enforces a limit.
* Every use of memory that no event orders after an earlier one is reported, whatever the timing of
  the run; so is memory that is dropped too early, or used by another device's compute.

The rules are an accelerator's: memory may be dropped once the stream that it belongs to has waited
for what other streams do with it, or once these are marked as users. Compute runs eagerly, yet its
reads and writes need the same events, so that a program without reports is right on both.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from roundpipe.errors import StateError

from .base import Category, Event, MemoryReport, Stream
from .clocks import Operation, StreamKey
from .copies import ComputePoint, CopyEvent, CopyStream, Deliveries
from .cpu import CpuDevice
from .ledger import Ledger
from .memory import new_tensor, poison, poison_memory, reach
from .pool import DevicePool
from .script import CopyScript, CpuChecks, Hold
from .tracking import Buffer, Tracker
from .watch import ComputeWatch

COPY_STREAMS = (Stream.WEIGHTS, Stream.INWARD, Stream.OUTWARD)
_COMFORTABLE = 0.8  # of the limit; the rest is for the temporaries of the running layer

Reach = Callable[[], "torch.Tensor | None"]


@dataclass(frozen=True)
class Shared:
    """What the devices of one checked pool have in common."""

    ledgers: Sequence[Ledger]
    tracker: Tracker
    script: CopyScript
    deliveries: Deliveries


class CheckedPool(DevicePool):
    """A pool of checked CPU devices, with what tests steer and ask."""

    devices: tuple[CheckedCpuDevice, ...]

    def __init__(self, devices: Sequence[CheckedCpuDevice], shared: Shared) -> None:
        self._shared = shared
        super().__init__(devices)
        # Finalizers run last made first: a worker that waits for a copy somebody forgot to release
        # must get it before it is joined.
        self._release = weakref.finalize(self, shared.script.close)

    def close(self) -> None:
        """Let go what is held back, and end all threads. May be called twice, by any thread."""
        self._release()
        super().close()

    def reports(self) -> list[str]:
        """Each misuse of streams and memory seen so far, once. A correct program has none."""
        return self._shared.tracker.reports()

    def hold(self, stream: Stream, device: int | None = None, after: int = 0) -> Hold:
        """Hold copies back, on the stream of one device or of whichever gets there first.

        Args:
            stream: the next copy on it, and everything behind that copy, waits.
            device: index of the device; ``None`` for any.
            after: how many copies run before.

        Returns:
            The hold: ``release()`` it, or use it in a ``with`` statement.
        """
        return self._shared.script.hold(stream, device, after)

    def fail_copy(
        self, error: BaseException, stream: Stream, device: int | None = None, after: int = 0
    ) -> None:
        """Let one copy fail with ``error``; copies behind it run.

        Args:
            error: surfaces, the same object, where an event behind the copy is waited for.
            stream: where.
            device: index of the device; ``None`` for whichever gets there first.
            after: how many copies run before.
        """
        self._shared.script.fail(error, stream, device, after)


def open_checked_pool(count: int, intraop_threads: int, checks: CpuChecks) -> CheckedPool:
    """Open ``count`` checked devices that share one script, one set of clocks and one report."""
    ledgers = [Ledger(f"cpu:{index}", checks.limit_bytes) for index in range(count)]
    shared = Shared(ledgers, Tracker(ledgers), CopyScript(checks), Deliveries())
    devices = [CheckedCpuDevice(index, intraop_threads, shared) for index in range(count)]
    return CheckedPool(devices, shared)


class CheckedCpuDevice(CpuDevice):
    """A worker on the host whose memory and streams are watched."""

    def __init__(self, index: int, intraop_threads: int, shared: Shared) -> None:
        super().__init__(index, intraop_threads)
        self.shares_host_memory = False
        self._ledger = shared.ledgers[index]
        self._tracker = tracker = shared.tracker
        self._script = shared.script
        self._deliveries = shared.deliveries
        self._compute = StreamKey(index, Stream.COMPUTE)
        self._watch = ComputeWatch(self._compute, tracker, self._count_temporary)
        self._streams = {
            stream: CopyStream(StreamKey(index, stream), shared.deliveries)
            for stream in COPY_STREAMS
        }
        for queue in self._streams.values():
            tracker.passed[queue.key] = queue.passed
        self._is_closed = False

    def compute_scope(self) -> AbstractContextManager[None]:
        """Every operator of the calling thread is watched: what it allocates, reads and writes."""
        return self._watch.scope

    # Memory

    def empty(self, like: torch.Tensor, stream: Stream, category: Category) -> torch.Tensor:
        """A new tensor, counted and full of poison.

        Raises:
            torch.OutOfMemoryError: the limit is reached.
        """
        self._check_open()
        with self._watch.off():
            tensor, memory = new_tensor(like)
            if memory.numel() > 0:
                owner = StreamKey(self.index, stream)
                on_drop = self._poisoning(memory, stream)
                self._count(tensor, Buffer(tensor, owner, category, memory, on_drop), "allocation")
        return tensor

    def _poisoning(self, memory: torch.Tensor, stream: Stream) -> Callable[[], None]:
        fill = functools.partial(poison_memory, memory)
        if stream is Stream.COMPUTE:
            return fill
        # In the owning stream's order: what it enqueued earlier may still use the memory.
        return functools.partial(self._streams[stream].enqueue_untold, fill)

    def account(self, tensor: torch.Tensor, category: Category) -> None:
        """Count the tensor's storage under ``category``, from now on or for the first time."""
        with self._tracker.locked():
            buffer = self._tracker.find(tensor)
            if buffer is not None and buffer.owner is not None:
                self._tracker.recount(buffer, category)
                return
        self._count(tensor, Buffer(tensor, self._compute, category), "account")

    def _count_temporary(self, tensor: torch.Tensor, operator: str) -> None:
        if tensor.untyped_storage().nbytes() > 0:
            buffer = Buffer(tensor, self._compute, Category.TEMPORARIES)
            self._count(tensor, buffer, operator, only_if_unknown=True)

    def _count(
        self, tensor: torch.Tensor, buffer: Buffer, what: str, *, only_if_unknown: bool = False
    ) -> None:
        with self._tracker.locked():
            if only_if_unknown and self._tracker.find(tensor) is not None:
                return
            if self._ledger.fits(buffer.nbytes) or self._is_closed:
                self._tracker.add(tensor, buffer, what)
                return
        # As allocators of accelerators do before they give up: memory that waits for copies which
        # still use it comes back once they are through.
        self._drain()
        with self._tracker.locked():
            self._tracker.add(tensor, buffer, what)

    def host_empty(self, like: torch.Tensor) -> torch.Tensor:
        """A new host tensor, laid out as ``like``, full of poison."""
        with self._watch.off():
            tensor = super().host_empty(like)
            poison(tensor)
        return tensor

    def has_room(self, wanted_bytes: int) -> bool:
        """Whether at most 80% of the limit would be in use; always, without a limit."""
        limit = self._ledger.limit_bytes
        with self._tracker.locked():
            return limit is None or self._ledger.total_bytes + wanted_bytes <= _COMFORTABLE * limit

    def memory(self) -> MemoryReport:
        """The ledger's figures."""
        with self._tracker.locked():
            return self._ledger.report()

    def reset_peak(self) -> None:
        """Start new peaks from what is on the device now."""
        with self._tracker.locked():
            self._ledger.reset_peak()

    # Streams

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Enqueue the copy; on the compute stream, copy now. The target holds poison until then."""
        self._check_open()
        if source.shape != target.shape:
            source = source.expand_as(target)  # refused here rather than on the thread
        key = StreamKey(self.index, stream)
        with self._watch.off():
            with self._tracker.locked():
                position = self._tracker.clocks.advance(key)
                operation = Operation(key, position, "copy")
                into, origin = self._tracker.follow(target), self._tracker.follow(source)
                if stream is not Stream.COMPUTE:
                    if self._tracker.is_idle(into, target):
                        # Whoever reads before the copy has run sees poison, not what was there.
                        # What is enqueued already may rightly use that, hence the condition.
                        poison(target)
                    reached = reach(target, into, key), reach(source, origin, key)
                    run = functools.partial(self._run_copy, key, target.shape, *reached)
                    self._streams[stream].enqueue_copy(position, run)
                self._tracker.use(origin, source, operation, is_write=False)
                self._tracker.use(into, target, operation, is_write=True)
            if stream is Stream.COMPUTE:
                target.copy_(source)

    def _run_copy(self, key: StreamKey, shape: torch.Size, into: Reach, origin: Reach) -> None:
        """On the copy thread."""
        self._script.before_copy(key, shape)
        # Reached only now: while the copy is late, nothing but its caller keeps the memory.
        target, source = into(), origin()
        if target is None:
            return  # dropped early, which was reported then
        with torch.no_grad():
            if source is None:
                poison(target)
            else:
                target.copy_(source)

    def record(self, stream: Stream) -> Event:
        """An event; on the compute stream, one that has passed."""
        self._check_open()
        return self._record(stream)

    def _record(self, stream: Stream) -> CopyEvent | ComputePoint:
        key = StreamKey(self.index, stream)
        with self._tracker.locked():
            if stream is Stream.COMPUTE:
                return ComputePoint(self._tracker.clocks.snapshot(key), self._tracker)
            position = self._tracker.clocks.advance(key)
            clock = self._tracker.clocks.snapshot(key)
            event = CopyEvent(self._streams[stream], position, clock, self._tracker)
            self._streams[stream].enqueue_record(position, event)
            return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Hold ``stream`` until ``event`` has passed: the compute stream by blocking the caller.

        Raises:
            BaseException: what failed before the event, if ``stream`` is the compute stream.
        """
        self._check_open()
        key = StreamKey(self.index, stream)
        if isinstance(event, CopyEvent) and stream is Stream.COMPUTE:
            event.wait_passed()
            with self._tracker.locked():
                self._learn(key, event)
            event.raise_failure()
        elif isinstance(event, (CopyEvent, ComputePoint)):
            with self._tracker.locked():
                self._learn(key, event)
                if isinstance(event, CopyEvent):
                    self._streams[stream].enqueue_wait(self._tracker.clocks.advance(key), event)
        else:
            event.synchronize()

    def _learn(self, stream: StreamKey, event: CopyEvent | ComputePoint) -> None:
        # Another pool's clocks say nothing about this one's streams.
        if event.tracker is self._tracker:
            self._tracker.clocks.wait(stream, event.clock)

    def mark_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's memory until ``stream`` has passed what is enqueued on it so far."""
        self._check_open()
        with self._tracker.locked():
            buffer = self._tracker.find(tensor)
            if buffer is not None:
                buffer.marked.add(StreamKey(self.index, stream))
            if stream is not Stream.COMPUTE:
                self._streams[stream].enqueue_untold(functools.partial(_keep, tensor))

    def synchronize(self) -> None:
        """Block until all copy streams are idle; compute runs eagerly.

        Raises:
            BaseException: what a copy failed with, if nobody was told yet.
        """
        if self._is_closed:
            return
        failures = [f for event in self._drain() for f in event.failures if f.is_untold]
        for failure in failures:
            self._deliveries.deliver(failure)
        for failure in failures:
            raise failure.error

    def _drain(self) -> list[CopyEvent]:
        events = [event for s in COPY_STREAMS if isinstance(event := self._record(s), CopyEvent)]
        for event in events:
            event.wait_passed()
            with self._tracker.locked():
                self._tracker.clocks.host_saw(event.clock)
        return events

    def close(self) -> None:
        """End the copy threads; what is enqueued still runs, and what is held back is let go."""
        self._is_closed = True
        self._tracker.is_closed = True
        self._script.close()
        for queue in self._streams.values():
            queue.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError(f"{self.name} was closed; open a new pool")


def _keep(tensor: torch.Tensor) -> None:
    """Nothing: a queue that holds this call holds the tensor."""
