"""A spec mirrors the structure; what does not fit is named with its path."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch import CustomReducer, Replicate, TensorChunkSpec, flatten, split_batch
from roundpipe.microbatch.specs import AUTO, WHOLE, Cut, Fold, is_spec_leaf, match_spec

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    x: Any
    y: Any


def rules(spec: Any, tree: Any) -> list[Any]:
    return match_spec(spec, flatten(tree)[1], "args", "split_input")


def test_each_leaf_has_its_rule() -> None:
    spec = (TensorChunkSpec(1), [Replicate, None], {"a": Replicate()})
    assert rules(spec, (1, [2, 3], {"a": 4})) == [Cut(1, True), WHOLE, AUTO, WHOLE]
    assert rules(None, (1, 2)) == [AUTO, AUTO]
    assert rules(TensorChunkSpec(0), 1) == [Cut(0, True)]


def test_a_leaf_over_a_subtree_is_every_leaf_s_rule() -> None:
    spec = (TensorChunkSpec(0), Replicate)
    assert rules(spec, ({"a": 1, "b": (2, 3)}, ())) == [Cut(0, False)] * 3
    assert rules(TensorChunkSpec(-1), ((), 1)) == [Cut(-1, False)]


def test_a_reducer_is_read_with_its_function() -> None:
    (rule,) = rules(CustomReducer(1, max), 5)
    assert rule == Fold(1, max)


def test_containers_of_a_spec_are_matched_by_their_entries() -> None:
    chunk = TensorChunkSpec(0)
    assert rules({"b": Replicate, "a": chunk}, {"a": 1, "b": 2}) == [Cut(0, True), WHOLE]
    assert rules([chunk, Replicate], (1, 2)) == [Cut(0, True), WHOLE]
    assert rules({"a": chunk}, OrderedDict(a=1)) == [Cut(0, True)]
    assert rules(Pair(chunk, None), Pair(1, 2)) == [Cut(0, True), AUTO]
    assert rules(Record(chunk, Replicate), Record(1, 2)) == [Cut(0, True), WHOLE]


@pytest.mark.parametrize(
    ("spec", "tree", "text"),
    [
        (
            (TensorChunkSpec(0),),
            (1, 2),
            r"at args: the spec has 1 entry \(\[0\]\), the value has 2 entries \(\[0\], \[1\]\)",
        ),
        (
            (Replicate, ()),
            (1, (2,)),
            r"at args\[1\]: the spec has 0 entries, the value has 1 entry",
        ),
        (
            ({"a": Replicate, "c": Replicate},),
            ({"a": 1, "b": 2},),
            r"args\[0\]: the spec has 2 entries \(\['a'\], \['c'\]\), .*\(\['a'\], \['b'\]\)",
        ),
        (Pair(Replicate, Replicate), (1, 2), r"the spec has 2 entries \(.first, .second\)"),
        (
            ([Replicate],),
            (1,),
            r"at args\[0\]: the spec has a list there, the value is a single leaf",
        ),
        ((Replicate,) * 9, (1,), r"9 entries \(\[0\], .*\[7\], ...\), the value has 1 entry"),
    ],
)
def test_other_entries_are_an_error_with_the_path(spec: Any, tree: Any, text: str) -> None:
    with pytest.raises(InvalidValueError, match="split_input does not fit .*" + text):
        rules(spec, tree)


@pytest.mark.parametrize("bad", [0, "rows", TensorChunkSpec, object(), "x" * 100])
def test_what_is_no_spec_is_an_error_with_the_path(bad: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"split_input has .* at args\[1\]; expected Tensor"):
        rules((Replicate, bad), (1, 2))


@pytest.mark.parametrize("dim", ["0", None, 1.0, True])
def test_a_dimension_that_is_no_number_is_an_error(dim: Any) -> None:
    text = r"split_input has TensorChunkSpec\(.*\) at args\[1\]; the dimension must be an int"
    spec = (None, TensorChunkSpec(dim))
    for tree in ((1, 2), (1, (2, 3))):
        with pytest.raises(InvalidTypeError, match=text):
            rules(spec, tree)


def test_a_reducer_does_not_say_how_to_split() -> None:
    spec = ((CustomReducer(0, max),), None)
    with pytest.raises(
        InvalidValueError, match=r"args\[0\] has a _CustomReducer, which says how to"
    ):
        split_batch((torch.ones(2),), {}, None, 2, split_input=spec)


def test_only_specs_are_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_spec_leaf(Replicate)
    assert is_spec_leaf(Replicate())
    assert not is_spec_leaf(TensorChunkSpec)
    assert not is_spec_leaf(None)
    assert not is_spec_leaf(len)
    monkeypatch.setattr("roundpipe.compat.spec_classes", lambda load=False: None)
    assert not is_spec_leaf(len)  # as long as nobody has imported them, nothing can be one
