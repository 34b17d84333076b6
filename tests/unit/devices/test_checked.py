"""Checked CPU devices: each hazard is reported, its corrected twin is not, whatever the timing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from roundpipe.devices import CheckedPool, CpuChecks, open_cpu_pool
from roundpipe.devices.base import Category, Device, Stream
from roundpipe.devices.checked import CheckedCpuDevice
from support.backends import run_on

Program = Callable[[CheckedPool, bool], None]


@pytest.fixture
def pool() -> Iterator[CheckedPool]:
    with open_cpu_pool(2, CpuChecks()) as opened:
        yield opened


def put(device: Device, host: torch.Tensor, stream: Stream) -> torch.Tensor:
    there = device.empty(host, stream, Category.ACTIVATIONS)
    device.copy(there, host, stream)
    return there


def order(device: Device, before: Stream, after: Stream) -> None:
    device.wait(after, device.record(before))


def finish(device: Device, tensor: torch.Tensor, user: Stream) -> None:
    """A correct end of a tensor's life."""
    device.mark_use(tensor, user)


def compute_reads_a_weight(pool: CheckedPool, is_correct: bool) -> None:
    device = pool.devices[0]
    weight = put(device, torch.ones(4), Stream.WEIGHTS)
    if is_correct:
        order(device, Stream.WEIGHTS, Stream.COMPUTE)
    with device.compute_scope():
        _ = weight * 2
    finish(device, weight, Stream.COMPUTE)


def a_weight_is_dropped_after_compute(pool: CheckedPool, is_correct: bool) -> None:
    device = pool.devices[0]
    weight = put(device, torch.ones(4), Stream.WEIGHTS)
    order(device, Stream.WEIGHTS, Stream.COMPUTE)
    with device.compute_scope():
        _ = weight * 2
    if is_correct:
        order(device, Stream.COMPUTE, Stream.WEIGHTS)
    del weight


def a_slot_is_refilled(pool: CheckedPool, is_correct: bool) -> None:
    device = pool.devices[0]
    slot = put(device, torch.ones(4), Stream.WEIGHTS)
    order(device, Stream.WEIGHTS, Stream.COMPUTE)
    with device.compute_scope():
        _ = slot * 2
    if is_correct:
        order(device, Stream.COMPUTE, Stream.WEIGHTS)
    device.copy(slot, torch.zeros(4), Stream.WEIGHTS)
    finish(device, slot, Stream.COMPUTE)


def a_gradient_goes_home(pool: CheckedPool, is_correct: bool) -> None:
    device = pool.devices[0]
    with device.compute_scope():
        gradient = torch.ones(4) * 2
    if is_correct:
        order(device, Stream.COMPUTE, Stream.OUTWARD)
    device.copy(device.host_empty(gradient), gradient, Stream.OUTWARD)
    finish(device, gradient, Stream.OUTWARD)


def a_gradient_is_dropped_on_its_way(pool: CheckedPool, is_correct: bool) -> None:
    device = pool.devices[0]
    with device.compute_scope():
        gradient = torch.ones(4) * 2
    order(device, Stream.COMPUTE, Stream.OUTWARD)
    device.copy(device.host_empty(gradient), gradient, Stream.OUTWARD)
    if is_correct:
        device.mark_use(gradient, Stream.OUTWARD)
    del gradient


def compute_overwrites_what_is_on_its_way(pool: CheckedPool, is_correct: bool) -> None:
    device = pool.devices[0]
    with device.compute_scope():
        gradient = torch.ones(4) * 2
        order(device, Stream.COMPUTE, Stream.OUTWARD)
        device.copy(device.host_empty(gradient), gradient, Stream.OUTWARD)
        if is_correct:
            order(device, Stream.OUTWARD, Stream.COMPUTE)
        gradient.add_(1.0)
    finish(device, gradient, Stream.OUTWARD)


def foreach_overwrites_what_is_on_its_way(pool: CheckedPool, is_correct: bool) -> None:
    device = pool.devices[0]
    with device.compute_scope():
        gradient = torch.ones(4) * 2
        order(device, Stream.COMPUTE, Stream.OUTWARD)
        device.copy(device.host_empty(gradient), gradient, Stream.OUTWARD)
        if is_correct:
            order(device, Stream.OUTWARD, Stream.COMPUTE)
        torch._foreach_add_([gradient], 1.0)
    finish(device, gradient, Stream.OUTWARD)


