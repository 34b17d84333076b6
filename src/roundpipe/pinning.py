"""Page-locking the model's parameters, so that copies to a device run at full speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .compat import flatten_subclass, host_register
from .devices.base import Device
from .errors import InvalidValueError

PIN_MODES = ("alloc", "register", "off")
ALIGNMENT_BYTES = 256
LARGEST_BLOCK_BYTES = 1 << 30


def pin_parameters(
    parameters: Iterable[nn.Parameter], mode: str, devices: Sequence[Device]
) -> None:
    """Page-lock ``parameters`` as ``pin_model`` says; nothing on CPU devices.

    Raises:
        InvalidValueError: an unknown mode.
    """
    if mode not in PIN_MODES:
        raise InvalidValueError(
            f"pin_model is {mode!r}; choose one of {', '.join(map(repr, PIN_MODES))}"
        )
    accelerators = [device for device in devices if device.torch_device.type != "cpu"]
    # Tensors inside a wrapper subclass stay where they are: they are not its own to move.
    movable = [p for p in parameters if p.device.type == "cpu" and flatten_subclass(p) is None]
    unpinned = [p for p in movable if not _is_pinned(p)]
    if not accelerators or mode == "off":
        return
    if mode == "register" and all(
        host_register(parameter, accelerators[0].torch_device) for parameter in unpinned
    ):
        return
    _move_into_blocks(unpinned, accelerators[0])


def _is_pinned(parameter: nn.Parameter) -> bool:
    return parameter.numel() > 0 and parameter.is_pinned()


def _move_into_blocks(parameters: Sequence[nn.Parameter], device: Device) -> None:
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    sizes_bytes, places = plan_blocks(sizes)
    blocks = [device.host_empty(torch.empty(size, dtype=torch.uint8)) for size in sizes_bytes]
    for parameter, size, (block, offset) in zip(parameters, sizes, places, strict=True):
        flat = blocks[block][offset : offset + size].view(parameter.dtype)
        place = torch.as_strided(flat, parameter.shape, _dense_strides(parameter))
        place.copy_(parameter.detach())
        parameter.data = place


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(parameter, device="meta").stride())


def plan_blocks(sizes_bytes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Where to put tensors in few large blocks whose sizes are powers of two.

    Page-locking allocators round every request up to a power of two; tensors allocated on their own
    waste up to half of the memory. Here only the last block can.

    Args:
        sizes_bytes: the tensors.

    Returns:
        The blocks' sizes, and for each tensor its block and its offset in bytes.
    """
    blocks: list[int] = []
    free: list[int] = []
    places: list[tuple[int, int]] = []
    remaining = sum(_aligned(size) for size in sizes_bytes)
    for size in sizes_bytes:
        wanted = _aligned(size)
        block = next((i for i, room in enumerate(free) if room >= wanted), None)
        if block is None:
            block = len(blocks)
            room = max(_power_up(wanted), _power_down(min(remaining, LARGEST_BLOCK_BYTES)))
            blocks.append(room)
            free.append(room)
        places.append((block, blocks[block] - free[block]))
        free[block] -= wanted
        remaining -= wanted
    return blocks, places


def _aligned(size: int) -> int:
    return max(1, -(-size // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _power_up(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _power_down(size: int) -> int:
    return 1 << (size.bit_length() - 1)
