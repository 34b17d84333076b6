"""Every storage a checked pool knows: where it lies, who used it last, and when it is dropped.

Storages are followed rather than tensors: views share one, and what autograd saves lives on in C++
after its Python tensor is gone. A storage's Python object lives exactly as long as the storage, so
a weak reference to it tells the moment at which the memory would go back to an allocator.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from roundpipe.workers import Counter

from .base import Category
from .clocks import Clocks, Operation, StreamKey
from .ledger import Ledger


class Access(NamedTuple):
    """One operation's use of a byte range of a storage."""

    by: Operation
    begin: int
    end: int
    is_write: bool

    def overlaps(self, other: Access) -> bool:
        """Whether the two share a byte."""
        return self.begin < other.end and other.begin < self.end

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two matters."""
        return (self.is_write or other.is_write) and self.overlaps(other)

    def covers(self, other: Access) -> bool:
        """Whether whoever comes after this access also comes after ``other``."""
        if not (self.begin <= other.begin and other.end <= self.end):
            return False
        return self.is_write or (self.by.stream == other.by.stream and not other.is_write)


class Buffer:
    """What is known of one storage.

    Attributes:
        owner: the stream whose later work may reuse the memory; ``None`` for host memory.
        category: how the ledger counts it; ``None`` for host memory.
        nbytes: size that was counted.
        storage: the storage, if it is still there.
        memory: for storages made by ``Device.empty``: the memory, which outlives the storage so
            that copies enqueued before the drop can be carried out, and poison be seen.
        on_drop: called when the storage is dropped.
        accesses: the uses that a later one has to be ordered after.
        marked: the streams for which ``Device.mark_use`` was called.
    """

    __slots__ = (
        "accesses", "category", "marked", "memory", "nbytes", "on_drop", "owner", "storage",
    )  # fmt: skip

    def __init__(
        self,
        tensor: torch.Tensor,
        owner: StreamKey | None = None,
        category: Category | None = None,
        memory: torch.Tensor | None = None,
        on_drop: Callable[[], None] | None = None,
    ) -> None:
        self.owner = owner
        self.category = category
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.storage = weakref.ref(storage)
        self.memory = memory
        self.on_drop = on_drop
        self.accesses: list[Access] = []
        self.marked: set[StreamKey] = set()


class Tracker:
    """The storages, clocks, ledgers and reports of one pool of checked CPU devices.

    Args:
        ledgers: one per device.

    Attributes:
        clocks: of the pool's streams.
        passed: for each copy stream, the number of its last operation that is over.
        is_closed: nobody checks any more what is dropped.
    """

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers
        self.clocks = Clocks()
        self.passed: dict[StreamKey, Counter] = {}
        self._buffers: dict[int, Buffer] = {}
        self._reports: dict[str, None] = {}
        self._dropped: deque[tuple[int, Buffer]] = deque()
        self._lock = threading.Lock()
        self._lock_holder: int | None = None
        self.is_closed = False

    def locked(self) -> Tracker:
        """A scope that holds the pool's bookkeeping. Nothing may wait for a stream in it."""
        return self

    # Not a generator, which would take longer than what is done in the scope.
    def __enter__(self) -> None:
        self._lock.acquire()
        self._lock_holder = threading.get_ident()
        if self._dropped:
            try:
                self._forget_dropped()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_raised: object) -> None:
        self._lock_holder = None
        self._lock.release()

    def reports(self) -> list[str]:
        """Each misuse seen so far, once."""
        with self.locked():
            return list(self._reports)

    # The methods below are called with the lock held.

    def report(self, text: str) -> None:
        """Note a misuse."""
        self._reports.setdefault(text)

    def find(self, tensor: torch.Tensor) -> Buffer | None:
        """What is known of the tensor's storage."""
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        buffer = self._buffers.get(id(storage))
        # A dropped storage's id may be another's before the drop was booked.
        return buffer if buffer is not None and buffer.storage() is storage else None

    def follow(self, tensor: torch.Tensor) -> Buffer:
        """What is known of the tensor's storage; one that is unknown is host memory."""
        buffer = self.find(tensor)
        if buffer is None:
            buffer = Buffer(tensor)
            self.add(tensor, buffer, "host")
        return buffer

    def add(self, tensor: torch.Tensor, buffer: Buffer, what: str) -> None:
        """Follow the tensor's storage from now on, and count it if it lies on a device.

        Args:
            tensor: any tensor over the storage.
            buffer: what to know of it.
            what: the operation of the owning stream that made it.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        if buffer.owner is not None and buffer.category is not None:
            self._ledgers[buffer.owner.device].add(buffer.category, buffer.nbytes)
            # Other streams must come after what the owner did so far: with another allocator, an
            # earlier user of the same memory is among it.
            position = self.clocks.snapshot(buffer.owner)[buffer.owner]
            made = Operation(buffer.owner, position, what)
            buffer.accesses.append(Access(made, 0, buffer.nbytes, is_write=True))
        storage = tensor.untyped_storage()
        self._buffers[id(storage)] = buffer
        finalizer = weakref.finalize(storage, _on_drop, weakref.ref(self), id(storage), buffer)
        finalizer.atexit = False

    def recount(self, buffer: Buffer, category: Category) -> None:
        """Count a storage under another category."""
        if buffer.owner is not None and buffer.category is not None:
            ledger = self._ledgers[buffer.owner.device]
            ledger.move(buffer.category, category, buffer.nbytes)
            buffer.category = category

    def is_idle(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        """Whether nothing that is enqueued and not over uses the tensor's bytes."""
        begin, end = byte_span(tensor)
        return all(
            use.end <= begin or end <= use.begin or self._is_over(use.by) for use in buffer.accesses
        )

    def _is_over(self, operation: Operation) -> bool:
        passed = self.passed.get(operation.stream)
        return passed is None or passed.value >= operation.position  # compute runs eagerly

    def use(
        self, buffer: Buffer, tensor: torch.Tensor, operation: Operation, *, is_write: bool
    ) -> None:
        """Note that ``operation`` uses ``tensor``; report earlier uses that it does not come after.

        A strided view counts as the whole span from its first to its last byte.
        """
        new = Access(operation, *byte_span(tensor), is_write)
        for old in buffer.accesses:
            if new.conflicts(old) and not self.clocks.is_ordered(old.by, operation.stream):
                self.report(
                    f"{operation} {'overwrites' if is_write else 'reads'} what {old.by} "
                    f"{'writes' if old.is_write else 'reads'}, without having waited for it"
                )
        buffer.accesses = [old for old in buffer.accesses if not new.covers(old)]
        buffer.accesses.append(new)

    def _forget_dropped(self) -> None:
        while self._dropped:
            key, buffer = self._dropped.popleft()
            if self._buffers.get(key) is buffer:
                del self._buffers[key]
            if buffer.owner is not None and buffer.category is not None:
                self._ledgers[buffer.owner.device].remove(buffer.category, buffer.nbytes)
                if not self.is_closed:
                    self._check_drop(buffer, buffer.owner)
            if buffer.on_drop is not None:
                buffer.on_drop()

    def _check_drop(self, buffer: Buffer, owner: StreamKey) -> None:
        for use in buffer.accesses:
            if use.by.stream not in buffer.marked and not self.clocks.is_ordered(use.by, owner):
                self.report(
                    f"{buffer.nbytes} bytes that belong to {owner} are dropped while {use.by} uses "
                    f"them, without mark_use and without {owner} having waited"
                )

    def on_drop(self, key: int, buffer: Buffer) -> None:
        """A storage is gone. Any thread, at any moment."""
        self._dropped.append((key, buffer))
        # A garbage collection may run while this very thread holds the lock; the next who takes the
        # lock then does the bookkeeping.
        if self._lock_holder != threading.get_ident():
            with self.locked():
                pass


def _on_drop(tracker: weakref.ref[Tracker], key: int, buffer: Buffer) -> None:
    alive = tracker()
    if alive is not None:
        alive.on_drop(key, buffer)


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the tensor within its storage, and the one after its last."""
    itemsize = tensor.element_size()
    begin = int(tensor.storage_offset()) * itemsize
    numel = tensor.numel()
    if numel == 0 or tensor.is_contiguous():
        return begin, begin + numel * itemsize
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return begin, begin + (int(reach) + 1) * itemsize