def an_activation_passes_through_host_memory(pool: CheckedPool, is_correct: bool) -> None:
    first, second = pool.devices
    with first.compute_scope():
        made = torch.ones(4) * 2
    order(first, Stream.COMPUTE, Stream.OUTWARD)
    host = first.host_empty(made)
    first.copy(host, made, Stream.OUTWARD)
    first.mark_use(made, Stream.OUTWARD)
    if is_correct:
        second.wait(Stream.INWARD, first.record(Stream.OUTWARD))
    put(second, host, Stream.INWARD)


def a_host_slot_is_refilled_from_another_device(pool: CheckedPool, is_correct: bool) -> None:
    first, second = pool.devices
    slot = torch.zeros(4)
    there = put(first, slot, Stream.WEIGHTS)
    if is_correct:
        second.wait(Stream.OUTWARD, first.record(Stream.WEIGHTS))
    with second.compute_scope():
        made = torch.ones(4) * 2
    order(second, Stream.COMPUTE, Stream.OUTWARD)
    second.copy(slot, made, Stream.OUTWARD)
    second.mark_use(made, Stream.OUTWARD)
    del there


def another_devices_tensor_is_computed_with(pool: CheckedPool, is_correct: bool) -> None:
    first, second = pool.devices
    with first.compute_scope():
        made = torch.ones(4) * 2
    second.wait(Stream.COMPUTE, first.record(Stream.COMPUTE))
    if is_correct:
        second.wait(Stream.INWARD, first.record(Stream.COMPUTE))
        copied = put(second, made, Stream.INWARD)
        first.wait(Stream.COMPUTE, second.record(Stream.INWARD))
        order(second, Stream.INWARD, Stream.COMPUTE)
        second.mark_use(copied, Stream.COMPUTE)
        made = copied
    with second.compute_scope():
        _ = made * 2
    first.wait(Stream.COMPUTE, second.record(Stream.COMPUTE))


HAZARDS: dict[Program, str] = {
    compute_reads_a_weight: "compute (aten.mul.Tensor) reads what cpu:0 weights (copy) writes",
    a_weight_is_dropped_after_compute: "belong to cpu:0 weights are dropped while cpu:0 compute",
    a_slot_is_refilled: "weights (copy) overwrites what cpu:0 compute (aten.mul.Tensor) reads",
    a_gradient_goes_home: "outward (copy) reads what cpu:0 compute (aten.mul.Tensor) writes",
    a_gradient_is_dropped_on_its_way: "belong to cpu:0 compute are dropped while cpu:0 outward",
    compute_overwrites_what_is_on_its_way: "(aten.add_.Tensor) overwrites what cpu:0 outward",
    foreach_overwrites_what_is_on_its_way: "(aten._foreach_add_.Scalar) overwrites what cpu:0 out",
    an_activation_passes_through_host_memory: "cpu:1 inward (copy) reads what cpu:0 outward",
    a_host_slot_is_refilled_from_another_device: "cpu:1 outward (copy) overwrites what cpu:0 wei",
    another_devices_tensor_is_computed_with: "(aten.mul.Tensor) uses a tensor that lies on cpu:0",
}


@pytest.mark.parametrize("program", HAZARDS, ids=lambda program: program.__name__)
def test_a_hazard_is_reported_and_its_corrected_twin_is_not(
    pool: CheckedPool, program: Program
) -> None:
    program(pool, True)
    assert pool.reports() == []
    program(pool, False)
    reports = pool.reports()
    assert len(reports) == 1
    assert HAZARDS[program] in reports[0]


def test_what_is_read_before_its_copy_has_run_is_poison(pool: CheckedPool) -> None:
    device = pool.devices[0]
    slot = put(device, torch.ones(4), Stream.WEIGHTS)
    device.synchronize()
    host = torch.ones(4)
    with pool.hold(Stream.WEIGHTS) as hold:
        device.copy(slot, torch.full((4,), 2.0), Stream.WEIGHTS)
        hold.wait_reached()
        assert slot.isnan().all()
    order(device, Stream.WEIGHTS, Stream.OUTWARD)
    device.synchronize()
    assert torch.equal(slot, torch.full((4,), 2.0))
    with pool.hold(Stream.OUTWARD):
        device.copy(host, slot, Stream.OUTWARD)
        assert host.isnan().all()
    device.synchronize()
    assert torch.equal(host, torch.full((4,), 2.0))


