"""Moving values: activations and gradients between stages, weights up, results home.

A :class:`Value` is one tensor that travels through the pipeline, wherever its copies lie. Its host
copy is made once; what a stage hands on unchanged is the same value, so it is sent to a device once
and never comes back. Nothing here waits on the host except where a comment says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .compat import flatten_subclass
from .devices.base import Category, Device, Event, Moment, Stream
from .microbatch.tree import Structure, flatten, unflatten

CHUNK_BYTES = 16 * 1024 * 1024  # a late activation never waits for more than this much of weights


class Transfer(NamedTuple):
    """A part of a stage's weights on its way up, or its gradients on their way home.

    Attributes:
        kind: ``upload`` or ``download``.
        nbytes: how many bytes.
        begin: when the copy stream got to them.
        end: when it was through.
    """

    kind: str
    nbytes: int
    begin: Moment
    end: Moment


class Origin(NamedTuple):
    """Where a value was made: what the note on a failure on its way home says."""

    stage: str
    device: str


class Value:
    """One tensor between stages: a host copy, copies on devices, and its gradient.

    Attributes:
        requires_grad: whether the tensor required grad where it was made.
        grad: gradient of the run's losses with respect to it, summed over the stages that have
            run backward so far.
        origin: where it was made, if it was made in the pipeline.
    """

    __slots__ = ("_copies", "_host", "_host_ready", "grad", "origin", "requires_grad")

    def __init__(self, host: torch.Tensor | None = None, requires_grad: bool = False) -> None:
        self._host = host
        self._host_ready: Event | None = None
        self._copies: dict[Device, tuple[torch.Tensor, Event]] = {}
        self.requires_grad = requires_grad
        self.grad: Value | None = None
        self.origin: Origin | None = None

    @property
    def has_host(self) -> bool:
        """Whether a host copy exists or is on its way."""
        return self._host is not None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the host copy, which may still be on its way; None without one."""
        return None if self._host is None else tuple(self._host.shape)

    def twin(self) -> Value:
        """Another value with the same host copy, on its way or there, for another run."""
        twin = Value(self._host, self.requires_grad)
        twin._host_ready, twin.origin = self._host_ready, self.origin
        return twin

    def on(self, device: Device) -> bool:
        """Whether ``device`` holds a copy."""
        return device in self._copies

    def keep(self, device: Device, tensor: torch.Tensor) -> None:
        """``tensor``, made by what ``device`` computed so far, is this value's copy there."""
        self._copies[device] = (tensor, device.record(Stream.COMPUTE))

    def drop(self, device: Device) -> None:
        """Forget the copy on ``device``."""
        self._copies.pop(device, None)

    def drop_host(self) -> None:
        """Forget the host copy (a checkpoint that backward is done with)."""
        self._host = self._host_ready = None

    def send(self, device: Device) -> None:
        """Start moving the value to ``device``, unless it is there."""
        if device in self._copies:
            return
        host = self._host
        if host is None:
            raise RuntimeError("a value was asked for after its last copy was dropped")
        if self._host_ready is not None:
            # Another device's download fills the host copy; read earlier, it would be garbage.
            device.wait(Stream.INWARD, self._host_ready)
        target = device.empty(host, Stream.INWARD, Category.ACTIVATIONS)
        device.copy(target, host, Stream.INWARD)
        self._copies[device] = (target, device.record(Stream.INWARD))

    def fetch(self, device: Device, read_only: bool = False) -> torch.Tensor:
        """The copy on ``device``, for work enqueued from now on.

        The copy is the caller's afterwards: whoever wants it kept calls :meth:`keep`.

        Args:
            device: where to.
            read_only: the caller promises not to overwrite it, so that where device memory is host
                memory the host copy itself will do.
        """
        if read_only and device.shares_host_memory and self._host is not None:
            return self._host
        self.send(device)
        tensor, ready = self._copies.pop(device)
        # The compute stream must not read before the copy (or another stage's compute) is through.
        device.wait(Stream.COMPUTE, ready)
        on_its_way_home = self._host_ready
        if on_its_way_home is not None and not on_its_way_home.query():
            # The stage may overwrite the copy in place while it is still being read on its way
            # home: the checkpoint would hold what the stage wrote.
            device.wait(Stream.COMPUTE, on_its_way_home)
        # It was made by a copy stream; dropped on the host, its memory could be handed to the next
        # copy while the compute stream still reads it.
        device.mark_use(tensor, Stream.COMPUTE)
        return tensor

    def bring_home(self, device: Device, tensor: torch.Tensor, stage: str) -> None:
        """Start making the host copy from ``tensor``, which ``device`` computed in ``stage``."""
        self.origin = Origin(stage, device.name)
        self._host, self._host_ready = download(device, tensor)

    def failed_on_the_way_home(self) -> bool:
        """Whether it was the download that failed; asked when the value could not be had."""
        try:
            self.home()
        except BaseException:  # noqa: BLE001 - it is on its way to the user already
            return self._host_ready is not None
        return False

    def home(self) -> torch.Tensor:
        """The host copy, complete. Blocks the calling thread until it is.

        Raises:
            BaseException: what failed on the way.
        """
        if self._host_ready is not None:
            self._host_ready.synchronize()
            self._host_ready = None
        if self._host is None:
            raise RuntimeError("a value that never came home was asked for")
        return self._host


