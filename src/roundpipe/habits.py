"""What is learned of a layer by watching its first forward, because torch does not tell."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from .replicas import BufferName

Mode = tuple[int, bool]  # (layer, training)


class LayerHabits:
    """The habits of one model's layers. Any worker may ask and tell."""

    def __init__(self) -> None:
        self._silent: dict[Mode, frozenset[BufferName]] = {}
        self._lock = threading.Lock()

    def silent_writes(self, mode: Mode) -> frozenset[BufferName] | None:
        """Buffers that the layer writes without torch counting it; None if nobody has looked.

        ``F.batch_norm`` moves its statistics in the kernel and leaves their version counter alone.
        """
        return self._silent.get(mode)

    def watched(self, mode: Mode, silent: frozenset[BufferName]) -> None:
        """The layer was watched, and wrote these buffers unseen."""
        with self._lock:
            self._silent[mode] = self._silent.get(mode, frozenset()) | silent


def contents(buffers: Mapping[BufferName, torch.Tensor]) -> dict[BufferName, torch.Tensor]:
    """What buffers hold now, kept for :func:`written_since`."""
    return {name: buffer.detach().clone() for name, buffer in buffers.items()}


def written_since(
    before: Mapping[BufferName, torch.Tensor], buffers: Mapping[BufferName, torch.Tensor]
) -> frozenset[BufferName]:
    """The buffers whose bits are no longer those of ``before``. Waits for the device."""
    return frozenset(
        name
        for name, old in before.items()
        if name in buffers and not _same_bits(old, buffers[name])
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        one, other = one.nan_to_num(), other.nan_to_num()
    return torch.equal(one, other)
