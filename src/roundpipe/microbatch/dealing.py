"""Deciding how many rows each microbatch gets, and dealing the leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.argtree import ArgumentTree
from roundpipe.microbatch.cutting import cut
from roundpipe.microbatch.dtensor import is_dtensor, shard_sizes
from roundpipe.microbatch.messages import count_of, warn_once
from roundpipe.microbatch.sizes import even_sizes
from roundpipe.microbatch.specs import AUTO


@dataclass(frozen=True)
class Shares:
    """How a batch is dealt out.

    Attributes:
        count: number of microbatches.
        total: rows of the batch; ``None`` if unknown.
        sizes: rows to cut for each microbatch, if not evenly.
        rows: rows of each microbatch; ``None`` if unknown.
        foretold_by: index of the packed data, still in flight, that the rows are expected of.
    """

    count: int
    total: int | None = None
    sizes: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    foretold_by: int | None = None


def share_evenly(tree: ArgumentTree, count: int) -> Shares:
    """Deal out the rows that most leaves of ``tree`` have, as evenly as possible."""
    leader = tree.batch_leaf()
    if leader is None:
        return Shares(count)
    total, leaf, dim = tree.rows[leader], tree.leaves[leader], tree.dims[leader]
    assert total is not None
    assert dim is not None
    if total == 0:
        raise InvalidValueError(
            f"the batch has 0 rows ({tree.path(leader)} has shape {tuple(leaf.shape)}); a call "
            "needs at least one row"
        )
    shards = shard_sizes(leaf, dim) if is_dtensor(leaf) else [total]
    cuts = (even_sizes(size, count) for size in shards)
    return Shares(count, total, None, [sum(sizes) for sizes in zip(*cuts, strict=True)])


def share_as(pieces: Sequence[Any]) -> Shares:
    """Shares of a batch that comes in ``pieces``: rows are the first tensor's leading size."""
    rows = [_leading_size(piece) for piece in pieces]
    known = [size for size in rows if size is not None]
    if len(known) < len(rows):
        return Shares(len(rows))
    return Shares(len(rows), sum(known), known, known)


def _leading_size(piece: Any) -> int | None:
    tree = ArgumentTree((piece,), ("",), (None,), "", "")
    leader = tree.batch_leaf()
    return None if leader is None else tree.rows[leader]


def deal(tree: ArgumentTree, shares: Shares, warned: set[str]) -> list[Any]:
    """One tree for each microbatch.

    Raises:
        InvalidValueError: a leaf has too few rows, or packed data another number of microbatches.
    """
    for i in tree.opaque():
        warn_once(
            f"opaque {tree.path(i)}",
            f"{tree.path(i)} is a {type(tree.leaves[i]).__name__}, which is no structure that "
            "roundpipe knows: it goes whole to every microbatch, its tensors are not cut; pass a "
            "plain dict, list or tuple, or register the class with "
            "torch.utils._pytree.register_pytree_node",
            warned,
        )
    columns = [_column(tree, i, shares, warned) for i in range(len(tree.leaves))]
    return tree.assemble(columns, shares.count)


def _column(tree: ArgumentTree, index: int, shares: Shares, warned: set[str]) -> Sequence[Any]:
    leaf, dim, rows = tree.leaves[index], tree.dims[index], tree.rows[index]
    count = shares.count
    if tree.is_packed(index):
        return _packed_column(tree, index, shares)
    if dim is None or rows is None or count == 1:
        return [leaf] * count
    if rows == shares.total:
        return cut(leaf, dim, count, tree.where(index), sizes=shares.sizes)
    if tree.rules[index] is AUTO:
        if rows == 1:
            return [leaf] * count  # broadcasts
        _check_other_size(tree, index, shares, warned)
    elif rows < count:
        raise InvalidValueError(
            f"{tree.path(index)} has shape {_shape(leaf)}; its spec cuts dimension {dim}, which "
            f"has size {rows}, fewer than the {count} microbatches; give Replicate, or a smaller "
            "num_microbatch"
        )
    return cut(leaf, dim, count, tree.where(index))


def _packed_column(tree: ArgumentTree, index: int, shares: Shares) -> Sequence[Any]:
    packed, count = tree.leaves[index], shares.count
    if len(packed) != count:
        raise InvalidValueError(
            f"{tree.path(index)} is packed data of {len(packed)} microbatches, this call has "
            f"{count}; set num_microbatch={len(packed)}, or merge the packed data first"
        )
    pieces: list[Any] = packed.pieces(shares.rows if shares.foretold_by == index else None)
    return pieces


def _check_other_size(tree: ArgumentTree, index: int, shares: Shares, warned: set[str]) -> None:
    leaf, rows, path = tree.leaves[index], tree.rows[index], tree.path(index)
    facts = (
        f"{path} has shape {_shape(leaf)}, but the batch has {count_of(shares.total or 0, 'row')} "
        "(the leading size that most tensors share)"
    )
    if rows is not None and rows < shares.count:
        raise InvalidValueError(
            f"{facts}, and {count_of(rows, 'row')} cannot be cut into {shares.count} microbatches; "
            f"say what to do with it: {tree.ways_out}"
        )
    warn_once(
        f"leading size {path}",
        f"{facts}; it is cut along dimension 0 into {shares.count} microbatches all the same. If "
        f"that is not meant, say what to do with it: {tree.ways_out}",
        warned,
    )


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape)
