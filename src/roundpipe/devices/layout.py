"""The memory layout a copy of a tensor gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
    that overlaps itself cannot be copied into; such a tensor becomes dense.
    """
    if overlaps_itself(like.shape, like.stride()):
        return torch.empty_like(like, device=device, requires_grad=False)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