def test_what_queued_work_still_reads_is_not_poisoned(pool: CheckedPool) -> None:
    device = pool.devices[0]
    host = torch.ones(4)
    with pool.hold(Stream.OUTWARD):
        with device.compute_scope():
            first, second = torch.ones(4) * 1, torch.ones(4) * 2
        order(device, Stream.COMPUTE, Stream.OUTWARD)
        device.copy(host, first, Stream.OUTWARD)
        there = device.empty(host, Stream.OUTWARD, Category.ACTIVATIONS)
        device.copy(there, host, Stream.OUTWARD)
        # Legal: the same stream, in order. Poison here and now would spoil the copy before.
        device.copy(host, second, Stream.OUTWARD)
    device.synchronize()
    assert torch.equal(there, torch.ones(4))
    assert torch.equal(host, torch.full((4,), 2.0))


def test_a_source_that_was_dropped_early_arrives_as_poison(pool: CheckedPool) -> None:
    device = pool.devices[0]
    made = device.empty(torch.empty(4), Stream.COMPUTE, Category.GRADIENTS)
    with device.compute_scope():
        made.fill_(1.0)
        other = made * 2
    order(device, Stream.COMPUTE, Stream.OUTWARD)
    homes = [device.host_empty(made), device.host_empty(other)]
    with pool.hold(Stream.OUTWARD):
        device.copy(homes[0], made, Stream.OUTWARD)
        device.copy(homes[1], other, Stream.OUTWARD)
        del made, other
    device.record(Stream.OUTWARD).synchronize()
    assert all(home.isnan().all() for home in homes)
    assert len(pool.reports()) == 1


def test_memory_dropped_in_the_order_of_its_own_stream_is_poisoned_behind_its_uses(
    pool: CheckedPool,
) -> None:
    device = pool.devices[0]
    home = torch.zeros(4)
    with pool.hold(Stream.OUTWARD):
        staged = put(device, torch.ones(4), Stream.OUTWARD)
        device.copy(home, staged, Stream.OUTWARD)
        del staged
    device.synchronize()
    assert torch.equal(home, torch.ones(4))
    assert pool.reports() == []


def test_memory_of_compute_may_be_dropped_while_compute_is_watched(pool: CheckedPool) -> None:
    device = pool.devices[0]
    with device.compute_scope():
        made = device.empty(torch.empty(4), Stream.COMPUTE, Category.ACTIVATIONS)
        made.fill_(1.0)
        del made
        _ = torch.ones(4) * 2
    del _
    assert device.memory().allocated_bytes == 0


def test_a_mark_holds_for_later_copies_of_the_same_stream(pool: CheckedPool) -> None:
    device = pool.devices[0]
    with device.compute_scope():
        made = torch.ones(4) * 2
    order(device, Stream.COMPUTE, Stream.OUTWARD)
    device.mark_use(made, Stream.OUTWARD)
    device.synchronize()
    home = device.host_empty(made)
    with pool.hold(Stream.OUTWARD):
        device.copy(home, made, Stream.OUTWARD)
        del made
    device.synchronize()
    assert torch.equal(home, torch.full((4,), 2.0))
    assert pool.reports() == []


def test_memory_waits_for_marked_uses_before_it_is_given_up() -> None:
    with open_cpu_pool(1, CpuChecks(limit_bytes=64)) as pool:
        device = pool.devices[0]
        with device.compute_scope():
            gradient = torch.ones(16)
        home = device.host_empty(gradient)
        order(device, Stream.COMPUTE, Stream.OUTWARD)
        hold = pool.hold(Stream.OUTWARD)
        device.copy(home, gradient, Stream.OUTWARD)
        device.mark_use(gradient, Stream.OUTWARD)
        del gradient
        hold.wait_reached()
        assert device.memory().allocated_bytes == 64
        hold.release()
        # Over the limit, unless the copy is waited for.
        device.empty(home, Stream.COMPUTE, Category.GRADIENTS)
        assert torch.equal(home, torch.ones(16))


def test_the_limit_ends_in_the_operator_that_breaks_it() -> None:
    with open_cpu_pool(1, CpuChecks(limit_bytes=4096)) as pool:
        device = pool.devices[0]
        x = device.empty(torch.empty(512), Stream.COMPUTE, Category.ACTIVATIONS)
        assert device.has_room(1024)
        assert not device.has_room(1500)
        with device.compute_scope():
            y = x * 2
            with pytest.raises(
                torch.OutOfMemoryError,
                match=r"2048 bytes of temporaries were asked for, 4096 of 4096 bytes are in use",
            ):
                _ = x * 3
            del y
            _ = x * 3
        assert device.memory().total_bytes == 4096
        assert device.memory().peak_bytes == 4096


