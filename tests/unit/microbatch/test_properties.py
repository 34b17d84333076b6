"""For any tree: what is split merges to what it was; what does not fit is our error, no other."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

from roundpipe.errors import RoundPipeError
from roundpipe.microbatch import (
    CustomReducer,
    Replicate,
    TensorChunkSpec,
    flatten,
    merge_chunks,
    merge_outputs,
    split_args_kwargs_into_chunks,
    split_batch,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Record:
    left: Any
    right: Any


class Box:
    def __init__(self, inner: list[Any]) -> None:
        self.inner = inner


_pytree.register_pytree_node(Box, lambda box: (box.inner, None), lambda v, _: Box(list(v)))


def numbered(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 120).view(shape).to(dtype)


@st.composite
def tensors(draw: Any, rows: int, dim: int = 0, layouts: bool = True) -> torch.Tensor:
    """A tensor with ``rows`` entries along ``dim``, of any dtype and in any layout."""
    shape = draw(st.lists(st.integers(0, 3), min_size=dim, max_size=dim))
    shape += [rows, *draw(st.lists(st.integers(0, 3), max_size=2))]
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "sparse"]))
    if not layouts or layout == "plain":
        return numbered(shape, dtype)
    if layout == "transposed":
        return numbered(shape[::-1], dtype).permute(*reversed(range(len(shape))))
    if layout == "strided":
        wide = [*shape[:-1], shape[-1] * 2]
        return numbered(wide, dtype)[..., ::2]
    if layout == "expanded":
        return numbered([1] * len(shape), dtype).expand(shape)
    return numbered(shape, dtype).to_sparse()


scalars = st.sampled_from(DTYPES).map(lambda dtype: torch.tensor(1).to(dtype))
objects = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.floats(allow_nan=True), st.booleans()
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=2) | st.integers(0, 9)

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d)),
            st.builds(Point, inner, inner),
            st.builds(Record, inner, inner),
            st.lists(inner, max_size=2).map(Box),
        )

    return st.recursive(leaves, containers, max_leaves=8)


@st.composite
def batches(draw: Any) -> tuple[Any, int]:
    """Arguments whose tensors all have the same number of rows, and a number of pieces."""
    count = draw(st.integers(1, 4))
    rows = draw(st.integers(count, 9))
    leaves = tensors(rows) | scalars | objects
    return tuple(draw(st.lists(trees(leaves), min_size=1, max_size=3))), count


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def assert_equal_trees(a: Any, b: Any) -> None:
    leaves_a, structure_a = flatten(a)
    leaves_b, structure_b = flatten(b)
    assert structure_a == structure_b
    for x, y in zip(leaves_a, leaves_b, strict=True):
        assert type(x) is type(y)
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape, x.layout) == (y.dtype, y.shape, y.layout)
            assert torch.equal(dense(x), dense(y))
        else:
            assert x == y or (x != x and y != y)  # noqa: PLR0124 - NaN


def snapshot(tree: Any) -> tuple[list[int], str]:
    leaves, structure = flatten(tree)
    return [id(leaf) for leaf in leaves], repr(structure)


@settings(deadline=None, max_examples=30)
@given(batches())
def test_chunks_merge_to_what_was_split(batch: tuple[Any, int]) -> None:
    args, count = batch
    before = snapshot(args)
    pieces, kwargs = split_args_kwargs_into_chunks(args, {"again": args}, count)
    assert len(pieces) == len(kwargs) == count
    assert_equal_trees(merge_chunks(pieces, None), args)
    assert_equal_trees(merge_chunks(kwargs, None), {"again": args})
    assert snapshot(args) == before


@settings(deadline=None, max_examples=30)
@given(batches())
def test_batches_merge_to_what_was_split(batch: tuple[Any, int]) -> None:
    args, count = batch
    before = snapshot(args)
    split = split_batch(args, {"again": args}, args, count)
    has_rows = split.rows is not None
    assert len(split.microbatches) == count
    assert has_rows == any(isinstance(x, torch.Tensor) and x.ndim for x in flatten(args)[0])
    if has_rows:
        assert sum(m.rows or 0 for m in split.microbatches) == split.rows
        assert all(m.rows for m in split.microbatches)
    for pieces in (
        [m.args for m in split.microbatches],
        [m.kwargs["again"] for m in split.microbatches],
        [m.label for m in split.microbatches],
    ):
        for piece in pieces:
            assert flatten(piece)[1] == flatten(args)[1]
        assert_equal_trees(merge_chunks(pieces, None), args)
        # 0-dim tensors are averaged by the engine, to a floating result
        merged = merge_outputs(pieces)
        for x, y in zip(flatten(merged)[0], flatten(args)[0], strict=True):
            if isinstance(x, torch.Tensor) and not x.ndim:
                assert x.is_floating_point() or x.is_complex()
                assert x.item() == y.item()
            else:
                assert_equal_trees(x, y)
    assert snapshot(args) == before


@settings(deadline=None, max_examples=30)
@given(batches())
def test_pieces_are_views_and_other_leaves_the_same_objects(batch: tuple[Any, int]) -> None:
    args, count = batch
    for m in split_batch(args, None, None, count).microbatches:
        for piece, whole in zip(flatten(m.args)[0], flatten(args)[0], strict=True):
            if not isinstance(whole, torch.Tensor) or not whole.ndim:
                assert piece is whole
            elif whole.layout is torch.strided:
                assert piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                assert piece.stride() == whole.stride()


@st.composite
def specified(draw: Any) -> tuple[Any, Any, int]:
    """A tree, a spec that fits it, and a number of pieces."""
    count = draw(st.integers(1, 3))
    rows = draw(st.integers(count, 6))

    def leaf() -> tuple[Any, Any]:
        kind = draw(st.sampled_from(["cut", "whole", "object"]))
        if kind == "object":
            return draw(objects), draw(st.sampled_from([Replicate, Replicate(), None]))
        dim = draw(st.integers(0, 2))
        tensor = draw(tensors(rows, dim, layouts=False))
        if kind == "whole":
            return tensor, draw(st.sampled_from([Replicate, Replicate()]))
        return tensor, TensorChunkSpec(draw(st.sampled_from([dim, dim - tensor.ndim])))

    def node(depth: int) -> tuple[Any, Any]:
        kind = draw(st.sampled_from(["leaf", "tuple", "dict", "point"])) if depth else "leaf"
        if kind == "leaf":
            return leaf()
        if kind == "point":
            (a, spec_a), (b, spec_b) = node(depth - 1), node(depth - 1)
            return Point(a, b), Point(spec_a, spec_b)
        pairs = [node(depth - 1) for _ in range(draw(st.integers(0, 3)))]
        make: Callable[[list[Any]], Any] = tuple if kind == "tuple" else _dict
        return make([value for value, _ in pairs]), make([spec for _, spec in pairs])

    value, spec = node(2)
    return (value,), (spec,), count


def _dict(values: list[Any]) -> dict[str, Any]:
    return {f"k{i}": value for i, value in enumerate(values)}


@settings(deadline=None, max_examples=30)
@given(specified())
def test_specs_merge_what_they_split(case: tuple[Any, Any, int]) -> None:
    args, spec, count = case
    pieces, _ = split_args_kwargs_into_chunks(args, None, count, spec)
    assert_equal_trees(merge_chunks(pieces, spec), args)
    batch = split_batch(args, None, None, count, split_input=(spec, None))
    assert len(batch.microbatches) == count
    assert_equal_trees(merge_outputs([m.args for m in batch.microbatches], spec), args)


def _last(_: Any, value: Any) -> Any:
    return value


spec_leaves = st.one_of(
    st.integers(-4, 4).map(TensorChunkSpec),
    st.sampled_from([Replicate, Replicate(), None, TensorChunkSpec, 0, "rows", object()]),
    st.just(CustomReducer(0, _last)),
    st.just(TensorChunkSpec("rows")),
)
sized = st.integers(0, 4).flatmap(tensors)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(trees(sized | scalars | objects), max_size=2).map(tuple),
    trees(spec_leaves),
    st.integers(1, 4),
)
def test_any_spec_for_anything_works_or_is_our_error(args: Any, spec: Any, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(RoundPipeError):
            split_batch(args, None, args, count, split_input=(spec, None), split_label=None)
        with contextlib.suppress(RoundPipeError):
            split_batch((1,), None, args, count, None, None if callable(spec) else spec)
        with contextlib.suppress(RoundPipeError):
            split_args_kwargs_into_chunks(args, {"k": args}, count, spec, None)
        with contextlib.suppress(RoundPipeError):
            split_args_kwargs_into_chunks((), {"k": args}, count, None, {"k": spec})
        with contextlib.suppress(RoundPipeError):
            merge_chunks([args] * count, spec)
        if not callable(spec):
            with contextlib.suppress(RoundPipeError):
                merge_outputs([args] * count, spec)


@settings(deadline=None, max_examples=30)
@given(st.lists(trees(sized | scalars | objects), min_size=1, max_size=3))
def test_any_outputs_merge_or_are_our_error(outputs: list[Any]) -> None:
    for merge_output in (None, True, False):
        with contextlib.suppress(RoundPipeError):
            merge_outputs(outputs, merge_output)
    with contextlib.suppress(RoundPipeError):
        merge_chunks(outputs, None)
