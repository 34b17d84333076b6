"""Outputs of microbatches become one output: each row once, in order, with its gradient."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch import (
    CustomReducer,
    Replicate,
    RoundPipePackedData,
    TensorChunkSpec,
    merge_outputs,
)


@dataclass
class Hidden:
    h: Any
    k: Any = 7


class Pair(NamedTuple):
    first: Any
    second: Any


def test_rows_scalars_and_values() -> None:
    outputs: list[dict[str, Any]] = [
        {"logits": torch.full((1, 2), float(m)), "aux": torch.tensor(m + 1.0), "n": 7, "name": "a"}
        for m in range(4)
    ]
    for automatic in (None, True):
        merged = merge_outputs(outputs, automatic)
        assert list(merged) == ["logits", "aux", "n", "name"]
        assert merged["logits"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert merged["aux"].shape == ()
        assert merged["aux"].item() == 2.5
        assert (merged["n"], merged["name"]) == (7, "a")
    assert outputs[0]["logits"].shape == (1, 2)


def test_a_value_that_differs_is_an_error_that_names_both() -> None:
    outputs = [{"n": 7}, {"n": 7}, {"n": 8}]
    text = r"output\['n'\] is 7 in microbatch 0 and 8 in microbatch 2; .*_CustomReducer"
    with pytest.raises(InvalidValueError, match=text):
        merge_outputs(outputs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_the_mean_of_whole_numbers_is_a_floating_result(dtype: torch.dtype) -> None:
    merged = merge_outputs([torch.tensor(1, dtype=dtype), torch.tensor(0, dtype=dtype)])
    assert merged.dtype is torch.float32
    assert merged.item() == 0.5
    assert merge_outputs([torch.tensor(1, dtype=dtype)]).dtype is torch.float32


def test_gradients_flow_through_cat_and_mean() -> None:
    leaves = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    merged = merge_outputs([(leaf * 2, leaf.sum()) for leaf in leaves])
    (merged[0] * torch.tensor([1.0, 2.0, 3.0])).sum().backward(retain_graph=True)
    merged[1].backward()
    assert [leaf.grad.tolist() for leaf in leaves if leaf.grad is not None] == [[2.5, 4.5], [6.5]]


def test_a_single_microbatch_is_not_copied() -> None:
    x, scale = torch.ones(2), torch.tensor(3.0)
    merged = merge_outputs([(x, scale)])
    assert merged[0] is x
    assert merged[1] is scale


def test_types_of_containers_are_kept() -> None:
    def output(m: int) -> Any:
        rows = torch.tensor([m])
        return [Hidden(rows), Pair(rows, None), OrderedDict(b=rows, a=()), (rows, [])]

    merged = merge_outputs([output(0), output(1)])
    hidden, pair, ordered, last = merged
    assert isinstance(hidden, Hidden)
    assert (hidden.h.tolist(), hidden.k) == ([0, 1], 7)
    assert isinstance(pair, Pair)
    assert (pair.first.tolist(), pair.second) == ([0, 1], None)
    assert isinstance(ordered, OrderedDict)
    assert list(ordered) == ["b", "a"]
    assert last[0].tolist() == [0, 1]
    assert last[1] == []


def test_a_model_output_stays_one() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    pieces = [
        outputs.CausalLMOutputWithPast(
            loss=torch.tensor(float(m)),
            logits=torch.full((2, 3), m),
            hidden_states=(torch.ones(2),),
        )
        for m in range(2)
    ]
    merged = merge_outputs(pieces)
    assert type(merged) is outputs.CausalLMOutputWithPast
    assert merged.loss.item() == merged["loss"].item() == merged[0].item() == 0.5
    assert merged.logits.shape == (4, 3)
    assert merged.hidden_states[0].shape == (4,)
    assert merged.past_key_values is None


def test_equal_values_of_any_kind() -> None:
    marker = object()
    array = np.arange(3)
    nan = float("nan")
    outputs = [(marker, array.copy(), nan, math.nan, {1, 2}, torch.Size([2])) for _ in range(2)]
    merged = merge_outputs(outputs)
    assert merged[0] is marker
    assert merged[1] is outputs[0][1]
    assert math.isnan(merged[2])
    assert merged[4:] == ({1, 2}, torch.Size([2]))


class Stubborn:
    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("not comparable")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (object(), object()),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.zeros(3)),
        (Stubborn(), Stubborn()),
        (1.0, float("nan")),
        ("a" * 100, "b"),
    ],
)
def test_values_that_are_not_equal(first: Any, second: Any) -> None:
    with pytest.raises(
        InvalidValueError, match=r"output is .* in microbatch 0 and .*must be equal"
    ):
        merge_outputs([first, second])


def test_different_structures_are_an_error_with_the_path() -> None:
    text = (
        r"the structures differ at output\['x'\]\[1\]: a single leaf in microbatch 0, \(\*,\) in "
        "microbatch 2"
    )
    with pytest.raises(InvalidValueError, match=text):
        merge_outputs([{"x": [1, 2]}, {"x": [1, 2]}, {"x": [1, (2,)]}])
    with pytest.raises(
        InvalidValueError, match=r"differ at output: \{'a': \*\} .*, \{'b': \*\} in"
    ):
        merge_outputs([{"a": 1}, {"b": 1}])
    with pytest.raises(InvalidValueError, match=r"differ at output: \[\*\] in .*, \[\*, \*\] in"):
        merge_outputs([[1], [1, 2]])
    with pytest.raises(InvalidValueError, match=r"differ at output: a single leaf in .*, \(\) in"):
        merge_outputs([torch.ones(1), ()])


def test_an_output_that_contains_itself_is_refused() -> None:
    output: list[Any] = []
    output.append(output)
    with pytest.raises(InvalidValueError, match="contains itself"):
        merge_outputs([output, output])


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="there is no output to merge; expected one per"):
        merge_outputs([])


def test_tensors_that_cannot_be_concatenated() -> None:
    a, b = torch.ones(2, 3), torch.ones(2, 4)
    with pytest.raises(
        InvalidValueError, match=r"\(2, 3\) in .*\(2, 4\) in microbatch 1; they may only"
    ):
        merge_outputs([a, b])
    with pytest.raises(
        InvalidValueError, match=r"\(2, 3\) in .*\(2,\) .*which cannot be conc.* dimension 0"
    ):
        merge_outputs([a, torch.ones(2)])
    with pytest.raises(
        InvalidValueError, match=r"is on cpu with torch.strided .* and on meta with"
    ):
        merge_outputs([a, torch.ones(2, 3, device="meta")])
    with pytest.raises(
        InvalidValueError, match="is a Tensor in microbatch 0 and a NoneType in micro"
    ):
        merge_outputs([a, None])
    with pytest.raises(
        InvalidValueError, match="is a int in microbatch 0 and a Tensor in microbatch 2"
    ):
        merge_outputs([1, 1, a])


def test_an_error_that_is_not_about_the_shapes_comes_out_unchanged() -> None:
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.cat:
                raise RuntimeError("no memory left")
            return super().__torch_function__(func, types, args, kwargs or {})

    odd = torch.ones(2).as_subclass(Odd)
    with pytest.raises(RuntimeError, match="no memory left") as caught:
        merge_outputs([odd, odd])
    assert not isinstance(caught.value, InvalidValueError)


class TestSpecs:
    def test_each_leaf_is_merged_as_its_spec_says(self) -> None:
        outputs = [
            {
                "time_major": torch.full((3, 1), float(m)),
                "table": torch.ones(4),
                "count": torch.tensor(m),
                "seen": f"m{m}",
                "rest": (torch.tensor([m]), 5),
            }
            for m in range(3)
        ]
        spec = {
            "time_major": TensorChunkSpec(-1),
            "table": Replicate,
            "count": CustomReducer(torch.tensor(10), torch.add),
            "seen": CustomReducer([], lambda seen, value: [*seen, value]),
            "rest": None,
        }
        merged = merge_outputs(outputs, spec)
        assert merged["time_major"].tolist() == [[0, 1, 2]] * 3
        assert merged["table"] is outputs[0]["table"]
        assert merged["count"].item() == 13
        assert merged["seen"] == ["m0", "m1", "m2"]
        assert merged["rest"][0].tolist() == [0, 1, 2]
        assert merged["rest"][1] == 5

    def test_a_reducer_that_collects_into_its_start_value_starts_afresh_each_time(self) -> None:
        def collect(into: Any, value: int) -> Any:
            into["seen"].append(value)
            into["sum"] += value
            return into

        start = {"seen": [], "sum": torch.tensor(0)}
        reducer = CustomReducer(start, collect)
        for _ in range(2):
            merged = merge_outputs([1, 2], reducer)
            assert merged["seen"] == [1, 2]
            assert merged["sum"].item() == 3
        assert start == {"seen": [], "sum": torch.tensor(0)}

    def test_gradients_flow_through_reducers_and_replicated_values(self) -> None:
        w = torch.tensor(2.0, requires_grad=True)
        outputs = [(w * m, w * 1) for m in range(3)]
        total, same = merge_outputs(
            outputs, (CustomReducer(torch.tensor(0.0), torch.add), Replicate())
        )
        (total + same).backward()
        assert w.grad is not None
        assert w.grad.item() == 4.0

    def test_a_dict_spec_fits_a_model_output(self) -> None:
        modeling = pytest.importorskip("transformers.modeling_outputs")
        outputs = [
            modeling.CausalLMOutput(loss=torch.tensor(1.0), logits=torch.ones(2, 1))
            for _ in range(2)
        ]
        spec = {"loss": CustomReducer(0.0, lambda a, b: a + b), "logits": TensorChunkSpec(1)}
        merged = merge_outputs(outputs, spec)
        assert type(merged) is modeling.CausalLMOutput
        assert merged.loss.item() == 2.0
        assert merged.logits.shape == (2, 2)

    def test_what_is_not_to_be_concatenated_must_be_equal(self) -> None:
        merged = merge_outputs([(1, torch.tensor(2))] * 2, TensorChunkSpec(0))
        assert merged[0] == 1
        assert merged[1].item() == 2
        nans = [torch.tensor([1.0, math.nan]) for _ in range(2)]
        assert merge_outputs(nans, Replicate) is nans[0]
        sparse = [torch.eye(2).to_sparse() for _ in range(2)]
        assert merge_outputs(sparse, Replicate) is sparse[0]
        text = r"output is a tensor of shape \(5,\) in microbatch 0 and tensor\(\[1.\]\) in microb"
        with pytest.raises(InvalidValueError, match=text):
            merge_outputs([torch.ones(5), torch.ones(1)], Replicate)
        with pytest.raises(InvalidValueError, match="must be equal"):
            merge_outputs([torch.tensor([1]), torch.tensor([2])], Replicate)
        with pytest.raises(InvalidValueError, match="must be equal"):
            merge_outputs([torch.tensor([1.0]), 1.0], Replicate)

    def test_a_scalar_tensor_cannot_be_concatenated(self) -> None:
        with pytest.raises(
            InvalidValueError, match=r"output\[0\] is a 0-dim tensor, which Tens.*_Custom"
        ):
            merge_outputs([(torch.tensor(1),)] * 2, (TensorChunkSpec(0),))

    @pytest.mark.parametrize("pieces", [1, 2])
    def test_a_dimension_that_does_not_exist(self, pieces: int) -> None:
        with pytest.raises(
            InvalidValueError, match=r"\(2,\) .*cannot be concatenated along dimension 1"
        ):
            merge_outputs([torch.ones(2)] * pieces, TensorChunkSpec(1))

    @pytest.mark.parametrize("bad", ["mean", 3, (1,), ("a",)])
    def test_what_is_no_spec(self, bad: Any) -> None:
        with pytest.raises(
            InvalidTypeError, match=r"merge_output has .* at output.*; expected Tensor"
        ):
            merge_outputs([(torch.ones(1),)], bad)


def test_a_function_gets_the_list_of_outputs() -> None:
    outputs = (torch.ones(1), torch.ones(2))
    assert merge_outputs(outputs, lambda pieces: pieces) == list(outputs)
    error = OSError("mine")

    def fail(_: Any) -> Any:
        raise error

    with pytest.raises(OSError, match="mine") as caught:
        merge_outputs(outputs, fail)
    assert caught.value is error


def test_false_leaves_the_leaves_packed() -> None:
    outputs = [{"x": torch.ones(m + 1), "n": m} for m in range(2)]
    merged = merge_outputs(outputs, False)
    assert isinstance(merged["x"], RoundPipePackedData)
    assert merged["x"][1] is outputs[1]["x"]
    assert merged["n"] == [0, 1]
    merged["x"].synchronize()  # nothing is in flight
