"""The memory layout a copy of a tensor gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 64  # what torch's CPU allocator aligns to


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a strided layout may share memory (``expand``, sliding windows).

    Nested layouts are told exactly; a few exotic ones that interleave without touching count as
    overlapping.
    """
    if 0 in sizes:
        return False
    span = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size == 1:
            continue
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def empty_like(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor on ``device`` with the shape, strides and dtype of ``like``.

    Kernels may choose another order of summation for other strides, so strides are kept. A layout
    that overlaps itself cannot be copied into; such a tensor becomes dense. The result is never an
    inference tensor: those could not be copied into by another thread.
    """
    # Asked first, since entering the scope costs as much as all the rest.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return empty_like(like, device)
    if not like.is_contiguous() and overlaps_itself(like.shape, like.stride()):
        return torch.empty_like(like, device=device, requires_grad=False)
    offset = offset_elements(like) if device.type == "cpu" else 0
    if not offset:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    storage = torch.empty(offset + span, dtype=like.dtype, device="cpu").untyped_storage()
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(
        storage, offset, like.shape, like.stride()
    )


def offset_elements(like: torch.Tensor) -> int:
    """How many elements a host tensor begins behind a boundary of 64 bytes.

    Matrix products of some CPU libraries differ in the last bit with their operands' alignment. A
    piece of a batch, cut as a view, may begin anywhere; for a copy of it to give the same numbers
    on the host, the copy must begin at the same offset.
    """
    if like.device.type != "cpu" or like.numel() == 0:
        return 0
    return like.data_ptr() % ALIGNMENT_BYTES // like.element_size()
