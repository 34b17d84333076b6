"""Cutting and joining ``DTensor``s without gathering them.

A tensor sharded along the dimension to cut is cut within each rank's shard, so that no data moves
and every piece keeps mesh and placements. Microbatch i then consists of the i-th part of every
shard: other rows than the i-th part of the whole tensor. Where that matters the rows are moved
first (*aligned*), so that microbatch i over all ranks holds the rows it holds in an unsharded run.

How many rows a rank holds follows from the placements: DTensor cuts a sharded dimension as
``torch.chunk`` does, one mesh dimension after the other. So every rank knows all sizes unasked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from roundpipe.errors import InvalidValueError


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor; costs nothing where nobody imported DTensor."""
    cls = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return cls is not None and isinstance(value, cls)


def even_sizes(total: int, count: int) -> list[int]:
    """Sizes of ``torch.tensor_split(x, count)``: at most one apart, larger ones first."""
    size, larger = divmod(total, count)
    return [size + 1] * larger + [size] * (count - larger)


def chunk_sizes(total: int, count: int) -> list[int]:
    """Sizes of the shards of a dimension: equal ones, perhaps a smaller one, then zeros."""
    size = -(-total // count)
    return [min(size, max(0, total - i * size)) for i in range(count)]


def shard_sizes(tensor: Any, dim: int) -> list[int]:
    """Entries along ``dim`` that each rank holds, over the mesh dimensions that shard ``dim``.

    A single number, the whole size, if none does.
    """
    sizes = [int(tensor.shape[dim])]
    for mesh_dim in _sharding_mesh_dims(tensor, dim):
        parts = tensor.device_mesh.size(mesh_dim)
        sizes = [part for size in sizes for part in chunk_sizes(size, parts)]
    return sizes


def cut_dtensor(tensor: Any, dim: int, count: int, align: bool, path: str) -> list[Any]:
    """Cut ``tensor`` along ``dim`` into ``count`` DTensors with its mesh and placements.

    Args:
        tensor: the DTensor.
        dim: the dimension, not negative.
        count: number of pieces.
        align: move rows between ranks, so that piece i is that of ``torch.tensor_split`` of the
            whole tensor. A collective operation, in backward too: all ranks of the mesh call it.
        path: where the tensor was found, for messages.

    Raises:
        InvalidValueError: the shards are not laid out as DTensor lays them out, or ``align`` and
            more than one mesh dimension shards ``dim``.
    """
    shards = shard_sizes(tensor, dim)
    local = tensor.to_local()
    _check_layout(tensor, local, dim, shards, path)
    if align and len(shards) > 1:
        _check_one_mesh_dim(tensor, dim, path)
        totals = even_sizes(int(tensor.shape[dim]), count)
        source, target = _rows_of_whole(shards), _rows_of_pieces(totals, len(shards))
        local = _move_rows(tensor, local, dim, source, target)
        rank = _coordinate(tensor, dim)
        sizes = [chunk_sizes(total, len(shards))[rank] for total in totals]
        pieces = [local.narrow(dim, *span) for span in _spans(sizes)]
    else:
        totals = [sum(sizes) for sizes in zip(*(even_sizes(n, count) for n in shards), strict=True)]
        pieces = list(local.tensor_split(count, dim))
    return [_wrap(p, tensor, dim, n, tensor.stride()) for p, n in zip(pieces, totals, strict=True)]


def join_dtensors(pieces: Sequence[Any], dim: int, align: bool, path: str) -> Any:
    """Put the local shards of ``pieces`` together; the inverse of :func:`cut_dtensor`.

    Raises:
        InvalidValueError: not all pieces are DTensors with the same mesh and placements.
    """
    first = pieces[0]
    for i, piece in enumerate(pieces):
        if not is_dtensor(piece):
            raise InvalidValueError(
                f"{path} is a DTensor in microbatch 0 and a {type(piece).__name__} in microbatch "
                f"{i}; return DTensors in all of them or in none"
            )
        if piece.device_mesh != first.device_mesh or piece.placements != first.placements:
            raise InvalidValueError(
                f"{path} has placements {first.placements} in microbatch 0 and "
                f"{piece.placements} in microbatch {i}, or another mesh; redistribute them first"
            )
    dim %= first.ndim
    local = torch.cat([piece.to_local() for piece in pieces], dim)
    totals = [int(piece.shape[dim]) for piece in pieces]
    parts = len(shard_sizes(first, dim))
    if align and parts > 1:
        _check_one_mesh_dim(first, dim, path)
        whole = _rows_of_whole(chunk_sizes(sum(totals), parts))
        local = _move_rows(first, local, dim, _rows_of_pieces(totals, parts), whole)
    return _wrap(local, first, dim, sum(totals), None)


def _sharding_mesh_dims(tensor: Any, dim: int) -> list[int]:
    return [i for i, placement in enumerate(tensor.placements) if placement.is_shard(dim)]


def _coordinate(tensor: Any, dim: int) -> int:
    """Index of this rank among the shards of ``dim``, in the order of :func:`shard_sizes`."""
    index = 0
    for mesh_dim in _sharding_mesh_dims(tensor, dim):
        mesh = tensor.device_mesh
        index = index * int(mesh.size(mesh_dim)) + int(mesh.get_local_rank(mesh_dim))
    return index


def _check_layout(tensor: Any, local: torch.Tensor, dim: int, shards: list[int], path: str) -> None:
    expected = shards[_coordinate(tensor, dim)]
    if local.shape[dim] != expected:
        raise InvalidValueError(
            f"{path} is a DTensor of shape {tuple(tensor.shape)} with placements "
            f"{tensor.placements}; this rank should hold {expected} of dimension {dim} and holds "
            f"{local.shape[dim]}; distribute it with distribute_tensor, or redistribute it"
        )


def _check_one_mesh_dim(tensor: Any, dim: int, path: str) -> None:
    count = len(_sharding_mesh_dims(tensor, dim))
    if count > 1:
        raise InvalidValueError(
            f"{path} is sharded along dimension {dim} by {count} mesh dimensions; align=True "
            "works with one; redistribute it, or leave align out"
        )


def _wrap(local: torch.Tensor, like: Any, dim: int, total: int, stride: Any) -> Any:
    shape = list(like.shape)
    shape[dim] = total
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return type(like).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and length of consecutive pieces."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _rows_of_whole(shards: Sequence[int]) -> list[torch.Tensor]:
    """Per rank, which rows of the whole tensor it holds when the tensor is sharded."""
    return [torch.arange(start, start + size) for start, size in _spans(shards)]


def _rows_of_pieces(totals: Sequence[int], parts: int) -> list[torch.Tensor]:
    """Per rank, which rows it holds when the pieces, each sharded, lie one after the other."""
    held: list[list[torch.Tensor]] = [[torch.arange(0)] for _ in range(parts)]
    for first_row, total in _spans(totals):
        for rank, (start, size) in enumerate(_spans(chunk_sizes(total, parts))):
            held[rank].append(torch.arange(size) + (first_row + start))
    return [torch.cat(rows) for rows in held]


def _move_rows(
    tensor: Any,
    local: torch.Tensor,
    dim: int,
    source: list[torch.Tensor],
    target: list[torch.Tensor],
) -> torch.Tensor:
    """Exchange rows between the ranks, from the layout ``source`` to the layout ``target``."""
    owner = torch.empty(sum(map(len, source)), dtype=torch.long)
    position = torch.empty_like(owner)
    for rank, rows in enumerate(source):
        owner[rows] = rank
        position[rows] = torch.arange(len(rows))
    me = _coordinate(tensor, dim)
    to_send = [position[rows[owner[rows] == me]] for rows in target]
    senders = owner[target[me]]
    place = senders.argsort(stable=True).argsort()  # rows arrive by sender, then in my order
    outgoing = local.movedim(dim, 0).index_select(0, torch.cat(to_send).to(local.device))
    incoming: torch.Tensor = _Exchange.apply(
        outgoing,
        [len(rows) for rows in to_send],
        torch.bincount(senders, minlength=len(source)).tolist(),
        tensor.device_mesh.get_group(_sharding_mesh_dims(tensor, dim)[0]),
    )
    return incoming.index_select(0, place.to(local.device)).movedim(0, dim)


class _Exchange(torch.autograd.Function):
    """``all_to_all`` of rows; its backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any
    ) -> torch.Tensor:
        ctx.splits = (sent, received, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.splits
        return _exchange(grads[0], received, sent, group), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    result: torch.Tensor = rows.new_empty([sum(received), *rows.shape[1:]])
    width = math.prod(rows.shape[1:])
    if width:
        # As bytes, because not every back end moves every dtype.
        outgoing = rows.contiguous().view(len(rows), width).view(torch.uint8)
        incoming = result.view(len(result), width).view(torch.uint8)
        dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    return result
