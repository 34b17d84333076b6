"""What is learned of a layer by watching its first forward, because torch does not tell."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .replicas import BufferName

Mode = tuple[int, bool]  # (layer, training)
Attributes = list[tuple[str, nn.Module, dict[str, Any]]]


class LayerHabits:
    """The habits of one model's layers. Any worker may ask and tell."""

    def __init__(self) -> None:
        self._silent: dict[Mode, frozenset[BufferName]] = {}
        self._attributes_seen: set[Mode] = set()
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

    def wants_attributes(self, mode: Mode) -> bool:
        """Whether nobody has looked yet if the layer rebinds attributes; whoever asks will."""
        if mode in self._attributes_seen:
            return False
        with self._lock:
            unseen = mode not in self._attributes_seen
            self._attributes_seen.add(mode)
            return unseen


def attributes(layer: nn.Module) -> Attributes:
    """The plain attributes of all modules of a layer, but torch's own, which may cache."""
    return [
        (path, module, dict(module.__dict__))
        for path, module in layer.named_modules()
        if not type(module).__module__.startswith("torch.")
    ]


def rebound_since(before: Attributes) -> list[str]:
    """The attributes that hold another object than before, by their names in the layer."""
    names = []
    for path, module, held in before:
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        for name, value in module.__dict__.items():
            old = held.get(name)
            # Weight norm of the older kind computes its weight anew in a hook, each time.
            if value is not old and not _same_atom(value, old) and name not in computed:
                names.append(f"self.{path}.{name}" if path else f"self.{name}")
    return names


def _same_atom(one: object, other: object) -> bool:
    return isinstance(one, bool | int | float | str | tuple | type(None)) and one == other


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
        if name in buffers and not same_bits(old, buffers[name])
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, any NaN like any other. Waits for the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        one, other = one.nan_to_num(), other.nan_to_num()
    return torch.equal(one, other)
