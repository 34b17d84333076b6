"""Page-locking parameters: which blocks, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roundpipe.devices import open_cpu_pool
from roundpipe.pinning import ALIGNMENT_BYTES, PIN_MODES, pin_parameters, plan_blocks


@given(sizes=st.lists(st.integers(0, 1 << 32), max_size=40))
def test_every_tensor_has_a_place_of_its_own_in_a_block(sizes: list[int]) -> None:
    blocks, places = plan_blocks(sizes)
    assert len(places) == len(sizes)
    ends = [0] * len(blocks)
    for size, (block, offset) in zip(sizes, places, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert offset >= ends[block]  # behind the one before it
        ends[block] = offset + size
        assert ends[block] <= blocks[block]
    assert all(block & (block - 1) == 0 for block in blocks)


def test_many_small_tensors_share_blocks_and_waste_little() -> None:
    sizes = [(1 << 20) + 1] * 100  # on its own, each would take 2 MiB
    blocks, _ = plan_blocks(sizes)
    assert sum(blocks) < 1.1 * sum(sizes)
    assert len(blocks) < 12


def test_nothing_to_place_needs_no_block() -> None:
    assert plan_blocks([]) == ([], [])


@pytest.mark.parametrize("mode", PIN_MODES)
def test_on_cpu_devices_parameters_stay_where_they_are(mode: str) -> None:
    layer = nn.Linear(2, 2)
    address = layer.weight.data_ptr()
    with open_cpu_pool(1) as pool:
        pin_parameters(layer.parameters(), mode, pool.devices)
    assert layer.weight.data_ptr() == address


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="pin_model is 'all'; choose one of 'alloc', 'register'"):
        pin_parameters([nn.Parameter(torch.ones(1))], "all", [])
