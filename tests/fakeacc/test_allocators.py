"""Device memory: stream order, record_stream, the cache, exact figures and the limit."""

import gc

import pytest
import torch

from support import fakeacc

MIB = 1 << 20


def device_empty(elements: int, device: str = "fakeacc:0") -> torch.Tensor:
    return torch.empty(elements, dtype=torch.float32, device=device)


def test_peak_bytes_are_exact() -> None:
    torch.accelerator.synchronize("fakeacc:0")
    base = fakeacc.allocated_bytes(0)
    fakeacc.reset_peak_bytes(0)
    a = device_empty(1000)
    b = device_empty(3)
    assert fakeacc.allocated_bytes(0) == base + 4012
    del a
    assert fakeacc.allocated_bytes(0) == base + 12
    del b
    assert fakeacc.allocated_bytes(0) == base
    assert fakeacc.peak_bytes(0) == base + 4012
    fakeacc.reset_peak_bytes(0)
    assert fakeacc.peak_bytes(0) == base


def test_devices_are_counted_apart() -> None:
    before = fakeacc.allocated_bytes(0), fakeacc.allocated_bytes(1)
    tensor = device_empty(100, "fakeacc:1")
    assert (fakeacc.allocated_bytes(0), fakeacc.allocated_bytes(1)) == (before[0], before[1] + 400)
    del tensor


def test_the_peak_of_a_kernel_counts_its_result_only() -> None:
    x = device_empty(1000).zero_()
    fakeacc.reset_peak_bytes(0)
    base = fakeacc.allocated_bytes(0)
    y = x * 2
    assert fakeacc.peak_bytes(0) == base + 4000
    del y


def test_torch_sees_rounded_figures() -> None:
    before = torch.accelerator.memory_allocated("fakeacc:0")
    tensor = device_empty(1)
    assert torch.accelerator.memory_allocated("fakeacc:0") == before + 512
    stats = torch.accelerator.memory_stats("fakeacc:0")
    assert stats["requested_bytes.all.current"] == fakeacc.allocated_bytes(0)
    assert stats["reserved_bytes.all.current"] >= stats["allocated_bytes.all.current"]
    assert torch.accelerator.max_memory_allocated("fakeacc:0") >= before + 512
    free, total = torch.accelerator.get_memory_info("fakeacc:0")
    assert 0 < free < total
    del tensor


def test_a_freed_block_is_reused_at_once_by_its_own_stream() -> None:
    stream = torch.accelerator.current_stream("fakeacc:0")
    with fakeacc.hold(stream):
        x = device_empty(777)
        x.fill_(1.0)
        address = x.data_ptr()
        del x
        y = device_empty(777)
        assert y.data_ptr() == address  # safe: what y's user queues runs after the fill
        y.fill_(2.0)
    assert y.tolist() == [2.0] * 777


def test_a_freed_block_is_not_given_to_another_stream() -> None:
    x = device_empty(778)
    address = x.data_ptr()
    del x
    with torch.Stream("fakeacc:0"):
        assert device_empty(778).data_ptr() != address


def test_record_stream_keeps_a_block_until_that_stream_is_through() -> None:
    user = torch.Stream("fakeacc:0")
    x = device_empty(779).fill_(5.0)
    user.wait_stream(torch.accelerator.current_stream("fakeacc:0"))
    with fakeacc.hold(user):
        with user:
            total = x.sum()
        x.record_stream(user)
        address = x.data_ptr()
        del x
        assert device_empty(779).data_ptr() != address
    user.synchronize()
    assert total.item() == 5.0 * 779
    again = [device_empty(779) for _ in range(4)]
    assert address in [tensor.data_ptr() for tensor in again]


def test_memory_is_poison_before_it_is_written() -> None:
    fresh, reused = device_empty(501), device_empty(502).fill_(1.0)
    del reused
    assert fresh.isnan().all()
    assert device_empty(502).isnan().all()
    assert (torch.empty(8, dtype=torch.int64, device="fakeacc:0") == -1).all()


def test_empty_cache_returns_what_nothing_uses() -> None:
    x = device_empty(MIB)
    kept = device_empty(MIB)
    del x
    gc.collect()
    assert torch.accelerator.memory_reserved("fakeacc:0") >= 2 * 4 * MIB
    torch.accelerator.empty_cache()
    reserved = torch.accelerator.memory_reserved("fakeacc:0")
    assert reserved == torch.accelerator.memory_allocated("fakeacc:0")
    assert kept.numel() == MIB


def test_more_than_the_limit_is_out_of_memory_and_less_is_not() -> None:
    torch.accelerator.empty_cache()
    base = torch.accelerator.memory_allocated("fakeacc:0")
    with fakeacc.memory_limit(0, base + 8192):
        x = device_empty(1024)
        with pytest.raises(torch.OutOfMemoryError, match=r"fakeacc:0 out of memory. Tried to"):
            device_empty(1025)
        y = device_empty(1024)  # exactly full
        assert torch.accelerator.get_memory_info("fakeacc:0") == (0, base + 8192)
        del x, y
        device_empty(2048)
    device_empty(4096)


def test_the_cache_never_causes_out_of_memory() -> None:
    torch.accelerator.empty_cache()
    base = torch.accelerator.memory_allocated("fakeacc:0")
    user = torch.Stream("fakeacc:0")
    with fakeacc.memory_limit(0, base + 8192):
        with user:
            device_empty(1024)  # cached for a stream that will not ask again
        pending = device_empty(1024).zero_()
        user.wait_stream(torch.accelerator.current_stream("fakeacc:0"))
        with fakeacc.latency(kernel_ms=20.0), user:
            pending.add_(1)
        pending.record_stream(user)
        del pending  # in use for another 20 ms: the allocator has to wait
        assert device_empty(2048).numel() == 2048


def test_an_operator_may_run_out_of_memory_and_the_device_stays_usable() -> None:
    x = torch.ones(64, 64, device="fakeacc:0")
    with fakeacc.memory_limit(0, torch.accelerator.memory_reserved("fakeacc:0")):
        torch.accelerator.empty_cache()
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.cat([x] * 512)
    assert (x @ x).sum().item() == 64.0**3


def test_storages_can_be_emptied_and_filled_again() -> None:
    x = torch.arange(16.0, device="fakeacc:0")
    base = fakeacc.allocated_bytes(0)
    x.untyped_storage().resize_(0)
    assert fakeacc.allocated_bytes(0) == base - 64
    x.untyped_storage().resize_(64)
    x.copy_(torch.arange(16.0))
    assert x.tolist() == list(map(float, range(16)))
    x.resize_(32)
    assert x[:16].tolist() == list(map(float, range(16)))


def test_an_empty_tensor_needs_no_memory() -> None:
    base = fakeacc.allocated_bytes(0)
    empty = torch.empty(0, 5, device="fakeacc:0")
    assert (empty + 1).shape == (0, 5)
    assert fakeacc.allocated_bytes(0) == base
