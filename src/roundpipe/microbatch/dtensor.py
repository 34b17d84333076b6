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
from typing import Any

import torch

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.row_exchange import move_rows, rows_of_pieces, rows_of_whole
from roundpipe.microbatch.sizes import chunk_sizes, even_sizes, nested_chunk_sizes, spans


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor; costs nothing where nobody imported DTensor."""
    if type(value) is torch.Tensor:
        return False
    cls = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return cls is not None and isinstance(value, cls)


def shard_sizes(tensor: Any, dim: int) -> list[int]:
    """Entries along ``dim`` that each rank holds, over the mesh dimensions that shard ``dim``.

    A single number, the whole size, if none does.
    """
    return nested_chunk_sizes(int(tensor.shape[dim]), _shards_per_mesh_dim(tensor, dim))


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
        InvalidValueError: the shards are not laid out as DTensor lays them out, or several mesh
            dimensions shard ``dim`` and the pieces would not be, or ``align`` is given for such a
            tensor.
    """
    shards = shard_sizes(tensor, dim)
    local = tensor.to_local()
    _check_layout(tensor, local, dim, shards, path)
    if align and len(shards) > 1:
        _check_one_mesh_dim(tensor, dim, path)
        totals = even_sizes(int(tensor.shape[dim]), count)
        source, target = rows_of_whole(shards), rows_of_pieces(totals, len(shards))
        local = _move(tensor, local, dim, source, target)
        rank = _coordinate(tensor, dim)
        sizes = [chunk_sizes(total, len(shards))[rank] for total in totals]
        pieces = [local.narrow(dim, *span) for span in spans(sizes)]
    else:
        cuts = list(zip(*(even_sizes(size, count) for size in shards), strict=True))
        totals = [sum(sizes) for sizes in cuts]
        _check_pieces_are_sharded(tensor, dim, cuts, path)
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
        whole = rows_of_whole(chunk_sizes(sum(totals), parts))
        local = _move(first, local, dim, rows_of_pieces(totals, parts), whole)
    return _wrap(local, first, dim, sum(totals), None)


def _sharding_mesh_dims(tensor: Any, dim: int) -> list[int]:
    return [i for i, placement in enumerate(tensor.placements) if placement.is_shard(dim)]


def _shards_per_mesh_dim(tensor: Any, dim: int) -> list[int]:
    return [int(tensor.device_mesh.size(i)) for i in _sharding_mesh_dims(tensor, dim)]


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


def _check_pieces_are_sharded(
    tensor: Any, dim: int, cuts: Sequence[Sequence[int]], path: str
) -> None:
    # With one mesh dimension the parts of the shards always are the shards of the parts; uneven
    # shards of uneven shards are not.
    parts = _shards_per_mesh_dim(tensor, dim)
    if len(parts) > 1 and any(list(c) != nested_chunk_sizes(sum(c), parts) for c in cuts):
        raise InvalidValueError(
            f"{path} has {tensor.shape[dim]} entries along dimension {dim}, sharded by mesh "
            f"dimensions of sizes {parts}; cut into {len(cuts)} pieces within each shard, they are "
            f"no DTensors of that kind; make the size a multiple of {math.prod(parts)}"
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


def _move(
    tensor: Any,
    local: torch.Tensor,
    dim: int,
    source: list[torch.Tensor],
    target: list[torch.Tensor],
) -> torch.Tensor:
    group = tensor.device_mesh.get_group(_sharding_mesh_dims(tensor, dim)[0])
    rows = move_rows(local.movedim(dim, 0), source, target, _coordinate(tensor, dim), group)
    return rows.movedim(0, dim)
