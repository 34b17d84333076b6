"""Cutting FlexAttention's ``BlockMask`` along the batch, and putting the pieces together again.

A block mask consists of tensors with one entry per batch row and of a rule,
``mask_mod(batch, head, query, key)``. In a piece, row 0 is some later row of the whole batch, so
the rule has to be asked with the batch index shifted by the piece's first row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe.microbatch.equality import same_value
from roundpipe.microbatch.nodes import is_block_mask_type
from roundpipe.microbatch.sizes import spans


def is_block_mask(value: Any) -> bool:
    """Whether ``value`` is a ``BlockMask``."""
    return is_block_mask_type(type(value))


def mask_rows(mask: Any) -> int | None:
    """Number of batch rows; ``None`` if the mask serves every row (made with batch ``None``)."""
    counts = mask.kv_num_blocks
    if counts.ndim < 2 or counts.shape[0] == 1:
        return None
    return int(counts.shape[0])


def cut_mask(mask: Any, sizes: Sequence[int]) -> list[Any]:
    """Pieces of ``mask`` with ``sizes`` batch rows each; their tensors are views."""
    rows = mask_rows(mask)
    pieces = []
    for start, size in spans(sizes):
        held = {
            name: value[start : start + size] if _has_rows(value, rows) else value
            for name, value in vars(mask).items()
        }
        held["mask_mod"] = _shifted(mask.mask_mod, start)
        pieces.append(_with(mask, held))
    return pieces


def join_masks(pieces: Sequence[Any]) -> Any:
    """The mask that :func:`cut_mask` made ``pieces`` of; ``None`` if they are not such pieces."""
    first = pieces[0]
    rule = getattr(first.mask_mod, "unshifted", None)
    row = 0
    for piece in pieces:
        origin = getattr(piece.mask_mod, "unshifted", None)
        if rule is None or origin is not rule or piece.mask_mod.first_row != row:
            return None
        row += _rows_of(piece)
    held = {}
    for name, value in vars(first).items():
        parts = [vars(piece)[name] for piece in pieces]
        # The pieces may have been on devices since: then nothing in them is the same object.
        cut = any(part is not value for part in parts) and all(
            _has_rows(part, _rows_of(piece)) for part, piece in zip(parts, pieces, strict=True)
        )
        held[name] = torch.cat(parts) if cut else value
    held["mask_mod"] = rule
    return _with(first, held)


def same_mask(a: Any, b: Any) -> bool:
    """Whether two masks are one: the same object, or made for every row, equal in all parts."""
    if a is b:
        return True
    mine, theirs = vars(a), vars(b)
    return (
        type(a) is type(b)
        and mask_rows(a) is None
        and mine.keys() == theirs.keys()
        and all(same_value(value, theirs[name]) for name, value in mine.items())
    )


def _rows_of(piece: Any) -> int:
    return int(piece.kv_num_blocks.shape[0])


def _has_rows(value: Any, rows: int | None) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == rows


def _with(mask: Any, attributes: dict[str, Any]) -> Any:
    # Not through the constructors: they would compute the column-wise block lists again, and which
    # attributes a mask has depends on the version of torch.
    new = object.__new__(type(mask))
    vars(new).update(attributes)
    return new


def _shifted(rule: Callable[..., Any], first_row: int) -> Callable[..., Any]:
    # A plain function with a closure, since torch.compile traces it.
    def shifted_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return rule(b + first_row, h, q_idx, kv_idx)

    shifted_mask_mod.unshifted = rule  # type: ignore[attr-defined]
    shifted_mask_mod.first_row = first_row  # type: ignore[attr-defined]
    return shifted_mask_mod
