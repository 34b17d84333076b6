"""Noticing that layers change buffers, and giving recompute those that the forward found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from .calls import BufferHistory, Call, Chain, StageTask
from .devices.base import Device
from .replicas import BufferName, LayerOnDevice
from .stage_state import version_of
from .stage_weights import StageWeights
from .transfer import Value

BufferSignature = dict[BufferName, tuple[torch.Tensor, int]]


class BufferWatch:
    """The buffers of one stage task's layers. Used by the device's worker only.

    Args:
        call: keeps the histories.
        task: the task.
        device: its device.
        weights: its layers.
        fetch: gives a value's copy on the device.
    """

    def __init__(
        self,
        call: Call,
        task: StageTask,
        device: Device,
        weights: StageWeights,
        fetch: Callable[[Value], torch.Tensor],
    ) -> None:
        self._call = call
        self._task = task
        self._device = device
        self._weights = weights
        self._fetch = fetch
        self._signatures: dict[int, BufferSignature] = {}

    @contextlib.contextmanager
    def watching(self, index: int, chain: Chain) -> Iterator[None]:
        """Entered around a layer's first forward of a microbatch, which may change its buffers."""
        layer = self._weights.layers[index]
        if not layer.has_buffers:
            yield
            return
        before = self._signatures.get(index) or _signature(layer)
        yield
        now = self._signatures[index] = _signature(layer)
        self._note(index, chain, changed=not _same(before, now))

    def _note(self, index: int, chain: Chain, changed: bool) -> None:
        """After a layer's forward: remember what its buffers held, if it ever changed any."""
        history = self._call.histories.get(index)
        layer = self._weights.layers[index]
        if history is None:
            if not changed:
                return
            history = self._begin_history(index, chain, layer)
        if changed:
            history.latest = self._snapshot(layer.buffers())
        history.before[chain.index + 1] = history.latest

    def _begin_history(self, index: int, chain: Chain, layer: LayerOnDevice) -> BufferHistory:
        # Until now nothing had changed: earlier microbatches, too, began with the user's buffers.
        initial = {
            key: Value(tensor.detach().clone()) for key, tensor in layer.original_buffers().items()
        }
        history = BufferHistory(dict.fromkeys(range(chain.index + 1), initial))
        self._call.histories[index] = history
        return history

    def _snapshot(self, buffers: dict[BufferName, torch.Tensor]) -> dict[BufferName, Value]:
        snapshot = {}
        for key, tensor in buffers.items():
            value = Value()
            value.bring_home(self._device, tensor.detach().clone(), self._task.label)
            snapshot[key] = value
        return snapshot

    def rewind(self, index: int, chain: Chain) -> None:
        """Before a recompute: the buffers as the first forward of this microbatch found them."""
        history = self._call.histories.get(index)
        if history is not None:
            before = history.before[chain.index]
            tensors = {key: self._fetch(value) for key, value in before.items()}
            self._weights.layers[index].set_buffers(tensors)


def _signature(layer: LayerOnDevice) -> BufferSignature:
    # The tensors themselves, not their ids: an id may come back with another tensor.
    return {key: (tensor, version_of(tensor)) for key, tensor in layer.buffers().items()}


def _same(one: BufferSignature, other: BufferSignature) -> bool:
    return one.keys() == other.keys() and all(
        tensor is other[key][0] and version == other[key][1]
        for key, (tensor, version) in one.items()
    )
