"""Storages: who used them, when they go, and what is wrong with that."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from roundpipe.devices.base import Category, Stream
from roundpipe.devices.clocks import Operation, StreamKey
from roundpipe.devices.ledger import Ledger
from roundpipe.devices.tracking import Buffer, Tracker, byte_span

COMPUTE = StreamKey(0, Stream.COMPUTE)
OUTWARD = StreamKey(0, Stream.OUTWARD)


class Bench:
    """A tracker of one device, used as the device does."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.ledger = Ledger("cpu:0", limit_bytes)
        self.tracker = Tracker([self.ledger])

    def make(self, owner: StreamKey | None, size: int = 16) -> torch.Tensor:
        tensor = torch.zeros(size)
        category = None if owner is None else Category.ACTIVATIONS
        with self.tracker.locked():
            self.tracker.add(tensor, Buffer(tensor, owner, category), "making")
        return tensor

    def use(self, tensor: torch.Tensor, stream: StreamKey, is_write: bool) -> None:
        with self.tracker.locked():
            operation = Operation(stream, self.tracker.clocks.advance(stream), "use")
            buffer = self.tracker.follow(tensor)
            self.tracker.use(buffer, tensor, operation, is_write=is_write)

    def order(self, before: StreamKey, after: StreamKey) -> None:
        with self.tracker.locked():
            self.tracker.clocks.wait(after, self.tracker.clocks.snapshot(before))

    @property
    def held_bytes(self) -> int:
        with self.tracker.locked():
            return self.ledger.total_bytes


def test_a_storage_is_counted_once_however_many_tensors_share_it() -> None:
    bench = Bench()
    tensor = bench.make(COMPUTE)
    view, detached = tensor[2:], tensor.detach()
    del tensor
    assert bench.held_bytes == 64
    del view
    assert bench.held_bytes == 64
    del detached
    assert bench.held_bytes == 0


def test_what_autograd_saves_is_counted_until_the_graph_goes() -> None:
    bench = Bench()
    tensor = bench.make(COMPUTE).requires_grad_()
    result = (tensor * tensor).sum()
    del tensor
    assert bench.held_bytes == 64
    del result
    assert bench.held_bytes == 0


def test_a_storage_in_a_reference_cycle_goes_with_the_garbage() -> None:
    bench = Bench()
    cycle: list[object] = [bench.make(COMPUTE)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert bench.held_bytes == 0


def test_a_drop_while_the_bookkeeping_is_locked_is_booked_later() -> None:
    bench = Bench()
    tensor = bench.make(COMPUTE)
    with bench.tracker.locked():
        del tensor
        assert bench.ledger.total_bytes == 64
    assert bench.held_bytes == 0


def test_a_storage_that_takes_a_dropped_ones_place_is_not_mistaken_for_it() -> None:
    bench = Bench()
    with bench.tracker.locked():
        for _ in range(50):
            tensor = torch.zeros(16)
            assert bench.tracker.find(tensor) is None
            bench.tracker.add(tensor, Buffer(tensor, COMPUTE, Category.WEIGHTS), "making")
            del tensor
    assert bench.held_bytes == 0


def test_drops_on_other_threads_are_booked() -> None:
    bench = Bench()
    tensors = [bench.make(COMPUTE) for _ in range(40)]
    threads = [threading.Thread(target=tensors.pop) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.held_bytes == 0


def test_more_than_the_limit_is_not_followed() -> None:
    bench = Bench(limit_bytes=100)
    kept = bench.make(COMPUTE)
    with pytest.raises(torch.OutOfMemoryError, match="64 bytes of activations were asked for"):
        bench.make(COMPUTE)
    assert bench.held_bytes == 64
    del kept


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (True, False, "cpu:0 outward (use) reads what cpu:0 compute (use) writes"),
        (True, True, "cpu:0 outward (use) overwrites what cpu:0 compute (use) writes"),
        (False, True, "cpu:0 outward (use) overwrites what cpu:0 compute (use) reads"),
    ],
    ids=["write-read", "write-write", "read-write"],
)
def test_uses_without_order_are_reported_and_with_order_are_not(
    first: bool, second: bool, text: str
) -> None:
    for is_ordered in (False, True):
        bench = Bench()
        host = bench.make(None)
        bench.use(host, COMPUTE, first)
        if is_ordered:
            bench.order(COMPUTE, OUTWARD)
        bench.use(host, OUTWARD, second)
        want = [] if is_ordered else [f"{text}, without having waited for it"]
        assert bench.tracker.reports() == want


