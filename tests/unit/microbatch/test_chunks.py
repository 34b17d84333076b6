"""The plain functions: those of torch's pipelining, with the differences that the docs list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import microbatch as theirs

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch import (
    CustomReducer,
    MicrobatchWarning,
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)


def test_arguments_are_cut_along_dimension_0_by_default() -> None:
    x, mask = torch.arange(5), torch.ones(5, 2)
    args, kwargs = split_args_kwargs_into_chunks((x, [3, "a"]), {"mask": mask}, 2)
    assert [a[0].tolist() for a in args] == [[0, 1, 2], [3, 4]]
    assert [a[1] for a in args] == [[3, "a"], [3, "a"]]
    assert [k["mask"].shape for k in kwargs] == [(3, 2), (2, 2)]
    assert args[0][0]._base is x


def test_kwargs_may_be_none_and_args_empty() -> None:
    assert split_args_kwargs_into_chunks((), None, 2) == ([(), ()], [{}, {}])
    args, kwargs = split_args_kwargs_into_chunks((torch.ones(2),), None, 2)
    assert (len(args), kwargs) == (2, [{}, {}])


def test_what_is_no_tensor_is_replicated_whatever_its_spec() -> None:
    args, kwargs = split_args_kwargs_into_chunks(
        (1, torch.tensor(2)), {"n": "a"}, 3, (TensorChunkSpec(0), None), {"n": TensorChunkSpec(1)}
    )
    assert args == [(1, torch.tensor(2))] * 3
    assert kwargs == [{"n": "a"}] * 3


def test_specs_choose_the_dimension_or_replicate() -> None:
    x, table = torch.arange(6).view(2, 3), torch.ones(9)
    for replicate in (Replicate, Replicate()):
        args, _ = split_args_kwargs_into_chunks(
            (x, (table, 1)), None, 3, (TensorChunkSpec(-1), replicate)
        )
        assert [a[0].tolist() for a in args] == [[[0], [3]], [[1], [4]], [[2], [5]]]
        assert all(a[1][0] is table for a in args)


def test_pieces_of_a_leaf_keep_their_gradients_as_torchs_stages_expect() -> None:
    x = torch.ones(4, requires_grad=True)
    args, _ = split_args_kwargs_into_chunks((x,), None, 2)
    (args[1][0] * 3).sum().backward()
    assert args[1][0].grad is not None
    assert args[1][0].grad.tolist() == [3, 3]
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 3, 3]
    for without_gradients in (torch.no_grad(), torch.inference_mode()):
        with without_gradients:
            args, _ = split_args_kwargs_into_chunks((x,), None, 2)
        assert args[1][0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("args", "kwargs", "specs", "text"),
    [
        (
            (torch.ones(2),),
            {},
            (None, None),
            r"args\[0\] has shape \(2,\); dimension 0 has size 2",
        ),
        (
            (),
            {"x": {"y": torch.ones(1, 9)}},
            (None, None),
            r"kwargs\['x'\]\['y'\] .* dimension 0 has size 1",
        ),
        (
            (torch.ones(9, 2),),
            {},
            ((TensorChunkSpec(1),), None),
            r"args\[0\] .* dimension 1 has size 2",
        ),
        ((torch.ones(0),), {}, (None, None), r"args\[0\] .* dimension 0 has size 0"),
    ],
)
def test_a_dimension_smaller_than_chunks_is_an_error(
    args: Any, kwargs: Any, specs: Any, text: str
) -> None:
    with pytest.raises(InvalidValueError, match=text + r".*, fewer than chunks=3; use .*Replicate"):
        split_args_kwargs_into_chunks(args, kwargs, 3, *specs)


def test_a_spec_with_another_number_of_entries_names_both() -> None:
    x = torch.ones(4)
    text = r"args_chunk_spec does not fit at args: the spec has 1 entry .*, the value has 2 entries"
    with pytest.raises(InvalidValueError, match=text):
        split_args_kwargs_into_chunks((x, x), None, 2, (TensorChunkSpec(0),))
    text = (
        r"kwargs_chunk_spec does not fit at kwargs: .*0 entries, the value has 1 entry \(\['k'\]\)"
    )
    with pytest.raises(InvalidValueError, match=text):
        split_args_kwargs_into_chunks((), {"k": 1}, 2, None, {})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.ones(2), None, 2), r"args is a Tensor; expected a tuple of positional arguments"),
        (((), [], 2), r"kwargs is a list; expected a dict or None"),
        (((), None, 2.0), r"chunks is 2.0; expected an int, 1 or more"),
        (((), None, True), r"chunks is True; expected an int, 1 or more"),
    ],
)
def test_arguments_of_wrong_types(arguments: Any, text: str) -> None:
    with pytest.raises(InvalidTypeError, match=text):
        split_args_kwargs_into_chunks(*arguments)


def test_no_chunks_at_all_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="chunks is 0; expected an int, 1 or more"):
        split_args_kwargs_into_chunks((), None, 0)


def test_merging_nothing_gives_nothing_with_a_warning() -> None:
    with pytest.warns(MicrobatchWarning, match="merge_chunks got no chunks; it returns an empty"):
        assert merge_chunks([], None) == []


def test_merging_by_default_and_by_spec() -> None:
    chunks = [(torch.full((1, 2), m), {"n": 3, "s": torch.tensor(1)}, m) for m in range(3)]
    spec = (TensorChunkSpec(1), None, CustomReducer(0, lambda total, m: total + m))
    merged = merge_chunks(chunks, spec)
    assert merged[0].tolist() == [[0, 0, 1, 1, 2, 2]]
    assert merged[1]["n"] == 3
    assert merged[1]["s"].item() == 1
    assert merged[2] == 3
    same = merge_chunks([(chunk[0], chunk[1]) for chunk in chunks], None)
    assert same[0].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_a_non_tensor_to_concatenate_is_merged_by_equality_with_a_warning() -> None:
    with pytest.warns(
        MicrobatchWarning, match=r"chunk\[0\] is a int, which TensorChunkSpec\(0\) can"
    ):
        assert merge_chunks([(5,), (5,)], (TensorChunkSpec(0),)) == (5,)
    with pytest.warns(MicrobatchWarning), pytest.raises(InvalidValueError, match=r"5 in .* 6 in"):
        merge_chunks([(5,), (6,)], (TensorChunkSpec(0),))


def test_values_that_are_not_equal_are_an_error() -> None:
    with pytest.raises(
        InvalidValueError, match=r"chunk\['a'\] is 1 in microbatch 0 and 2 in micro"
    ):
        merge_chunks([{"a": 1}, {"a": 2}], None)
    with pytest.raises(InvalidValueError, match=r"tensor\(1\) in microbatch 0 and tensor\(2\) in"):
        merge_chunks([torch.tensor(1), torch.tensor(2)], None)
    with pytest.raises(InvalidValueError, match="chunk_spec does not fit at chunk: the spec has 1"):
        merge_chunks([(1, 2)], (None,))


# --- parity with torch -----------------------------------------------------------------------
# Where torch's documented behaviour is defined: every leaf has its spec, tensors to cut have at
# least ``chunks`` entries, what is replicated on merging can be compared with ``==``.

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def leaf_and_spec(draw: Any, chunks: int) -> tuple[Any, Any]:
    kind = draw(st.sampled_from(["tensor", "replicated tensor", "value"]))
    if kind == "value":
        return draw(st.none() | st.integers() | st.text(max_size=2)), Replicate()
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "tensor":
        shape[dim] = draw(st.integers(chunks, chunks + 5))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    if draw(st.booleans()) and len(shape) > 1:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "replicated tensor":
        return tensor, draw(st.sampled_from([Replicate, Replicate()]))
    return tensor, TensorChunkSpec(draw(st.sampled_from([dim, dim - len(shape)])))


def nested(draw: Any, chunks: int, depth: int) -> tuple[Any, Any]:
    kind = draw(st.sampled_from(["leaf", "leaf", "tuple", "list", "dict"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaf_and_spec(chunks))  # type: ignore[no-any-return]
    pairs = [nested(draw, chunks, depth - 1) for _ in range(draw(st.integers(1, 3)))]
    values, specs = [value for value, _ in pairs], [spec for _, spec in pairs]
    if kind == "dict":
        return dict(enumerate(values)), dict(enumerate(specs))
    return (tuple(values), tuple(specs)) if kind == "tuple" else (values, specs)


@st.composite
def calls(draw: Any) -> tuple[Any, ...]:
    chunks = draw(st.integers(1, 4))
    args = [nested(draw, chunks, 2) for _ in range(draw(st.integers(1, 3)))]
    kwargs = {f"k{i}": nested(draw, chunks, 2) for i in range(draw(st.integers(0, 2)))}
    return (
        tuple(value for value, _ in args),
        {key: value for key, (value, _) in kwargs.items()},
        chunks,
        tuple(spec for _, spec in args),
        {key: spec for key, (_, spec) in kwargs.items()},
    )


def assert_same(a: Any, b: Any, *, strides: bool = True) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.stride() == b.stride() or not strides
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key], strides=strides)
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y, strides=strides)
    else:
        assert a == b


@settings(deadline=None, max_examples=30)
@given(calls())
def test_splitting_agrees_with_torch(call: tuple[Any, ...]) -> None:
    assert_same(split_args_kwargs_into_chunks(*call), theirs.split_args_kwargs_into_chunks(*call))


@settings(deadline=None, max_examples=30)
@given(calls())
def test_merging_agrees_with_torch(call: tuple[Any, ...]) -> None:
    args, _ = split_args_kwargs_into_chunks(*call)
    cut = [
        tuple(x for x, s in zip(a, call[3], strict=True) if isinstance(s, TensorChunkSpec))
        for a in args
    ]
    spec = tuple(s for s in call[3] if isinstance(s, TensorChunkSpec))
    values = [(*piece, m, {"n": 1}) for m, piece in enumerate(cut)]
    full = (*spec, CustomReducer(0, lambda a, b: a + b), {"n": Replicate()})
    # What is one piece stays as it is; torch copies it.
    strides = call[2] > 1
    assert_same(merge_chunks(values, full), theirs.merge_chunks(values, full), strides=strides)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.lists(st.integers(4, 9), min_size=1, max_size=3))
def test_the_default_agrees_with_torch(chunks: int, sizes: list[int]) -> None:
    args = tuple(torch.arange(size * 2).view(size, 2) for size in sizes)
    kwargs = {"x": [args[0], "text"]}
    split = split_args_kwargs_into_chunks(args, kwargs, chunks)
    assert_same(split, theirs.split_args_kwargs_into_chunks(args, kwargs, chunks))
    assert_same(merge_chunks(split[0], None), theirs.merge_chunks(split[0], None))
