"""Poison, and memory that is reached after its tensors are gone."""

from __future__ import annotations

import pytest
import torch

from roundpipe.devices.base import Category, Stream
from roundpipe.devices.clocks import StreamKey
from roundpipe.devices.memory import new_tensor, poison, reach
from roundpipe.devices.tracking import Buffer

COMPUTE = StreamKey(0, Stream.COMPUTE)
OUTWARD = StreamKey(0, Stream.OUTWARD)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64],
    ids=str,
)
def test_floating_poison_is_nan(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    poison(tensor)
    assert tensor.isnan().all()
    assert new_tensor(tensor)[0].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int64, -1), (torch.int8, -1), (torch.uint8, 255), (torch.uint16, 65535)],
    ids=str,
)
def test_integer_poison_is_an_index_out_of_range(dtype: torch.dtype, value: int) -> None:
    made, _ = new_tensor(torch.empty(3, dtype=dtype))
    assert made.tolist() == [value] * 3


def test_boolean_poison_is_true() -> None:
    assert new_tensor(torch.empty(2, dtype=torch.bool))[0].tolist() == [True, True]


def test_poison_stays_within_a_strided_view() -> None:
    whole = torch.zeros(4, 4)
    poison(whole[:, ::2])
    assert whole.isnan().sum() == 8
    assert torch.equal(whole[:, 1::2], torch.zeros(4, 2))


def test_a_new_tensor_begins_where_its_model_does_relative_to_alignment() -> None:
    # CPU kernels may differ in the last bit with alignment.
    model = torch.empty(100)[3:50]
    made, _ = new_tensor(model)
    assert made.data_ptr() % 64 == model.data_ptr() % 64


HOST = Buffer(torch.empty(1))


def device_buffer(tensor: torch.Tensor, memory: torch.Tensor | None) -> Buffer:
    return Buffer(tensor, COMPUTE, Category.WEIGHTS, memory)


def test_memory_of_a_dropped_tensor_is_reached_with_its_layout() -> None:
    tensor, memory = new_tensor(torch.empty(3, 4))
    part = tensor.t()[1:3]
    part.fill_(5.0)
    reached = reach(part, device_buffer(tensor, memory), OUTWARD)
    del tensor, part
    again = reached()
    assert again is not None
    assert again.shape == (2, 3)
    assert again.stride() == (1, 4)
    assert torch.equal(again, torch.full((2, 3), 5.0))


def test_what_compute_allocated_is_reached_only_while_it_lives() -> None:
    tensor = torch.arange(4.0)
    reached = reach(tensor[1:], device_buffer(tensor, None), OUTWARD)
    again = reached()
    assert again is not None
    assert again.data_ptr() == tensor[1:].data_ptr()
    del again, tensor
    assert reached() is None


def test_what_a_stream_is_marked_as_using_is_kept_for_that_stream() -> None:
    tensor = torch.arange(4.0)
    buffer = device_buffer(tensor, None)
    buffer.marked.add(OUTWARD)
    kept = reach(tensor, buffer, OUTWARD)
    dropped = reach(tensor, buffer, COMPUTE)
    del tensor
    assert dropped() is not None
    del kept
    assert dropped() is None


def test_host_memory_is_kept() -> None:
    tensor = torch.arange(4.0, requires_grad=True)
    reached = reach(tensor, HOST, OUTWARD)
    del tensor
    again = reached()
    assert again is not None
    assert torch.equal(again, torch.arange(4.0))


def test_a_conjugated_view_keeps_its_values() -> None:
    tensor, memory = new_tensor(torch.empty(2, dtype=torch.complex64))
    tensor.fill_(1 + 2j)
    reached = reach(tensor.conj(), device_buffer(tensor, memory), OUTWARD)()
    assert reached is not None
    assert torch.equal(reached, torch.tensor([1 - 2j, 1 - 2j]))