def test_two_readers_need_no_order() -> None:
    bench = Bench()
    host = bench.make(None)
    bench.use(host, COMPUTE, False)
    bench.use(host, OUTWARD, False)
    assert bench.tracker.reports() == []


def test_disjoint_parts_need_no_order_and_overlapping_ones_do() -> None:
    bench = Bench()
    host = bench.make(None)
    bench.use(host[:8], COMPUTE, True)
    bench.use(host[8:], OUTWARD, True)
    assert bench.tracker.reports() == []
    bench.use(host[7:8], OUTWARD, True)
    assert len(bench.tracker.reports()) == 1


def test_a_use_that_was_read_over_is_still_known() -> None:
    # Reading by a third stream must not hide the write from a fourth.
    bench = Bench()
    host = bench.make(None)
    bench.use(host, COMPUTE, True)
    bench.order(COMPUTE, OUTWARD)
    bench.use(host, OUTWARD, False)
    bench.use(host, StreamKey(0, Stream.INWARD), False)
    assert bench.tracker.reports() == [
        "cpu:0 inward (use) reads what cpu:0 compute (use) writes, without having waited for it"
    ]


def test_uses_do_not_pile_up() -> None:
    bench = Bench()
    host = bench.make(None)
    for _ in range(100):
        bench.use(host, COMPUTE, True)
        bench.order(COMPUTE, OUTWARD)
        bench.use(host, OUTWARD, False)
        bench.order(OUTWARD, COMPUTE)
    with bench.tracker.locked():
        buffer = bench.tracker.find(host)
        assert buffer is not None
        assert len(buffer.accesses) == 2


def test_fresh_memory_needs_its_owner_to_be_waited_for() -> None:
    # An allocator may have taken it from what the owner's earlier work still uses.
    bench = Bench()
    with bench.tracker.locked():
        bench.tracker.clocks.advance(COMPUTE)
    tensor = bench.make(COMPUTE)
    bench.use(tensor, OUTWARD, True)
    assert bench.tracker.reports() == [
        "cpu:0 outward (use) overwrites what cpu:0 compute (making) writes, without having waited "
        "for it"
    ]


def test_dropping_memory_in_use_by_another_stream_is_reported() -> None:
    text = (
        "64 bytes that belong to cpu:0 compute are dropped while cpu:0 outward (use) uses them, "
        "without mark_use and without cpu:0 compute having waited"
    )
    for excuse, want in [("", [text]), ("waited", []), ("marked", []), ("seen", [])]:
        bench = Bench()
        tensor = bench.make(COMPUTE)
        bench.use(tensor, OUTWARD, False)
        with bench.tracker.locked():
            buffer = bench.tracker.find(tensor)
            assert buffer is not None
            if excuse == "marked":
                buffer.marked.add(OUTWARD)
            if excuse == "seen":
                bench.tracker.clocks.host_saw(bench.tracker.clocks.snapshot(OUTWARD))
        if excuse == "waited":
            bench.order(OUTWARD, COMPUTE)
        del tensor, buffer
        assert bench.tracker.reports() == want


def test_a_closed_tracker_counts_and_checks_no_more_drops() -> None:
    bench = Bench()
    tensor = bench.make(COMPUTE)
    bench.use(tensor, OUTWARD, False)
    bench.tracker.is_closed = True
    del tensor
    assert bench.tracker.reports() == []
    assert bench.held_bytes == 0


def test_a_tracker_may_go_before_its_storages() -> None:
    bench = Bench()
    tensor = bench.make(COMPUTE)
    del bench
    gc.collect()
    del tensor


def test_the_span_of_a_view_in_bytes() -> None:
    tensor = torch.empty(4, 6, dtype=torch.float64)
    assert byte_span(tensor) == (0, 192)
    assert byte_span(tensor[1:3, 2:4]) == (64, 128)
    assert byte_span(tensor[:, 0]) == (0, 152)
    assert byte_span(tensor[2:2]) == (96, 96)
