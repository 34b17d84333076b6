"""What a device makes and counts: tensors, host tensors, memory figures."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundpipe.devices import DevicePool
from roundpipe.devices.base import Category, Device, Stream
from support.backends import Backend

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
MIB = 1 << 20


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


def there_and_back(device: Device, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The copy of a host tensor on the device, and the copy of that copy at home."""
    there = device.empty(host, Stream.INWARD, Category.ACTIVATIONS)
    device.copy(there, host, Stream.INWARD)
    device.wait(Stream.OUTWARD, device.record(Stream.INWARD))
    back = device.host_empty(there)
    device.copy(back, there, Stream.OUTWARD)
    home = device.record(Stream.OUTWARD)
    home.synchronize()
    device.wait(Stream.INWARD, home)
    return there, back


# The pool is the same for all examples; none leaves anything behind in it.
shared_pool = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    order=st.randoms(use_true_random=False),
)
@shared_pool
def test_a_tensor_comes_back_as_it_was(
    pool: DevicePool, shape: tuple[int, ...], dtype: torch.dtype, order: object
) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    host = random_tensor(shape, dtype).permute(dims)
    there, back = there_and_back(pool.devices[0], host)
    assert there.device == pool.devices[0].torch_device
    assert there.shape == host.shape
    assert there.stride() == host.stride()
    assert there.dtype == host.dtype
    assert back.device.type == "cpu"
    assert torch.equal(back.float(), host.float())


def test_strides_with_gaps_are_kept(pool: DevicePool) -> None:
    host = torch.arange(24.0).view(4, 6)[:, 1:4]
    there, back = there_and_back(pool.devices[0], host)
    assert there.stride() == (6, 1)
    assert torch.equal(back, host)


@pytest.mark.parametrize(
    "overlapping",
    [torch.arange(3.0).expand(4, 3), torch.arange(6.0).unfold(0, 4, 1)],
    ids=["expanded", "windows"],
)
def test_a_layout_that_overlaps_itself_becomes_dense(
    pool: DevicePool, overlapping: torch.Tensor
) -> None:
    there, back = there_and_back(pool.devices[0], overlapping)
    assert sorted(there.stride(), reverse=True)[-1] == 1
    assert there.untyped_storage().nbytes() >= there.numel() * 4
    assert torch.equal(back, overlapping)


def test_a_strided_host_tensor_is_a_correct_target(pool: DevicePool) -> None:
    device = pool.devices[0]
    there, _ = there_and_back(device, torch.arange(12.0).view(3, 4))
    whole = torch.zeros(3, 8)
    device.wait(Stream.OUTWARD, device.record(Stream.INWARD))
    device.copy(whole[:, ::2], there, Stream.OUTWARD)
    device.record(Stream.OUTWARD).synchronize()
    assert torch.equal(whole[:, ::2], torch.arange(12.0).view(3, 4))
    assert torch.equal(whole[:, 1::2], torch.zeros(3, 4))


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_copy_converts(pool: DevicePool, way: str) -> None:
    device = pool.devices[0]
    host = torch.arange(8.0)
    narrow = torch.empty(8, dtype=torch.bfloat16)
    there = device.empty(narrow if way == "in" else host, Stream.INWARD, Category.ACTIVATIONS)
    device.copy(there, host, Stream.INWARD)
    device.wait(Stream.OUTWARD, device.record(Stream.INWARD))
    back = device.host_empty(narrow)
    device.copy(back, there, Stream.OUTWARD)
    device.record(Stream.OUTWARD).synchronize()
    assert torch.equal(back, host.bfloat16())


def test_a_copy_of_shapes_that_do_not_fit_is_refused_at_the_call(pool: DevicePool) -> None:
    device = pool.devices[0]
    there = device.empty(torch.empty(3), Stream.INWARD, Category.ACTIVATIONS)
    with pytest.raises(RuntimeError, match=r"size|shape|expand"):
        device.copy(there, torch.zeros(2), Stream.INWARD)
    device.synchronize()


def test_a_copy_leaves_no_trace_in_autograd(pool: DevicePool) -> None:
    device = pool.devices[0]
    weight = torch.ones(4, requires_grad=True)
    there = device.empty(weight, Stream.WEIGHTS, Category.WEIGHTS)
    device.copy(there, weight, Stream.WEIGHTS)
    device.synchronize()
    assert not there.requires_grad
    assert there.grad_fn is None


def test_tensors_made_in_inference_mode_can_be_filled_later(pool: DevicePool) -> None:
    device = pool.devices[0]
    host = torch.arange(4.0)
    with torch.inference_mode():
        there = device.empty(host, Stream.INWARD, Category.ACTIVATIONS)
        back = device.host_empty(host)
    assert not there.is_inference()
    assert not back.is_inference()


def test_host_tensors_have_the_dimension_order_of_their_model(
    backend: Backend, pool: DevicePool
) -> None:
    model = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = pool.devices[0].host_empty(model)
    assert made.stride() == model.stride()
    assert pool.devices[0].host_empty(model[:, :, 1:3]).stride(1) == 1
    assert made.is_pinned() == (backend.name == "accelerator")


def test_memory_is_counted_while_it_is_held(backend: Backend, pool: DevicePool) -> None:
    if backend.name == "cpu":
        pytest.skip("fast CPU devices do not count: device memory is host memory")
    device = pool.devices[0]
    before = device.memory().allocated_bytes
    device.reset_peak()
    held = device.empty(torch.empty(MIB), Stream.WEIGHTS, Category.WEIGHTS)
    view = held[1:]
    del held
    assert device.memory().allocated_bytes == before + 4 * MIB
    del view
    assert device.memory().allocated_bytes == before
    assert device.memory().peak_bytes == before + 4 * MIB
    device.reset_peak()
    assert device.memory().peak_bytes == before


def test_memory_of_compute_is_counted_until_autograd_lets_it_go(
    backend: Backend, pool: DevicePool
) -> None:
    if backend.name == "cpu":
        pytest.skip("fast CPU devices do not count: device memory is host memory")
    device = pool.devices[0]
    before = device.memory().allocated_bytes
    with device.compute_scope():
        x = device.empty(torch.empty(MIB), Stream.COMPUTE, Category.ACTIVATIONS)
        x.fill_(1.0).requires_grad_()
        y = x.exp()  # saves its result
        z = y.sum()
        del y
        assert device.memory().allocated_bytes >= before + 8 * MIB
        z.backward()
        del z
        gc.collect()
        # x and its gradient
        assert device.memory().allocated_bytes == before + 8 * MIB
    device.synchronize()
    del x
    assert device.memory().allocated_bytes == before


def test_categories_are_those_that_were_named_last(backend: Backend, pool: DevicePool) -> None:
    device = pool.devices[0]
    with device.compute_scope():
        weight = device.empty(torch.empty(256), Stream.COMPUTE, Category.WEIGHTS)
        gradient = weight.fill_(1.0) * 2
        device.account(gradient, Category.GRADIENTS)
    report = device.memory()
    if not report.by_category:
        assert not backend.name.startswith("cpu-checked")
        return
    assert report.by_category == {
        Category.WEIGHTS: 1024,
        Category.GRADIENTS: 1024,
        Category.ACTIVATIONS: 0,
        Category.TEMPORARIES: 0,
    }
    assert report.peak_by_category[Category.TEMPORARIES] == 1024


def test_a_small_wish_finds_room(pool: DevicePool) -> None:
    assert pool.devices[0].has_room(1024)
    total = pool.devices[0].memory().total_bytes
    assert total is None or not pool.devices[0].has_room(total)
