"""Layouts of copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.devices.layout import empty_like, offset_elements, overlaps_itself

CPU = torch.device("cpu")
layouts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)


@given(layouts)
def test_a_layout_that_is_said_not_to_overlap_has_as_many_places_as_elements(
    layout: list[tuple[int, int]],
) -> None:
    sizes, strides = [size for size, _ in layout], [stride for _, stride in layout]
    span = 1 + sum((size - 1) * stride for size, stride in layout if size)
    places = torch.arange(max(span, 1)).as_strided(sizes, strides).flatten()
    is_injective = len(set(places.tolist())) == places.numel()
    assert overlaps_itself(sizes, strides) in (not is_injective, True)


@given(st.permutations([2, 3, 4]))
def test_every_permuted_dense_tensor_is_free_of_overlaps(order: list[int]) -> None:
    tensor = torch.empty(order).permute(2, 0, 1)
    assert not overlaps_itself(tensor.shape, tensor.stride())


def test_an_interleaved_layout_counts_as_overlapping() -> None:
    # Rows of 0, 4 and columns of 0, 3 touch no place twice, but are not nested either.
    assert overlaps_itself((2, 3), (4, 3))


def test_strides_are_kept_and_expanded_tensors_become_dense() -> None:
    assert empty_like(torch.empty(4, 6)[:, :2], CPU).stride() == (6, 1)
    assert empty_like(torch.empty(3, 2).t(), CPU).stride() == (1, 2)
    assert empty_like(torch.empty(3).expand(2, 3), CPU).stride() == (3, 1)
    assert empty_like(torch.empty(()), CPU).shape == ()


def test_nothing_but_the_layout_is_taken_over() -> None:
    model = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    made = empty_like(model, CPU)
    assert type(made) is torch.Tensor
    assert not made.requires_grad
    assert made.dtype == torch.bfloat16


@pytest.mark.parametrize("begin", [0, 1, 5, 15, 16, 33])
def test_a_host_copy_begins_where_its_model_does_relative_to_alignment(begin: int) -> None:
    model = torch.empty(100)[begin : begin + 40].view(4, 10)
    made = empty_like(model, CPU)
    assert made.data_ptr() % 64 == model.data_ptr() % 64
    assert made.stride() == (10, 1)
    assert offset_elements(model) == begin % 16
    made.fill_(1.0)


def test_what_is_not_in_host_memory_has_no_offset_there() -> None:
    assert offset_elements(torch.empty(4, device="meta")) == 0
    assert offset_elements(torch.empty(0)) == 0
    meta = empty_like(torch.empty(100)[3:], torch.device("meta"))
    assert (meta.device.type, meta.shape) == ("meta", (97,))


def test_tensors_are_ordinary_ones_even_in_inference_mode() -> None:
    with torch.inference_mode():
        assert not empty_like(torch.empty(4), CPU).is_inference()
