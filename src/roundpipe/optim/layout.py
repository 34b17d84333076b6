"""How the elements of a tensor lie in memory; the kernels walk several tensors at once."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Whether equal indices lie at equal offsets, ``other`` being dense."""
    if tensor.shape != other.shape:
        return False
    return (tensor.is_contiguous() and other.is_contiguous()) or tensor.stride() == other.stride()


def like(param: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` itself if it has ``dtype`` and lies as ``param`` does, else a copy that does."""
    if tensor.dtype is dtype and same_layout(tensor, param):
        return tensor
    return torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(tensor)
