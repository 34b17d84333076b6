"""Memory of checked CPU devices: poison, and reaching memory whose tensors are gone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch.utils.dlpack import from_dlpack

from .clocks import StreamKey
from .layout import empty_like, offset_elements
from .tracking import Buffer

POISON_BYTE = 0xFF
"""Fills untyped memory: NaN in every floating type, -1 or the largest value in integers."""


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no computation produces by chance.

    NaN in floating and complex types, the largest value in unsigned integers, -1 in signed ones
    (an index out of either is an error), True in booleans.
    """
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        tensor.fill_(float("nan"))
    elif dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(-1 if dtype.is_signed else torch.iinfo(dtype).max)


def poison_memory(memory: torch.Tensor) -> None:
    """Fill the bytes of a dense tensor, without an operator that somebody might be watching."""
    ctypes.memset(memory.data_ptr(), POISON_BYTE, memory.numel() * memory.element_size())


def new_tensor(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A host tensor laid out as ``like``, full of poison, and the memory under it.

    Tensor and memory have storages of their own over the same bytes. The tensor's goes when its
    last user goes, which can be observed, while what was enqueued before can still reach the
    memory; on an accelerator, too, enqueued work holds addresses and keeps nothing alive.
    """
    layout = empty_like(like, torch.device("meta"))
    offset = offset_elements(like)
    size_bytes = layout.untyped_storage().nbytes() + offset * like.element_size()
    memory = torch.empty(size_bytes, dtype=torch.uint8)
    poison_memory(memory)
    storage = from_dlpack(memory).untyped_storage()
    tensor = torch.empty(0, dtype=like.dtype)
    tensor.set_(storage, offset, layout.shape, layout.stride())
    if like.dtype is torch.bool:
        poison(tensor)  # whose bytes are 0 or 1; the poison of others is that of their bytes
    return tensor, memory


def reach(
    tensor: torch.Tensor, buffer: Buffer, stream: StreamKey
) -> Callable[[], torch.Tensor | None]:
    """A way for ``stream`` to reach the tensor's memory later, without keeping it alive.

    Args:
        tensor: a tensor.
        buffer: what is known of its storage.
        stream: who reaches for it.

    Returns:
        A function that gives a tensor over the same memory. For memory that compute allocated it
        gives ``None`` once the storage was dropped. Kept alive are host memory, as accelerators
        keep page-locked memory until copies are through, and what ``stream`` is marked as using.
    """
    is_kept = buffer.owner is None or stream in buffer.marked
    # A lazily conjugated or negated view is more than its place in memory.
    if is_kept or tensor.is_conj() or tensor.is_neg():
        kept = tensor.detach()
        return lambda: kept
    dtype, offset = tensor.dtype, tensor.storage_offset()
    shape, strides = tensor.shape, tensor.stride()

    def over(storage: torch.UntypedStorage | None) -> torch.Tensor | None:
        if storage is None:
            return None
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)

    if buffer.memory is not None:
        memory = buffer.memory.untyped_storage()
        return lambda: over(memory)
    dropped = buffer.storage
    return lambda: over(dropped())
