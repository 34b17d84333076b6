"""Costs from the sizes of layers, for the time before there are measurements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from roundpipe.devices.base import Device
from roundpipe.plan import DeviceSpec, LayerCost, LayerCosts, Machine

# Times are estimated from bytes, so only their ratios mean something: a megabyte of weights counts
# as a millisecond for a microbatch, backward as twice forward, and a layer without weights as a
# little, for what it computes and for being dispatched.
_BYTES_PER_MS = 1e6
_LEAST_MS = 0.02
_BACKWARD_FACTOR = 2.0


def layer_bytes(layer: nn.Module) -> int:
    """Bytes of the parameters and buffers of a layer, shared ones counted once."""
    tensors = {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def multiplied_bytes(layer: nn.Module) -> int:
    """Bytes of the parameters that every row is multiplied with: an embedding's are only read."""
    looked_up = {
        id(module.weight)
        for module in layer.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    return sum(p.numel() * p.element_size() for p in layer.parameters() if id(p) not in looked_up)


def gradient_bytes(layer: nn.Module) -> int:
    """Bytes of the gradients that a layer's backward makes."""
    return sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)


def estimated_costs(layers: Sequence[nn.Module], name: str) -> LayerCosts:
    """Costs of ``layers`` as far as their sizes tell."""
    costs = []
    for layer in layers:
        forward_ms = _LEAST_MS + multiplied_bytes(layer) / _BYTES_PER_MS
        costs.append(
            LayerCost(
                forward_ms,
                _BACKWARD_FACTOR * forward_ms,
                weight_bytes=layer_bytes(layer),
                gradient_bytes=gradient_bytes(layer),
            )
        )
    return LayerCosts(tuple(costs), name)


def machine_of(devices: Sequence[Device]) -> Machine:
    """The devices as the planner sees them, with all of their memory."""
    return Machine(
        tuple(
            DeviceSpec(device.name, device.torch_device.type, 1.0, device.memory().total_bytes)
            for device in devices
        )
    )
