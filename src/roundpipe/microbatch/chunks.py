"""Splitting and merging as plain functions, with no engine involved.

They are those of ``torch.distributed.pipelining.microbatch``, for a program that cuts its batches
by itself. They are stricter than the engine's automatic rule: what cannot be cut is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch.argtree import ArgumentTree
from roundpipe.microbatch.columns import columns_from_trees
from roundpipe.microbatch.cutting import cut
from roundpipe.microbatch.dtensor import is_dtensor
from roundpipe.microbatch.joining import Manner
from roundpipe.microbatch.merge import join_columns
from roundpipe.microbatch.messages import warn_once
from roundpipe.microbatch.specs import match_spec

_WAYS = "give Replicate in args_chunk_spec or kwargs_chunk_spec"


def split_args_kwargs_into_chunks(
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    *,
    align: bool = False,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cut arguments into ``chunks`` pieces.

    Without a spec, tensors with dimensions and ``BlockMask``s are cut along dimension 0 as
    ``torch.tensor_split`` does, as views; everything else goes to every piece unchanged, as
    non-tensors do whatever their spec.

    Args:
        args: positional arguments.
        kwargs: keyword arguments; ``None`` for none.
        chunks: number of pieces, 1 or more.
        args_chunk_spec: a spec that mirrors ``args``; ``None`` for the default.
        kwargs_chunk_spec: a spec that mirrors ``kwargs``; ``None`` for the default.
        align: for DTensors, move rows between ranks first, so that piece i over all ranks has the
            rows that piece i of the whole tensor has. All ranks have to call it together.

    Returns:
        The positional arguments of each piece, and the keyword arguments of each piece.

    Raises:
        InvalidValueError: a dimension is smaller than ``chunks``, or a spec does not fit.
        InvalidTypeError: an argument of this function has a wrong type.
    """
    args = _checked(args, "args", tuple | list, "a tuple of positional arguments")
    kwargs = _checked({} if kwargs is None else kwargs, "kwargs", dict, "a dict or None")
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        raise InvalidTypeError(f"chunks is {chunks!r}; expected an int, 1 or more")
    if chunks < 1:
        raise InvalidValueError(f"chunks is {chunks}; expected an int, 1 or more")
    args_tree = _tree(tuple(args), "args", args_chunk_spec)
    kwargs_tree = _tree(kwargs, "kwargs", kwargs_chunk_spec)
    return _cut_all(args_tree, chunks, align), _cut_all(kwargs_tree, chunks, align)


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any, *, align: bool = False) -> Any:
    """Merge pieces; the inverse of :func:`split_args_kwargs_into_chunks`.

    ``TensorChunkSpec(dim)`` concatenates along ``dim``, ``_Replicate`` requires equality, a
    ``_CustomReducer`` folds the pieces in order. Without a spec, tensors with dimensions are
    concatenated along dimension 0 and everything else has to be equal.

    Args:
        chunks: the pieces, all of the same structure.
        chunk_spec: a spec that mirrors them; ``None`` for the default.
        align: the DTensors were split with ``align=True``: move their rows back.

    Returns:
        The merged value; ``[]``, with a warning, if there are no pieces.

    Raises:
        InvalidValueError: the pieces, or the spec, do not fit together.
        InvalidTypeError: something in the spec is no spec.
    """
    if not chunks:
        warn_once("no chunks", "merge_chunks got no chunks; it returns an empty list")
        return []
    columns, structure = columns_from_trees(chunks, "chunk")
    rules = match_spec(chunk_spec, structure, "chunk", "chunk_spec")
    manner = Manner(warn_non_tensors=True, align=align)
    return join_columns(columns, rules, structure, "chunk", manner)


def _checked(value: Any, name: str, types: Any, expected: str) -> Any:
    if not isinstance(value, types):
        raise InvalidTypeError(f"{name} is a {type(value).__name__}; expected {expected}")
    return value


def _tree(value: Any, root: str, spec: Any) -> ArgumentTree:
    return ArgumentTree((value,), (root,), (spec,), f"{root}_chunk_spec", _WAYS)


def _cut_all(tree: ArgumentTree, count: int, align: bool) -> list[Any]:
    columns = [_column(tree, i, count, align) for i in range(len(tree.leaves))]
    return [value for (value,) in tree.assemble(columns, count)]


def _column(tree: ArgumentTree, index: int, count: int, align: bool) -> Sequence[Any]:
    leaf, dim, rows = tree.leaves[index], tree.dims[index], tree.rows[index]
    if dim is None or rows is None:
        return [leaf] * count
    if rows < count and not (align and leaf.shape[dim] >= count):
        raise _too_small(tree, index, count)
    pieces = cut(leaf, dim, count, tree.where(index), align=align)
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf:
        for piece in pieces:
            if piece.requires_grad:  # torch's stages read the gradient of each piece
                piece.retain_grad()
    return pieces


def _too_small(tree: ArgumentTree, index: int, count: int) -> InvalidValueError:
    leaf, dim, rows = tree.leaves[index], tree.dims[index], tree.rows[index]
    where, ways = "", tree.ways_out
    if is_dtensor(leaf) and leaf.shape[dim] != rows:
        where = " in its largest shard"
        ways = f"align=True, or {ways}" if leaf.shape[dim] >= count else ways
    return InvalidValueError(
        f"{tree.path(index)} has shape {tuple(leaf.shape)}; dimension {dim} has size {rows}"
        f"{where}, fewer than chunks={count}; use fewer chunks, or {ways}"
    )