def test_compute_on_host_tensors_alone_makes_host_tensors(pool: CheckedPool) -> None:
    device = pool.devices[0]
    host = torch.ones(4)
    with device.compute_scope():
        cloned = host.clone()
        assert device.memory().allocated_bytes == 0
        _ = torch.zeros(4)
    there = put(device, cloned, Stream.INWARD)
    device.synchronize()
    assert torch.equal(there, host)
    assert pool.reports() == []


def train_layers(device: CheckedCpuDevice, layers: int) -> None:
    """A streaming chain: one layer's weights on the device at a time, gradients sent home."""
    x = torch.randn(8, 64)
    weights = [torch.randn(64, 64) / 8 for _ in range(layers)]
    homes = [torch.empty(64, 64) for _ in range(layers)]
    for weight, home in zip(weights, homes, strict=True):
        there = put(device, weight, Stream.WEIGHTS)
        device.account(there, Category.WEIGHTS)
        inputs = put(device, x, Stream.INWARD)
        order(device, Stream.WEIGHTS, Stream.COMPUTE)
        order(device, Stream.INWARD, Stream.COMPUTE)
        with device.compute_scope():
            leaf = there.detach().requires_grad_()
            (inputs @ leaf).relu().sum().backward()
        gradient = leaf.grad
        assert gradient is not None
        device.account(gradient, Category.GRADIENTS)
        order(device, Stream.COMPUTE, Stream.OUTWARD)
        device.copy(home, gradient, Stream.OUTWARD)
        order(device, Stream.OUTWARD, Stream.COMPUTE)
        for tensor in (there, inputs):
            device.mark_use(tensor, Stream.COMPUTE)
        leaf.grad = None
        del gradient, leaf, there, inputs, tensor


def test_the_peak_depends_on_the_layer_and_not_on_their_number() -> None:
    peaks = []
    for layers in (3, 12):
        with open_cpu_pool(1, CpuChecks(delay_seed=layers)) as pool:
            train_layers(pool.devices[0], layers)
            report = pool.devices[0].memory()
            assert report.allocated_bytes == 0
            assert report.peak_by_category[Category.WEIGHTS] == 64 * 64 * 4
            assert report.peak_by_category[Category.GRADIENTS] == 64 * 64 * 4
            assert pool.reports() == []
            peaks.append(report.peak_bytes)
    assert peaks[0] == peaks[1]


def test_closing_lets_go_what_was_held_and_never_released(pool: CheckedPool) -> None:
    device = pool.devices[0]
    hold = pool.hold(Stream.WEIGHTS)
    weight = put(device, torch.ones(4), Stream.WEIGHTS)
    event = device.record(Stream.WEIGHTS)
    waited = run_on(pool, 0, lambda: device.wait(Stream.COMPUTE, event))
    hold.wait_reached()
    pool.close()
    assert waited.result() is None
    assert torch.equal(weight, torch.ones(4))


def test_events_of_another_pool_are_waited_for(pool: CheckedPool) -> None:
    with open_cpu_pool(1, CpuChecks()) as other:
        first, second = other.devices[0], pool.devices[0]
        hold = other.hold(Stream.OUTWARD)
        with first.compute_scope():
            made = torch.ones(4) * 3
        order(first, Stream.COMPUTE, Stream.OUTWARD)
        host = first.host_empty(made)
        first.copy(host, made, Stream.OUTWARD)
        first.mark_use(made, Stream.OUTWARD)
        second.wait(Stream.INWARD, first.record(Stream.OUTWARD))
        there = put(second, host, Stream.INWARD)
        ready = second.record(Stream.INWARD)
        hold.wait_reached()
        assert not ready.query()
        hold.release()
        ready.synchronize()
        assert torch.equal(there, torch.full((4,), 3.0))
        assert other.reports() == pool.reports() == []


def test_nothing_is_left_after_many_operations(pool: CheckedPool) -> None:
    train_layers(pool.devices[0], 10)
    gc.collect()
    assert pool.devices[0].memory().allocated_bytes == 0
