"""Packed data are a list of the microbatches' values, and know what to wait for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch import RoundPipePackedData, packed_count, packed_leaves, split_batch
from roundpipe.microbatch.packed import PendingPiece


class Outputs:
    """A call in flight, whose values are there when somebody asks for them."""

    def __init__(self, columns: Sequence[Sequence[Any]], rows: Sequence[int] | None = None) -> None:
        self.columns, self.rows = columns, rows
        self.settled = False
        self.waited = 0

    def column(self, leaf: int) -> Sequence[Any]:
        self.waited += 1
        self.settled = True
        return self.columns[leaf]

    def piece(self, leaf: int, microbatch: int, rows: int | None) -> PendingPiece:
        return Piece(leaf, microbatch, rows)

    def requires_grad(self, leaf: int) -> bool:
        return leaf == 0

    def expected_rows(self, _leaf: int) -> Sequence[int] | None:
        return self.rows


@dataclass
class Piece(PendingPiece):
    leaf: int
    microbatch: int
    rows: int | None


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


def test_synchronize_waits_once_for_the_call_and_then_it_is_any_list() -> None:
    outputs = Outputs([["a", "b"], ["c", "d"]])
    packed = RoundPipePackedData.pending(outputs, 1, 2)
    assert packed.in_flight
    assert len(packed) == 2
    assert outputs.waited == 0
    packed.synchronize()
    packed.synchronize()
    assert (packed, packed.in_flight, outputs.waited) == (["c", "d"], False, 1)


READS: list[Callable[[Any], Any]] = [
    lambda packed: packed[0],
    lambda packed: packed[:1],
    lambda packed: packed + [5],  # noqa: RUF005 - the operator is what is tested
    lambda packed: packed * 2,
    lambda packed: 2 * packed,
    lambda packed: packed == [3, 1],
    lambda packed: packed != [3, 1],
    lambda packed: packed < [4],
    lambda packed: packed <= [4],
    lambda packed: packed > [4],
    lambda packed: packed >= [4],
    lambda packed: 1 in packed,
    list,
    tuple,
    sorted,
    lambda packed: [*packed],
    repr,
    lambda packed: list(reversed(packed)),
    lambda packed: packed.copy(),
    lambda packed: packed.count(1),
    lambda packed: packed.index(1),
    lambda packed: packed.pop(),
]


@pytest.mark.parametrize("read", READS)
def test_what_reads_elements_waits_and_gives_what_a_list_gives(read: Callable[[Any], Any]) -> None:
    outputs = Outputs([[3, 1]])
    got = read(RoundPipePackedData.pending(outputs, 0, 2))
    assert outputs.waited == 1
    assert got == read([3, 1])


CHANGES: list[Callable[[Any], Any]] = [
    lambda packed: packed.append(5),
    lambda packed: packed.extend([5]),
    lambda packed: packed.insert(0, 5),
    lambda packed: packed.remove(1),
    lambda packed: packed.reverse(),
    lambda packed: packed.sort(),
    lambda packed: packed.clear(),
    lambda packed: packed.__setitem__(0, 5),
    lambda packed: packed.__delitem__(0),
    lambda packed: packed.__iadd__([5]),
    lambda packed: packed.__imul__(2),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_elements_waits_and_does_what_it_does_to_a_list(
    change: Callable[[Any], Any],
) -> None:
    packed, plain = RoundPipePackedData.pending(Outputs([[3, 1]]), 0, 2), [3, 1]
    change(packed)
    change(plain)
    assert not packed.in_flight
    assert packed == plain


def test_every_method_of_lists_that_needs_the_elements_waits() -> None:
    harmless = {
        "__class_getitem__", "__delattr__", "__dir__", "__format__", "__getattribute__",
        "__getstate__", "__hash__", "__init_subclass__", "__len__", "__new__", "__reduce_ex__",
        "__setattr__",
        "__sizeof__", "__str__", "__subclasshook__", "__class__",
    }  # fmt: skip
    own = vars(RoundPipePackedData)
    assert [name for name in dir(list) if name not in harmless and name not in own] == []


def test_code_that_reads_the_list_behind_its_back_is_told_what_to_do() -> None:
    packed = RoundPipePackedData.pending(Outputs([[torch.ones(1)] * 2]), 0, 2)
    with pytest.raises(TypeError, match="NotSynchronized"):
        torch.cat(packed)
    assert "call synchronize() on the packed data" in repr(list.__getitem__(packed, 0))
    packed.synchronize()
    assert torch.cat(packed).tolist() == [1.0, 1.0]


def test_a_copy_is_made_of_complete_values_and_has_nothing_to_wait_for() -> None:
    for copied in (copy.copy, copy.deepcopy, lambda packed: pickle.loads(pickle.dumps(packed))):
        outputs = Outputs([[torch.ones(1)]])
        packed = RoundPipePackedData.pending(outputs, 0, 1)
        duplicate = copied(packed)
        assert isinstance(duplicate, RoundPipePackedData)
        assert not duplicate.in_flight
        assert torch.equal(duplicate[0], packed[0])
        assert outputs.waited == 1


def test_pieces_stand_for_values_until_the_call_has_settled() -> None:
    outputs = Outputs([[torch.ones(1)], [torch.ones(3), torch.ones(2)]])
    packed = RoundPipePackedData.pending(outputs, 1, 2)
    assert packed.pieces() == [Piece(1, 0, None), Piece(1, 1, None)]
    assert packed.pieces([3, 2]) == [Piece(1, 0, 3), Piece(1, 1, 2)]
    assert outputs.waited == 0
    outputs.settled = True
    assert [len(piece) for piece in packed.pieces()] == [3, 2]
    assert not packed.in_flight


def test_it_knows_whether_gradients_may_flow_back() -> None:
    outputs = Outputs([[1], [2]])
    assert RoundPipePackedData.pending(outputs, 0, 1).requires_grad
    assert not RoundPipePackedData.pending(outputs, 1, 1).requires_grad
    assert outputs.waited == 0
    assert not RoundPipePackedData([torch.ones(1), 3]).requires_grad
    assert RoundPipePackedData([torch.ones(1), torch.ones(1, requires_grad=True)]).requires_grad


def test_other_arguments_are_cut_as_the_values_in_flight_will_be() -> None:
    outputs = Outputs([[torch.ones(1), torch.ones(3)]], rows=[1, 3])
    packed = RoundPipePackedData.pending(outputs, 0, 2)
    pieces = split_batch((packed, torch.arange(4)), {}, torch.arange(4), 2).microbatches
    assert [m.args[0] for m in pieces] == [Piece(0, 0, 1), Piece(0, 1, 3)]
    assert [m.args[1].tolist() for m in pieces] == [[0], [1, 2, 3]]
    assert [m.label.tolist() for m in pieces] == [[0], [1, 2, 3]]
    # Nothing depends on their rows: then nothing is expected of them.
    pieces = split_batch((packed,), {}, None, 2).microbatches
    assert [m.args[0] for m in pieces] == [Piece(0, 0, None), Piece(0, 1, None)]
    assert [m.rows for m in pieces] == [None, None]
    pieces = split_batch((packed,), {}, None, 2, rows_matter=True).microbatches
    assert [m.rows for m in pieces] == [1, 3]
    assert outputs.waited == 0


def test_values_whose_rows_cannot_be_foretold_are_waited_for_if_rows_matter() -> None:
    outputs = Outputs([[torch.ones(1), torch.ones(3)]])
    packed = RoundPipePackedData.pending(outputs, 0, 2)
    split_batch((packed,), {}, None, 2)
    assert outputs.waited == 0
    pieces = split_batch((packed,), {}, torch.arange(4), 2).microbatches
    assert outputs.waited == 1
    assert [m.label.tolist() for m in pieces] == [[0], [1, 2, 3]]


def test_values_without_rows_leave_the_labels_to_themselves() -> None:
    outputs = Outputs([[torch.tensor(1), torch.tensor(2)]], rows=[])
    packed = RoundPipePackedData.pending(outputs, 0, 2)
    pieces = split_batch((packed,), {}, torch.arange(4), 2).microbatches
    assert [m.label.tolist() for m in pieces] == [[0, 1], [2, 3]]
    assert outputs.waited == 0


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
