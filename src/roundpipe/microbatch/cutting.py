"""Cutting one leaf along a dimension, whatever it is: tensor, DTensor or BlockMask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch.block_mask import cut_mask, is_block_mask, mask_rows
from roundpipe.microbatch.dtensor import cut_dtensor, is_dtensor, shard_sizes
from roundpipe.microbatch.sizes import even_sizes, spans
from roundpipe.microbatch.specs import WHOLE, Cut, Fold, Rule, Where


def dim_to_cut(value: Any, rule: Rule, where: Where) -> int | None:
    """The dimension along which ``value`` is to be cut; ``None`` if it goes whole.

    Raises:
        InvalidValueError: the spec names a dimension that the value lacks.
    """
    if rule is WHOLE:
        return None
    if isinstance(rule, Fold):
        raise InvalidValueError(
            f"{where()} has a _CustomReducer, which says how to merge; to split give "
            "TensorChunkSpec(dim) or Replicate"
        )
    if isinstance(value, torch.Tensor):
        if isinstance(rule, Cut):
            return _checked_dim(value, rule, where)
        return 0 if value.ndim else None
    if is_block_mask(value) and mask_rows(value) is not None:
        if isinstance(rule, Cut) and rule.dim != 0:
            raise InvalidValueError(
                f"{where()} is a BlockMask, so TensorChunkSpec({rule.dim}) does not fit; a "
                "BlockMask is cut along its batch, TensorChunkSpec(0)"
            )
        return 0
    return None


def _checked_dim(tensor: torch.Tensor, rule: Cut, where: Where) -> int | None:
    ndim = tensor.ndim
    if ndim == 0 and not rule.direct:
        return None
    if not -ndim <= rule.dim < ndim:
        expected = f"dimensions {-ndim} to {ndim - 1}" if ndim else "no dimensions; use Replicate"
        raise InvalidValueError(
            f"{where()} has shape {tuple(tensor.shape)}, so TensorChunkSpec({rule.dim}) does not "
            f"fit: it has {expected}"
        )
    return rule.dim % ndim


def rows_of(value: Any, dim: int) -> int:
    """How many rows ``value`` has to give away along ``dim``.

    For a sharded DTensor that is what its fullest rank holds, since it is cut rank by rank.
    """
    if not isinstance(value, torch.Tensor):
        return mask_rows(value) or 0
    return max(shard_sizes(value, dim)) if is_dtensor(value) else int(value.shape[dim])


def cut(
    value: Any,
    dim: int,
    count: int,
    where: Where,
    *,
    sizes: Sequence[int] | None = None,
    align: bool = False,
) -> Sequence[Any]:
    """Cut ``value`` along ``dim``; pieces of strided tensors are views.

    Args:
        value: a tensor, DTensor or BlockMask.
        dim: as :func:`dim_to_cut` gave it.
        count: number of pieces.
        where: gives the path of the value.
        sizes: rows of each piece; ``None`` cuts as ``torch.tensor_split`` does.
        align: for DTensors, see :func:`~roundpipe.microbatch.dtensor.cut_dtensor`.

    Raises:
        InvalidTypeError: a tensor of a layout that cannot be cut.
        InvalidValueError: see :func:`~roundpipe.microbatch.dtensor.cut_dtensor`.
    """
    if not isinstance(value, torch.Tensor):
        return cut_mask(value, sizes or even_sizes(rows_of(value, 0), count))
    if is_dtensor(value):
        if sizes is not None:
            raise InvalidValueError(
                f"{where()} is a DTensor and the microbatches have {list(sizes)} rows; a DTensor "
                "can only be cut evenly; cut it in the split function"
            )
        return cut_dtensor(value, dim, count, align, where())
    try:
        if sizes is None:
            return value.tensor_split(count, dim)
        return [value.narrow(dim, *span) for span in spans(sizes)]
    except (RuntimeError, NotImplementedError) as error:
        sizes = sizes or even_sizes(value.shape[dim], count)
        return _cut_without_views(value, dim, sizes, where, error)


def _cut_without_views(
    tensor: torch.Tensor, dim: int, sizes: Sequence[int], where: Where, error: Exception
) -> list[torch.Tensor]:
    if tensor.layout is not torch.sparse_coo:
        raise InvalidTypeError(
            f"{where()} has layout {tensor.layout} and shape {tuple(tensor.shape)}; torch cannot "
            f"cut that along dimension {dim}; convert it, give Replicate, or cut it in a function"
        ) from error
    return [torch.narrow_copy(tensor, dim, *span) for span in spans(sizes)]
