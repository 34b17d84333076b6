"""A batch is cut into microbatches: every row once, in order, as views; what is odd is said."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import pytest
import torch

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch import (
    MicrobatchWarning,
    Replicate,
    RoundPipePackedData,
    TensorChunkSpec,
    split_batch,
)


def rows(tensor: torch.Tensor) -> list[Any]:
    values: list[Any] = tensor.tolist()
    return values


def test_uneven_pieces_are_those_of_tensor_split() -> None:
    x = torch.arange(8.0).view(8, 1)
    batch = split_batch((x,), {}, None, 3)
    pieces = [microbatch.args[0] for microbatch in batch.microbatches]
    assert [piece.shape[0] for piece in pieces] == [3, 3, 2]
    assert torch.equal(torch.cat(pieces), x)
    assert [microbatch.index for microbatch in batch.microbatches] == [0, 1, 2]
    assert [microbatch.rows for microbatch in batch.microbatches] == [3, 3, 2]
    assert batch.rows == 8


def test_pieces_are_views_of_the_input() -> None:
    x = torch.arange(6.0).view(3, 2).t()  # not contiguous
    expanded = torch.ones(1).expand(2, 3)
    for microbatch in split_batch((x, expanded), {}, None, 2).microbatches:
        assert microbatch.args[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert microbatch.args[0].stride() == x.stride()
        assert microbatch.args[1].stride() == (0, 0)
    split_batch((x,), {}, None, 2).microbatches[1].args[0].zero_()
    assert x.tolist() == [[0, 2, 4], [0, 0, 0]]


def test_gradients_flow_back_through_the_pieces() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    batch = split_batch((x,), {}, None, 2)
    loss = sum((m.index + 1) * m.args[0].sum() for m in batch.microbatches)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1, 1], [1, 1], [2, 2]]


@pytest.mark.parametrize("num_microbatch", range(1, 8))
def test_labels_go_with_their_rows(num_microbatch: int) -> None:
    x = torch.arange(7.0).view(7, 1)
    batch = split_batch((x,), {}, x.clone(), num_microbatch)
    assert len(batch.microbatches) == num_microbatch
    pairs = [
        pair
        for m in batch.microbatches
        for pair in zip(rows(m.args[0]), rows(m.label), strict=True)
    ]
    assert pairs == [([float(i)], [float(i)]) for i in range(7)]


def test_no_label_gives_none_to_every_microbatch() -> None:
    batch = split_batch((torch.ones(2),), {}, None, 2, split_label=TensorChunkSpec(0))
    assert [m.label for m in batch.microbatches] == [None, None]


def test_values_that_are_no_tensors_go_unchanged_to_every_microbatch() -> None:
    marker = object()
    pair = [1, 2]
    opts = {"k": None, "pair": pair, "marker": marker}
    kwargs = {
        "mask": None,
        "scale": 3,
        "flag": True,
        "tag": "a",
        "opts": opts,
        "s": torch.tensor(7),
    }
    batch = split_batch((torch.ones(4, 1),), kwargs, [1, 2, 3], 2)
    for m in batch.microbatches:
        assert m.kwargs["s"] is kwargs["s"]
        assert {k: v for k, v in m.kwargs.items() if k != "s"} == {
            "mask": None,
            "scale": 3,
            "flag": True,
            "tag": "a",
            "opts": {"k": None, "pair": [1, 2], "marker": marker},
        }
        m.kwargs["opts"]["pair"].append(3)  # a microbatch's containers are its own
        m.kwargs["opts"]["new"] = 1
        assert m.label == [1, 2, 3]
    assert kwargs["opts"] is opts
    assert opts == {"k": None, "pair": [1, 2], "marker": marker}
    assert opts["pair"] is pair


def test_a_leading_size_of_one_broadcasts() -> None:
    x = torch.arange(12.0).view(4, 3)
    mask = torch.tensor([[True, False, True]])
    batch = split_batch((x, mask), {}, None, 2)
    assert all(m.args[1] is mask for m in batch.microbatches)
    result = torch.cat([m.args[0] * m.args[1] for m in batch.microbatches])
    assert result.tolist() == [[0, 0, 2], [3, 0, 5], [6, 0, 8], [9, 0, 11]]


def test_a_batch_of_one_row_is_one_microbatch() -> None:
    """Most tensors have one row, so the batch has: nothing may broadcast over the table's rows."""
    tokens, mask, table = torch.ones(1, 5), torch.ones(1, 5), torch.ones(10, 2)
    with pytest.warns(MicrobatchWarning, match=r"has 1 row .*fewer than num_microbatch=4.*1 micro"):
        batch = split_batch((tokens, mask), {"table": table}, None, 4)
    (only,) = batch.microbatches
    assert only.args == (tokens, mask)
    assert only.kwargs["table"] is table


