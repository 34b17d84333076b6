"""A block mask is cut so that each microbatch keeps its own rows' rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch import (
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    merge_outputs,
    split_args_kwargs_into_chunks,
    split_batch,
)


def by_row(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q + b


def make_mask(batch: int | None, length: int = 4) -> BlockMask:
    return create_block_mask(by_row, batch, None, length, length, device="cpu", BLOCK_SIZE=2)


def attend(mask: BlockMask, batch: int) -> list[Any]:
    zeros = torch.zeros(batch, 1, 4, 1)
    values = torch.arange(4.0).view(1, 1, 4, 1).expand(batch, 1, 4, 1)
    with torch.no_grad():
        result = flex_attention(zeros, zeros, values, block_mask=mask)
    assert isinstance(result, torch.Tensor)
    rows: list[Any] = result.view(batch, 4).tolist()
    return rows


EXPECTED = [[0, 0.5, 1, 1.5], [0.5, 1, 1.5, 1.5], [1, 1.5, 1.5, 1.5], [1.5, 1.5, 1.5, 1.5]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("num_microbatch", [1, 2, 3, 4])
def test_each_microbatch_attends_as_its_rows_do_in_the_whole_batch(num_microbatch: int) -> None:
    batch = split_batch((torch.ones(4, 1),), {"mask": make_mask(4)}, None, num_microbatch)
    rows = []
    for m in batch.microbatches:
        assert m.rows is not None
        rows += attend(m.kwargs["mask"], m.rows)
    assert rows == EXPECTED


def test_pieces_are_views_and_the_users_mask_stays_as_it_is() -> None:
    mask = make_mask(4)
    rule = mask.mask_mod
    for m in split_batch((torch.ones(4, 1), mask), {}, None, 2).microbatches:
        piece = m.args[1]
        assert piece.kv_indices.untyped_storage().data_ptr() == mask.kv_indices.data_ptr()
        assert piece.shape == (2, *mask.shape[1:])
        assert piece.seq_lengths == mask.seq_lengths
    assert mask.mask_mod is rule
    assert mask.kv_indices.shape[0] == 4


def test_the_column_lists_of_a_piece_are_those_that_torch_computes() -> None:
    for m in split_batch((make_mask(5, 8),), {}, None, 3).microbatches:
        piece = m.args[0]
        fresh = BlockMask.from_kv_blocks(
            piece.kv_num_blocks,
            piece.kv_indices,
            piece.full_kv_num_blocks,
            piece.full_kv_indices,
            BLOCK_SIZE=piece.BLOCK_SIZE,
        )
        for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
            assert torch.equal(getattr(piece, name), getattr(fresh, name))


def test_a_mask_that_serves_every_row_goes_whole() -> None:
    mask = make_mask(None)
    batch = split_batch((torch.ones(4, 1), mask), {}, None, 2)
    assert all(m.args[1] is mask for m in batch.microbatches)


def test_a_mask_may_be_the_only_thing_with_rows() -> None:
    batch = split_batch((make_mask(4),), {}, None, 3)
    assert [m.rows for m in batch.microbatches] == [2, 1, 1]


def test_specs_for_masks() -> None:
    mask = make_mask(4)
    x = torch.ones(4, 1)
    batch = split_batch((x, mask), {}, None, 2, split_input=((None, Replicate), None))
    assert all(m.args[1] is mask for m in batch.microbatches)
    batch = split_batch((x, mask), {}, None, 2, split_input=((None, TensorChunkSpec(0)), None))
    assert [m.args[1].shape[0] for m in batch.microbatches] == [2, 2]
    with pytest.raises(
        InvalidValueError, match=r"args\[1\] is a BlockMask, so TensorChunkSpec\(1\)"
    ):
        split_batch((x, mask), {}, None, 2, split_input=((None, TensorChunkSpec(1)), None))


def test_pieces_merge_to_the_whole_mask() -> None:
    mask = make_mask(4)
    pieces, _ = split_args_kwargs_into_chunks((mask,), None, 3)
    merged = merge_chunks(pieces, None)[0]
    assert merged.mask_mod is mask.mask_mod
    for name, value in vars(mask).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(merged, name), value), name
    whole = make_mask(None)
    assert merge_outputs([whole, whole]) is whole


def test_masks_that_were_not_cut_from_one_cannot_be_merged() -> None:
    pieces = [m.args[0] for m in split_batch((make_mask(4),), {}, None, 2).microbatches]
    with pytest.raises(InvalidValueError, match="must be equal"):
        merge_outputs([pieces[1], pieces[0]])
    with pytest.raises(InvalidValueError, match="must be equal"):
        merge_outputs([make_mask(2), make_mask(2)])
