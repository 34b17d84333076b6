"""Packed data are a list of the microbatches' values, and know what to wait for."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch import RoundPipePackedData, packed_count, packed_leaves


class Handle:
    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_it_is_a_list() -> None:
    packed = RoundPipePackedData([3, 1])
    assert isinstance(packed, list)
    assert packed == [3, 1]
    assert len(packed) == 2
    assert packed[1] == 1
    assert packed[:1] == [3]
    assert sorted(packed) == [1, 3]
    assert RoundPipePackedData() == []
    packed.synchronize()  # nothing to wait for


def test_synchronize_waits_for_every_microbatch() -> None:
    handles = [Handle(), Handle()]
    packed = RoundPipePackedData(["a", "b"], handles)
    assert packed.handles == tuple(handles)
    packed.synchronize()
    assert [handle.waited for handle in handles] == [1, 1]


def test_handles_must_be_one_for_each_value() -> None:
    with pytest.raises(InvalidValueError, match="1 handles were given for 2 values; give one for"):
        RoundPipePackedData(["a", "b"], [Handle()])


def test_a_copy_is_made_of_complete_values_and_has_nothing_to_wait_for() -> None:
    handle = Handle()
    packed = RoundPipePackedData([torch.ones(1)], [handle])
    for duplicate in (copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert isinstance(duplicate, RoundPipePackedData)
        assert duplicate.handles == ()
        assert torch.equal(duplicate[0], packed[0])
    assert handle.waited == 3


def test_the_packed_count_decides_the_number_of_microbatches() -> None:
    packed = RoundPipePackedData([1, 2, 3])
    assert packed_count((1, [2]), {}) is None
    assert packed_count((packed,), {}) == 3
    assert packed_count((1,), {"x": {"y": [packed]}}) == 3
    assert packed_leaves((packed,), {"x": packed}) == [packed, packed]


def test_two_different_counts_are_an_error() -> None:
    args = (RoundPipePackedData([1, 2, 3]),)
    with pytest.raises(InvalidValueError, match=r"different numbers of microbatches: 2, 3; pack"):
        packed_count(args, {"x": RoundPipePackedData([1, 2])})
