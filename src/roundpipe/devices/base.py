"""The device interface: everything the engine asks of the hardware.

Code above this interface holds no torch stream or event and never names a vendor. A device has one
compute stream and three copy streams; every copy names the stream it runs on, and every order
between streams is an event that one stream records and another waits for.

    host memory ──WEIGHTS──▶ ┌────────┐            parameters, in chunks
    host memory ──INWARD───▶ │COMPUTE │            activations, labels, gradients coming in
    host memory ◀──OUTWARD── └────────┘            activations and gradients going home
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch


class Stream(enum.Enum):
    """The streams of a device."""

    COMPUTE = "compute"
    WEIGHTS = "weights"
    INWARD = "inward"
    OUTWARD = "outward"

    __hash__ = object.__hash__  # members are equal only to themselves; Enum hashes their names


class Category(enum.Enum):
    """What a tensor on a device is, for the byte ledger."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one device, in bytes.

    Attributes:
        total_bytes: size of the device's memory, or the limit set for it; ``None`` when unknown.
        allocated_bytes: bytes held by tensors now.
        peak_bytes: most bytes held at once since the last ``reset_peak``.
        by_category: bytes now, for devices that keep a ledger; otherwise empty.
        peak_by_category: peak of each category on its own, likewise.
    """

    total_bytes: int | None
    allocated_bytes: int
    peak_bytes: int
    by_category: Mapping[Category, int] = field(default_factory=dict)
    peak_by_category: Mapping[Category, int] = field(default_factory=dict)


class Event(ABC):
    """A point in a stream's work. Any thread may ask or wait."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the stream has passed this point."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed this point.

        Raises:
            BaseException: what failed on the stream before this point, the same object, where the
                back end can tell (CPU devices; accelerators report as their runtime does).
        """


class Moment(ABC):
    """When a stream reached a point in its work, on the host's clock. Any thread may ask."""

    __slots__ = ()

    @abstractmethod
    def ns(self) -> int:
        """Nanoseconds as of :data:`roundpipe.trace.clock_ns`; blocks until the point is passed."""


class HostMoment(Moment):
    """A moment that is known already."""

    __slots__ = ("_ns",)

    def __init__(self, at_ns: int) -> None:
        self._ns = at_ns

    def ns(self) -> int:
        """When it was."""
        return self._ns


class Device(ABC):
    """One worker's hardware.

    Methods are called from the device's worker thread, except ``record`` results (any thread),
    ``host_empty``, ``memory``, ``reset_peak``, ``synchronize`` and ``close``.

    Attributes:
        name: shown in errors and traces, as ``cpu:0`` or ``cuda:1``; unique in a pool (a second
            logical device on one accelerator is ``cuda:1#1``).
        index: position in the pool.
        torch_device: where the tensors live.
        shares_host_memory: whether device memory *is* host memory and nothing checks it, so that
            weights may be used where they lie and gradients handed over instead of copied.
        random_lock: held from seeding until a layer has drawn, where several logical devices share
            an accelerator and hence its generator; ``None`` elsewhere.
    """

    name: str
    index: int
    torch_device: torch.device
    shares_host_memory: bool
    random_lock: AbstractContextManager[object] | None = None

    @abstractmethod
    def worker_scope(self) -> AbstractContextManager[None]:
        """Entered once by the worker thread: current device, threads per worker."""

    @abstractmethod
    def compute_scope(self) -> AbstractContextManager[None]:
        """Entered around user code: the compute stream is current, temporaries are counted."""

    @abstractmethod
    def empty(self, like: torch.Tensor, stream: Stream, category: Category) -> torch.Tensor:
        """A new tensor on this device with the shape, strides and dtype of ``like``.

        It belongs to ``stream``: once dropped, later work of that stream may reuse its memory.

        Raises:
            torch.OutOfMemoryError: no room.
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Enqueue ``target.copy_(source)`` on ``stream``; either may be host memory.

        Does not wait when host memory is page-locked. The caller keeps both tensors alive until an
        event recorded after the copy has passed (or has made the owning stream wait for it).
        """

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event after everything enqueued on ``stream`` so far."""

    @abstractmethod
    def start_clock(self) -> None:
        """Set the clock of moments anew; called by the worker when a run begins, on idle streams.

        Nothing where moments are the host's own.
        """

    @abstractmethod
    def moment(self, stream: Stream) -> Moment:
        """When everything enqueued on ``stream`` so far is over."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Later work of ``stream`` starts after ``event``, of this or another device of the kind.

        For the compute stream of a CPU device this blocks the calling worker.
        """

    @abstractmethod
    def mark_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """``tensor`` of another stream is used by what is enqueued on ``stream`` so far.

        Its memory is not reused before that use is over, even if the tensor is dropped now.
        """

    @abstractmethod
    def account(self, tensor: torch.Tensor, category: Category) -> None:
        """Count a tensor that was made on this device by compute (a gradient, an output)."""

    @abstractmethod
    def host_empty(self, like: torch.Tensor) -> torch.Tensor:
        """A new dense host tensor, shape and dtype of ``like``, page-locked where that exists."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed this device's own generator; nothing where it has none (CPU devices)."""

    @abstractmethod
    def random_sandbox(self) -> AbstractContextManager[None]:
        """Entered around a run: the device's generator is afterwards as it was before."""

    @abstractmethod
    def has_room(self, wanted_bytes: int) -> bool:
        """Whether keeping ``wanted_bytes`` more on the device leaves it comfortable."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """What is on the device now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak from what is allocated now."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all streams of this device are idle."""

    @abstractmethod
    def close(self) -> None:
        """End the device's threads and drop its streams. May be called twice."""
