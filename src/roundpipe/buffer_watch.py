"""Buffers that layers change: noticed, given back to recompute, written to the user's model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from .calls import BufferHistory, Call, Chain
from .errors import StateError
from .habits import contents, same_bits, written_since
from .plan import ModelExecutePlan
from .records import LayerRecord
from .replicas import BufferName, LayerOnDevice
from .stage_state import StageRun, version_of
from .transfer import Value

BufferSignature = dict[BufferName, tuple[torch.Tensor, int]]


class BufferWatch:
    """The buffers of one stage task's layers. Used by the device's worker only.

    Args:
        run: the stage; its call keeps the histories.
        fetch: gives a value's copy on the device.
    """

    def __init__(self, run: StageRun, fetch: Callable[[Value], torch.Tensor]) -> None:
        self._call = run.call
        self._task = run.task
        self._device = run.device
        self._weights = run.weights
        self._habits = run.habits
        self._fetch = fetch
        self._signatures: dict[int, BufferSignature] = {}

    @contextlib.contextmanager
    def watching(self, index: int, chain: Chain) -> Iterator[None]:
        """Entered around a layer's first forward of a microbatch, which may change its buffers."""
        layer = self._weights.layers[index]
        if not layer.has_buffers:
            yield
            return
        mode = (index, layer.module.training)
        silent = self._habits.silent_writes(mode)
        held = contents(layer.buffers()) if silent is None else {}
        before = self._signatures.get(index) or _signature(layer)
        yield
        now = self._signatures[index] = _signature(layer)
        if silent is None:
            silent = written_since(held, layer.buffers())
            self._habits.watched(mode, silent)
        changed = _differing(before, now) | silent
        # What a kernel writes unseen (batch statistics) lies beside what is counted (its calls).
        paths = {path for path, _ in changed}
        self._note(index, chain, changed | {name for name in now if name[0] in paths})

    def _note(self, index: int, chain: Chain, changed: set[BufferName]) -> None:
        """After a layer's forward: remember what its buffers held, if it ever changed any."""
        history = self._call.histories.get(index)
        layer = self._weights.layers[index]
        if history is None:
            if not changed:
                return
            history = self._begin_history(index, chain, layer)
        if changed:
            history.changed |= changed
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
        values: dict[int, Value] = {}  # modules of the layer may share a buffer
        for tensor in buffers.values():
            if id(tensor) not in values:
                value = values[id(tensor)] = Value()
                value.bring_home(self._device, tensor.detach().clone(), self._task.label)
        return {key: values[id(tensor)] for key, tensor in buffers.items()}

    def rewind(self, index: int, chain: Chain) -> None:
        """Before a recompute: the buffers as the first forward of this microbatch found them."""
        history = self._call.histories.get(index)
        if history is not None:
            before = history.before[chain.index]
            tensors = {id(value): self._fetch(value) for value in set(before.values())}
            self._weights.layers[index].set_buffers(
                {key: tensors[id(value)] for key, value in before.items()}
            )


def on_one_device_with_buffers(
    plan: ModelExecutePlan, layers: Sequence[LayerRecord], run_type: str
) -> ModelExecutePlan:
    """The plan without wide stages that run the forward of layers with buffers.

    A layer that changes a buffer finds what it left there with the microbatch before, which ran on
    another replica. Recompute gets its buffers from the histories, on any device.
    """
    if not plan.is_wide:
        return plan
    having = {
        layer.index for layer in layers if any(module._buffers for module in layer.module.modules())
    }

    def narrow(stage: range, replicas: int) -> int:
        return 1 if having.intersection(stage) else replicas

    forward = list(map(narrow, plan.fwd_plan, plan.fwd_replicas))
    backward = list(plan.bwd_replicas)
    if run_type == "fused":
        backward[0] = narrow(plan.bwd_plan[0], backward[0])
    return replace(plan, fwd_replicas=forward, bwd_replicas=backward)


def commit_buffers(call: Call, layers: Sequence[LayerRecord]) -> None:
    """Write what the layers' forwards made of their buffers into the user's model.

    Raises:
        StateError: a buffer that changed is held by several layers, so that some of them computed
            with another value than in a plain loop.
    """
    changed = {index: history for index, history in call.histories.items() if history.changed}
    if not changed:
        return
    holders: dict[int, set[int]] = {}
    for layer in layers:
        for buffer in layer.module.buffers():
            holders.setdefault(id(buffer), set()).add(layer.index)
    writes: list[tuple[nn.Module, str, torch.Tensor | None]] = []
    for index, history in changed.items():
        modules = dict(layers[index].module.named_modules())
        for path, name in sorted(history.changed):
            owner, value = modules[path], history.latest.get((path, name))
            old = owner._buffers.get(name)
            if old is not None and value is not None and same_bits(old, value.home()):
                continue
            sharing = holders.get(id(old), {index})
            if len(sharing) > 1:
                numbers = " and ".join(str(number) for number in sorted(sharing))
                raise StateError(
                    f"buffer {name!r} of {type(owner).__name__} is shared by layers {numbers}, and "
                    f"layer {index} changes it, which the others would not see; give each layer "
                    "its own"
                )
            writes.append((owner, name, None if value is None else value.home()))
    for owner, name, new in writes:
        _write_buffer(owner, name, new)


@torch.no_grad()
def _write_buffer(owner: nn.Module, name: str, new: torch.Tensor | None) -> None:
    old = owner._buffers.get(name)
    if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
        owner._buffers[name] = new
    else:
        old.copy_(new)


def _signature(layer: LayerOnDevice) -> BufferSignature:
    # The tensors themselves, not their ids: an id may come back with another tensor.
    return {key: (tensor, version_of(tensor)) for key, tensor in layer.buffers().items()}


def _differing(one: BufferSignature, other: BufferSignature) -> set[BufferName]:
    names = one.keys() ^ other.keys()
    for key in one.keys() & other.keys():
        (before, version), (after, now) = one[key], other[key]
        if before is not after or version != now:
            names.add(key)
    return names
