"""Pinned memory and copies between host and device, as the documentation of CUDA has them."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from support import fakeacc


def test_pinned_tensors_know_that_they_are() -> None:
    pageable = torch.zeros(4)
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert pageable.pin_memory().is_pinned()
    assert not pageable.is_pinned()
    assert not torch.zeros(4, device="fakeacc").is_pinned()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(4, device="fakeacc", pin_memory=True)


def test_an_upload_from_pinned_memory_reads_it_late() -> None:
    stream = torch.Stream("fakeacc:0")
    host = torch.ones(4).pin_memory()
    with stream, fakeacc.hold(stream):
        device = host.to("fakeacc:0", non_blocking=True)
        with fakeacc.checker("off"):
            host.fill_(7.0)  # wrong, and therefore seen
    stream.synchronize()
    assert device.tolist() == [7.0] * 4


def test_an_upload_from_pageable_memory_reads_it_at_the_call() -> None:
    stream = torch.Stream("fakeacc:0")
    host = torch.ones(4)
    with stream, fakeacc.hold(stream):
        device = host.to("fakeacc:0", non_blocking=True)
        host.fill_(7.0)
    stream.synchronize()
    assert device.tolist() == [1.0] * 4


def test_an_upload_that_casts_reads_pinned_memory_at_the_call() -> None:
    stream = torch.Stream("fakeacc:0")
    host = torch.ones(4).pin_memory()
    with stream, fakeacc.hold(stream):
        device = host.to("fakeacc:0", torch.bfloat16, non_blocking=True)
        host.fill_(7.0)
    stream.synchronize()
    assert device.tolist() == [1.0] * 4


def test_a_download_to_pinned_memory_comes_late_and_poison_shows_it() -> None:
    stream = torch.Stream("fakeacc:0")
    host = torch.zeros(4, pin_memory=True)
    with stream:
        device = torch.full((4,), 3.0, device="fakeacc:0")
        with fakeacc.hold(stream):
            host.copy_(device, non_blocking=True)
            with fakeacc.checker("off"):
                assert host.isnan().all()
    stream.synchronize()
    assert host.tolist() == [3.0] * 4


def test_a_download_to_pageable_memory_waits() -> None:
    device = torch.full((4,), 3.0, device="fakeacc:0")
    host = torch.zeros(4)
    with fakeacc.latency(copy_ms=5.0):
        host.copy_(device, non_blocking=True)
        assert host.tolist() == [3.0] * 4


def test_to_cpu_without_blocking_makes_a_pinned_tensor_and_does_not_wait() -> None:
    device = torch.full((4,), 3.0, device="fakeacc:0")
    with fakeacc.hold(torch.accelerator.current_stream("fakeacc:0")):
        host = device.to("cpu", non_blocking=True)
        assert host.is_pinned()
    torch.accelerator.synchronize("fakeacc:0")
    assert host.tolist() == [3.0] * 4


def test_a_pinned_buffer_may_be_reused_in_stream_order() -> None:
    stream = torch.Stream("fakeacc:0")
    host = torch.ones(4).pin_memory()
    with stream:
        first = host.to("fakeacc:0", non_blocking=True)
        host.copy_(first * 2, non_blocking=True)
        second = host.to("fakeacc:0", non_blocking=True)
    stream.synchronize()
    assert second.tolist() == [2.0] * 4
    assert host.tolist() == [2.0] * 4


def test_a_pinned_block_freed_in_flight_is_not_handed_out_before_the_copy_is_through() -> None:
    stream = torch.Stream("fakeacc:0")
    host = torch.ones(5000).pin_memory()
    address = host.data_ptr()
    with stream, fakeacc.hold(stream):
        device = host.to("fakeacc:0", non_blocking=True)
        del host
        assert torch.empty(5000, pin_memory=True).data_ptr() != address
    stream.synchronize()
    assert device.tolist() == [1.0] * 5000
    later = [torch.empty(5000, pin_memory=True) for _ in range(3)]
    assert address in [tensor.data_ptr() for tensor in later]
    torch.accelerator.empty_host_cache()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool],
)
@pytest.mark.parametrize("pinned", [False, True])
def test_round_trips_keep_every_bit(dtype: torch.dtype, pinned: bool) -> None:
    host = torch.randint(0, 2, (7, 3)).to(dtype)
    host = host.pin_memory() if pinned else host
    there = host.to("fakeacc:0", non_blocking=True).to("fakeacc:1")
    back = there.cpu()
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), host.view(torch.uint8))


def test_strided_copies_in_both_directions() -> None:
    host = torch.arange(24.0).reshape(4, 6).pin_memory()
    device = host.t()[1:4].to("fakeacc:0")
    assert torch.equal(device.cpu(), host.t()[1:4])
    target = torch.zeros(6, 4, pin_memory=True)
    target[1:4].copy_(device)
    target.t()[:, 4:].copy_(device[:2].t())
    torch.accelerator.synchronize("fakeacc:0")
    assert torch.equal(target[1:4], host.t()[1:4])
    assert torch.equal(target[4:], host.t()[1:3])


def test_a_peer_copy_waits_for_both_current_streams() -> None:
    source, destination = torch.Stream("fakeacc:0"), torch.Stream("fakeacc:1")
    with source, destination:
        x = torch.ones(4, device="fakeacc:0")
        y = torch.zeros(4, device="fakeacc:1")
        with fakeacc.latency(kernel_ms=10.0):
            x.mul_(5)
            y.fill_(9.0)
            y.copy_(x, non_blocking=True)
            y.add_(1)
    torch.accelerator.synchronize("fakeacc:1")
    assert y.tolist() == [6.0] * 4


def test_modules_keep_their_parameters_when_they_move() -> None:
    layer = torch.nn.Linear(3, 3)
    weight = layer.weight
    expected = weight.detach().clone()
    layer.to("fakeacc:1")
    assert layer.weight is weight
    assert weight.device == torch.device("fakeacc:1")
    layer.cpu()
    assert torch.equal(weight.detach(), expected)
    weight.data = weight.data.to("fakeacc:0")
    assert weight.device == torch.device("fakeacc:0")


def test_a_data_loader_pins_its_batches() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=3, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat(batches), torch.arange(6.0))