@pytest.mark.parametrize("num_microbatch", [3, 4, 100])
def test_fewer_rows_than_microbatches(num_microbatch: int) -> None:
    x = torch.tensor([[1.0], [2.0]])
    text = (
        rf"the batch has 2 rows .*, fewer than num_microbatch={num_microbatch}; .* 2 microbatches"
    )
    with pytest.warns(MicrobatchWarning, match=text):
        batch = split_batch((x,), {"flag": True}, x, num_microbatch)
    assert [m.args[0].tolist() for m in batch.microbatches] == [[[1.0]], [[2.0]]]
    assert [m.label.tolist() for m in batch.microbatches] == [[[1.0]], [[2.0]]]


def test_each_warning_is_given_once_per_owner() -> None:
    warned: set[str] = set()
    x, other = torch.ones(2), torch.ones(6)
    with pytest.warns(MicrobatchWarning) as record:
        split_batch((x, x), {"other": other}, None, 4, warned=warned)
    assert len(record) == 2
    assert all(str(w.filename) == __file__ for w in record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_batch((x, x), {"other": other}, None, 4, warned=warned)
    with pytest.warns(MicrobatchWarning, match="fewer than"):  # another model warns again
        split_batch((x,), {}, None, 4, warned=set())


def test_another_leading_size_is_cut_with_a_warning_that_names_the_ways_out() -> None:
    x, ids = torch.ones(4, 2), torch.arange(6)
    text = (
        r"kwargs\['position_ids'\] has shape \(6,\), but the batch has 4 rows .*"
        r"split_input=\(args_spec, kwargs_spec\).*split_input=f with f\(args"
    )
    with pytest.warns(MicrobatchWarning, match=text):
        batch = split_batch((x, x), {"position_ids": ids}, None, 4)
    assert [m.kwargs["position_ids"].tolist() for m in batch.microbatches] == [
        [0, 1],
        [2, 3],
        [4],
        [5],
    ]


@pytest.mark.parametrize("size", [0, 2, 3])
def test_another_leading_size_with_too_few_rows_is_an_error(size: int) -> None:
    text = (
        rf"args\[1\]\['w'\] has shape \({size}, 5\), but the batch has 8 rows .*and {size} rows "
        r"cannot be cut into 4 microbatches; say what .*Replicate.*split_input=f"
    )
    with pytest.raises(InvalidValueError, match=text):
        split_batch((torch.ones(8), {"w": torch.ones(size, 5)}), {}, None, 4)


def test_labels_follow_the_rows_of_the_inputs() -> None:
    x = torch.ones(4, 2)
    with pytest.raises(
        InvalidValueError, match=r"label has shape \(3,\), but the batch has 4 rows.*g\("
    ):
        split_batch((x,), {}, torch.ones(3), 4)
    with pytest.warns(
        MicrobatchWarning, match=r"label\['y'\] has shape \(8,\), but the batch has 4"
    ):
        batch = split_batch((x,), {}, {"y": torch.arange(8), "class_weights": torch.ones(1)}, 4)
    assert batch.microbatches[1].label["y"].tolist() == [2, 3]
    assert batch.microbatches[1].label["class_weights"].tolist() == [1.0]


def test_labels_decide_where_the_inputs_have_no_rows() -> None:
    with pytest.warns(
        MicrobatchWarning, match=r"2 rows \(the leading size of label .*num_microbatch=3"
    ):
        batch = split_batch((5,), {}, torch.tensor([1, 2]), 3)
    assert [(m.args, m.label.tolist(), m.rows) for m in batch.microbatches] == [
        ((5,), [1], 1),
        ((5,), [2], 1),
    ]


def test_without_any_rows_everything_goes_to_every_microbatch() -> None:
    batch = split_batch((5, torch.tensor(1.0)), {}, None, 3)
    assert len(batch.microbatches) == 3
    assert batch.rows is None
    assert all(m.args[0] == 5 and m.rows is None for m in batch.microbatches)
    assert len(split_batch((), None, None, 2).microbatches) == 2


@pytest.mark.parametrize("num_microbatch", [1, 3])
def test_a_batch_of_no_rows_is_refused(num_microbatch: int) -> None:
    with pytest.raises(InvalidValueError, match=r"has 0 rows \(args\[0\] has shape \(0, 2\)\)"):
        split_batch((torch.ones(0, 2),), {}, None, num_microbatch)


@pytest.mark.parametrize(
    ("num_microbatch", "error"),
    [
        (0, InvalidValueError),
        (-1, InvalidValueError),
        (2.0, InvalidTypeError),
        (True, InvalidTypeError),
    ],
)
def test_an_impossible_number_of_microbatches_is_refused(
    num_microbatch: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"num_microbatch is {num_microbatch}; expected an int, 1 or"):
        split_batch((torch.ones(2),), {}, None, num_microbatch)


def test_a_container_that_nobody_registered_goes_whole_with_a_warning() -> None:
    held: UserDict[str, torch.Tensor] = UserDict(ids=torch.ones(4))
    with pytest.warns(MicrobatchWarning, match=r"args\[1\] is a UserDict.*register_pytree_node"):
        batch = split_batch((torch.ones(4), held), {}, None, 2)
    assert all(m.args[1] is held for m in batch.microbatches)

    class Names(list[str]):
        pass

    names = Names(["a"])
    assert split_batch((torch.ones(4), names), {}, None, 2).microbatches[1].args[1] is names


def test_sparse_tensors_are_cut_too() -> None:
    x = torch.eye(5).to_sparse()
    batch = split_batch((x,), {}, None, 2)
    assert torch.equal(torch.cat([m.args[0] for m in batch.microbatches]).to_dense(), torch.eye(5))
    assert [m.args[0].shape for m in batch.microbatches] == [(3, 5), (2, 5)]


def test_a_layout_that_torch_cannot_cut_is_refused_unless_it_goes_whole() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(InvalidTypeError, match=r"args\[0\] has layout torch.jagged.*Replicate"):
        split_batch((nested,), {}, None, 2)
    x = torch.ones(2)
    batch = split_batch((nested, x), {}, None, 2, split_input=((Replicate, None), None))
    assert all(m.args[0] is nested for m in batch.microbatches)


class TestSpecs:
    def test_a_spec_says_the_dimension_of_each_leaf(self) -> None:
        x, w = torch.arange(6).view(2, 3), torch.ones(3)
        spec = ((TensorChunkSpec(-1), Replicate), {"names": None})
        batch = split_batch((x, w), {"names": ["a"]}, None, 3, split_input=spec)
        assert [m.args[0].tolist() for m in batch.microbatches] == [
            [[0], [3]],
            [[1], [4]],
            [[2], [5]],
        ]
        assert all(m.args[1] is w for m in batch.microbatches)
        assert batch.rows == 3

    def test_a_spec_over_a_subtree_applies_to_all_of_it(self) -> None:
        kwargs: dict[str, Any] = {
            "time": {"x": torch.ones(5, 2), "step": 3, "zero": torch.tensor(0)},
            "y": torch.ones(2),
        }
        spec = (None, {"time": TensorChunkSpec(1), "y": TensorChunkSpec(0)})
        batch = split_batch((), kwargs, None, 2, split_input=spec)
        for m in batch.microbatches:
            assert m.kwargs["time"]["x"].shape == (5, 1)
            assert m.kwargs["time"]["step"] == 3
            assert m.kwargs["time"]["zero"] is kwargs["time"]["zero"]

    def test_replicate_as_class_and_instance_keeps_large_tables_whole(self) -> None:
        table = torch.ones(100, 2)
        for replicate in (Replicate, Replicate()):
            batch = split_batch(
                (torch.ones(4),),
                {"table": table},
                None,
                2,
                split_input=(None, {"table": replicate}),
            )
            assert all(m.kwargs["table"] is table for m in batch.microbatches)

    def test_a_label_spec_keeps_class_weights_whole(self) -> None:
        label = (torch.arange(4), torch.ones(10))
        batch = split_batch(
            (torch.ones(4),), {}, label, 2, split_label=(TensorChunkSpec(0), Replicate)
        )
        assert [m.label[0].tolist() for m in batch.microbatches] == [[0, 1], [2, 3]]
        assert all(m.label[1] is label[1] for m in batch.microbatches)

    def test_a_cut_dimension_that_is_too_small_is_an_error(self) -> None:
        text = r"kwargs\['y'\] has shape \(4, 2\); its spec cuts dimension 1, which has size 2"
        spec = (None, {"y": TensorChunkSpec(1)})
        with pytest.raises(InvalidValueError, match=text):
            split_batch((torch.ones(4),), {"y": torch.ones(4, 2)}, None, 4, split_input=spec)

    @pytest.mark.parametrize("dim", [2, -3])
    def test_a_dimension_that_does_not_exist_is_an_error(self, dim: int) -> None:
        text = rf"args\[0\] has shape \(2, 3\), so TensorChunkSpec\({dim}\) does not fit.*-2 to 1"
        with pytest.raises(InvalidValueError, match=text):
            split_batch(
                (torch.ones(2, 3),), {}, None, 1, split_input=((TensorChunkSpec(dim),), None)
            )

    def test_a_scalar_with_a_chunk_spec_of_its_own_is_an_error(self) -> None:
        with pytest.raises(InvalidValueError, match=r"args\[0\] has shape \(\).*no dimensions"):
            split_batch((torch.tensor(1),), {}, None, 2, split_input=((TensorChunkSpec(0),), None))

    @pytest.mark.parametrize("split_input", ["rows", (None,), (1, 2, 3), TensorChunkSpec(0)])
    def test_what_is_no_pair_is_an_error(self, split_input: Any) -> None:
        with pytest.raises(InvalidTypeError, match=r"split_input is .*expected None, a pair"):
            split_batch((torch.ones(2),), {}, None, 2, split_input=split_input)


class TestFunctions:
    def test_pieces_of_any_size_are_accepted_and_labels_follow_them(self) -> None:
        x = torch.arange(4.0).view(4, 1)

        def split(args: Any, kwargs: Any, num_microbatch: int) -> Any:
            assert num_microbatch == 2
            return [(args[0][:1],), [args[0][1:]]], [kwargs, kwargs]

        batch = split_batch((x,), {"k": 1}, x.clone(), 2, split_input=split)
        assert [m.rows for m in batch.microbatches] == [1, 3]
        assert batch.rows == 4
        for m in batch.microbatches:
            assert isinstance(m.args, tuple)
            assert m.kwargs == {"k": 1}
            assert torch.equal(m.label, m.args[0])
            assert m.label._base is not None  # a view

    def test_its_exception_comes_out_unchanged(self) -> None:
        error = KeyError("mine")

        def split(*_: Any) -> Any:
            raise error

        for functions in ({"split_input": split}, {"split_label": split}):
            with pytest.raises(KeyError) as caught:
                split_batch((torch.ones(2),), {}, 1, 2, **functions)  # type: ignore[arg-type]
            assert caught.value is error

    @pytest.mark.parametrize(
        ("result", "error", "text"),
        [
            (
                None,
                InvalidTypeError,
                r"return \(args_list, kwargs_list\), it returned a NoneType",
            ),
            (
                [[()]],
                InvalidValueError,
                r"return \(args_list, kwargs_list\), it returned 1 values",
            ),
            (({}, []), InvalidTypeError, "args_list is a dict, expected a list"),
            (([()] * 3, [{}] * 3), InvalidValueError, "args_list has 3 entries, expected 2"),
            (([()] * 2, [{}] * 3), InvalidValueError, "kwargs_list has 3 entries, expected 2"),
            (([(), 5], [{}] * 2), InvalidTypeError, r"args_list\[1\] is a int, expected a tuple"),
            (
                ([()] * 2, [{}, ()]),
                InvalidTypeError,
                r"kwargs_list\[1\] is a tuple, expected a d",
            ),
        ],
    )
    def test_wrong_results_are_named(self, result: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            split_batch((torch.ones(2),), {}, None, 2, split_input=lambda *_: result)

    def test_wrong_label_results_are_named(self) -> None:
        x = torch.ones(2)
        with pytest.raises(InvalidValueError, match=r"split_label.* has 3 entries, expected 2"):
            split_batch((x,), {}, x, 2, split_label=lambda label, n: [label] * 3)
        with pytest.raises(InvalidTypeError, match=r"split_label.* is a Tensor, expected a list"):
            split_batch((x,), {}, x, 2, split_label=lambda label, n: label)

    def test_a_label_function_is_asked_for_the_number_of_pieces_of_the_inputs(self) -> None:
        x = torch.ones(2)
        with pytest.warns(MicrobatchWarning, match="fewer"):
            batch = split_batch((x,), {}, "ab", 4, split_label=lambda label, n: list(label)[:n])
        assert [m.label for m in batch.microbatches] == ["a", "b"]

    def test_inputs_and_labels_must_give_the_same_number(self) -> None:
        def split(args: Any, kwargs: Any, num_microbatch: int) -> Any:
            return [("text",)] * num_microbatch, [{}] * num_microbatch

        assert split_batch((), {}, torch.ones(3), 3, split_input=split).rows is None
        with pytest.raises(InvalidValueError, match="in 3 microbatches and the labels have 2 rows"):
            split_batch((), {}, torch.ones(2), 3, split_input=split)


class TestPackedData:
    def test_each_microbatch_gets_its_element(self) -> None:
        values = [torch.ones(1), torch.ones(3)]
        packed = RoundPipePackedData(values)
        batch = split_batch((packed,), {"again": {"p": packed}}, None, 2)
        for m, value in zip(batch.microbatches, values, strict=True):
            assert m.args[0] is value
            assert m.kwargs["again"]["p"] is value
        assert [m.rows for m in batch.microbatches] == [1, 3]

    def test_other_inputs_and_labels_are_cut_like_the_packed_data(self) -> None:
        x = torch.arange(4)
        packed = RoundPipePackedData([torch.zeros(1, 2), torch.zeros(3, 2)])
        batch = split_batch((packed, x), {}, x, 2)
        assert [m.args[1].tolist() for m in batch.microbatches] == [[0], [1, 2, 3]]
        assert [m.label.tolist() for m in batch.microbatches] == [[0], [1, 2, 3]]

    def test_packed_data_without_rows_leave_the_cut_to_the_others(self) -> None:
        packed = RoundPipePackedData(["a", "b"])
        batch = split_batch((packed, torch.arange(4)), {}, None, 2)
        assert [(m.args[0], m.args[1].tolist()) for m in batch.microbatches] == [
            ("a", [0, 1]),
            ("b", [2, 3]),
        ]

    def test_another_number_of_microbatches_is_an_error(self) -> None:
        packed = RoundPipePackedData([torch.ones(1)] * 3)
        with pytest.raises(
            InvalidValueError, match=r"args\[0\] is packed data of 3 micro.* has 2; set"
        ):
            split_batch((packed,), {}, None, 2)

    def test_other_inputs_with_too_few_rows_are_an_error(self) -> None:
        packed = RoundPipePackedData([torch.ones(1)] * 3)
        with pytest.raises(
            InvalidValueError, match=r"args\[0\] is packed data of 3 .* only 2 rows"
        ):
            split_batch((packed, torch.ones(2)), {}, None, 3)
