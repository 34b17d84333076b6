"""What layers cost: sizes now, measured times later, as numbers for the planner."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .devices.base import Device

# A stage may use half of the share of a device's memory that the model may use, since the next
# stage's weights arrive meanwhile; half of that is left for the stage's gradients.
MODEL_SHARE_OF_MEMORY = 0.6


def layer_bytes(layer: nn.Module) -> int:
    """Bytes of the parameters and buffers of a layer, shared ones counted once."""
    tensors = {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def stage_limit_bytes(devices: Sequence[Device]) -> int | None:
    """Most bytes of weights that a stage may have on the smallest device; None if unknown."""
    sizes = [device.memory().total_bytes for device in devices]
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return int(min(known) * MODEL_SHARE_OF_MEMORY / 2 / 2)