def download(
    device: Device, tensor: torch.Tensor, buffer: torch.Tensor | None = None
) -> tuple[torch.Tensor, Event | None]:
    """Start copying ``tensor``, which ``device`` computed, to host memory.

    Args:
        device: where the tensor is.
        tensor: what to copy.
        buffer: where to copy it to; a new (page-locked) tensor if not given.

    Returns:
        The host tensor and the event after which it is complete. Where device memory is host memory
        the tensor itself, complete.
    """
    if device.shares_host_memory:
        return tensor, None
    host = device.host_empty(tensor) if buffer is None else buffer
    # The copy stream must not read before the compute stream has written.
    device.wait(Stream.OUTWARD, device.record(Stream.COMPUTE))
    device.copy(host, tensor, Stream.OUTWARD)
    # The tensor is dropped here as soon as the stage goes on; without this its memory would be
    # handed out while the copy still reads it.
    device.mark_use(tensor, Stream.OUTWARD)
    return host, device.record(Stream.OUTWARD)


class Border:
    """A microbatch's state in front of a layer: a tree whose tensors are values.

    Attributes:
        structure: the tree without its leaves.
        leaves: values in place of tensors, other objects as they are.
        sources: the caller's tensors that shall receive gradients, with their values.
    """

    __slots__ = ("leaves", "sources", "structure")

    def __init__(self, structure: Structure, leaves: list[Any]) -> None:
        self.structure = structure
        self.leaves = leaves
        self.sources: list[tuple[torch.Tensor, Value]] = []

    @classmethod
    def from_host(cls, tree: Any, keep_grad: bool) -> Border:
        """The state of a tree of host tensors, such as a microbatch's arguments.

        Args:
            tree: the tree.
            keep_grad: whether tensors that require grad shall receive gradients.
        """
        leaves, structure = flatten(tree)
        border = cls(structure, leaves)
        known: dict[int, Value] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                value = known.get(id(leaf))
                if value is None:
                    wanted = keep_grad and leaf.requires_grad
                    value = known[id(leaf)] = Value(leaf.detach().to("cpu"), wanted)
                    if wanted:
                        border.sources.append((leaf, value))
                leaves[position] = value
        return border

    def values(self) -> Iterator[Value]:
        """Each value once, in order."""
        seen: set[int] = set()
        for leaf in self.leaves:
            if isinstance(leaf, Value) and id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf

    def home(self) -> Any:
        """The tree with its tensors in host memory; blocks until they are there."""
        leaves = [leaf.home() if isinstance(leaf, Value) else leaf for leaf in self.leaves]
        return unflatten(self.structure, leaves)


@dataclass
class _Piece:
    """A part of one tensor, small enough for one gap between activations."""

    target: torch.Tensor
    source: torch.Tensor
    nbytes: int


class ChunkedUpload:
    """Copies of a stage's weights, issued piece by piece between the activations' copies."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pieces: list[_Piece] = []
        self._next = 0

    def add(self, source: torch.Tensor, category: Category) -> torch.Tensor:
        """Plan the copy of one host tensor. Returns its place on the device, still unwritten.

        Of a wrapper subclass (quantised weights) the tensors inside it are copied, as they are.
        """
        inside = flatten_subclass(source)
        if inside is not None:
            parts = {name: self.add(part, category) for name, part in inside.parts.items()}
            return inside.rebuild(parts)
        device = self._device
        target = device.empty(source, Stream.WEIGHTS, category)
        nbytes = source.numel() * source.element_size()
        if nbytes <= CHUNK_BYTES or source.dim() == 0 or source.shape[0] == 1:
            self._pieces.append(_Piece(target, source, nbytes))
            return target
        rows = max(1, source.shape[0] * CHUNK_BYTES // nbytes)
        for begin in range(0, source.shape[0], rows):
            part = source[begin : begin + rows]
            size = part.numel() * part.element_size()
            self._pieces.append(_Piece(target[begin : begin + rows], part, size))
        return target

    @property
    def remaining_bytes(self) -> int:
        """Bytes not yet issued."""
        return sum(piece.nbytes for piece in self._pieces[self._next :])

    def issue(self, wanted_bytes: int) -> None:
        """Enqueue copies of about ``wanted_bytes``."""
        issued = 0
        while issued < wanted_bytes and self._next < len(self._pieces):
            piece = self._pieces[self._next]
            self._device.copy(piece.target, piece.source, Stream.WEIGHTS)
            issued += piece.nbytes
            self._next += 1

    def finish(self) -> Event:
        """Enqueue the rest. Returns the event after which everything is on the device."""
        self.issue(max(1, self.remaining_bytes))
        self._pieces.clear()
        self._next = 0
        return self._device.record(Stream.WEIGHTS)
