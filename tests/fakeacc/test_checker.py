"""The checker reports what nothing orders, and nothing else."""

import gc

import pytest
import torch

from support import fakeacc


@pytest.fixture
def streams() -> tuple[torch.Stream, torch.Stream]:
    """Two streams of one device that nothing has run on yet."""
    return torch.Stream("fakeacc:0"), torch.Stream("fakeacc:0")


def take_reports() -> list[fakeacc.Report]:
    fakeacc.drain()
    found = fakeacc.reports()
    fakeacc.clear_reports()
    return found


def test_a_read_that_does_not_wait_for_the_write_names_both(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    writer, reader = streams
    with writer:
        x = torch.zeros(8, device="fakeacc:0")
        x.fill_(1.0)
    with reader:
        x.sum()
    (report, *_) = take_reports()
    assert (report.operation, report.other) == ("aten::sum.IntList_out", "aten::fill_.Scalar")
    assert "reads 32 bytes of fakeacc:0 block" in str(report)
    assert f"on fakeacc:0/{writer.stream_id} writes" in report.message


@pytest.mark.parametrize("how", ["wait_stream", "wait_event", "host", "query", "third stream"])
def test_every_kind_of_wait_orders(streams: tuple[torch.Stream, torch.Stream], how: str) -> None:
    writer, reader = streams
    with writer:
        x = torch.ones(8, device="fakeacc:0")
    if how == "wait_stream":
        reader.wait_stream(writer)
    elif how == "wait_event":
        reader.wait_event(writer.record_event())
    elif how == "host":
        writer.synchronize()
    elif how == "query":
        while not writer.query():
            pass
    else:
        between = torch.Stream("fakeacc:1")
        between.wait_stream(writer)
        reader.wait_stream(between)
    with reader:
        assert x.sum().item() == 8.0
    writer.wait_stream(reader)  # before x is freed
    assert take_reports() == []


def test_a_wait_for_an_earlier_point_does_not_order(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    writer, reader = streams
    with writer:
        x = torch.zeros(8, device="fakeacc:0")
        early = writer.record_event()
        x.fill_(1.0)
    reader.wait_event(early)
    with reader:
        x.sum()
    assert next(report.other for report in take_reports()) == "aten::fill_.Scalar"


def test_a_write_must_wait_for_readers_and_readers_need_not_wait_for_each_other(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    main = torch.accelerator.current_stream("fakeacc:0")
    x = torch.zeros(8, device="fakeacc:0")
    for stream in streams:
        stream.wait_stream(main)
        with stream:
            x.sum()
    assert take_reports() == []  # and drained: the host knows both reads are over
    x.add_(1)
    assert take_reports() == []
    for stream in streams:
        stream.wait_stream(main)
        with stream:
            x.sum()
    main.wait_stream(streams[0])
    x.add_(1)
    (report,) = take_reports()
    assert f"fakeacc:0/{streams[1].stream_id} reads" in report.message


def test_disjoint_parts_of_one_buffer_do_not_conflict(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    flat = torch.zeros(16, device="fakeacc:0")
    fakeacc.drain()
    for part, stream in zip(flat.split(8), streams, strict=True):
        with stream:
            part.fill_(1.0)
    fakeacc.drain()
    assert take_reports() == []
    with streams[0]:
        flat[:9].fill_(2.0)
    with streams[1]:
        flat[8:].fill_(3.0)
    (report,) = take_reports()
    assert "writes 4 bytes" in report.message


def test_new_memory_belongs_to_the_stream_it_was_allocated_for(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    """Whether or not the allocator reused a block that earlier tasks of that stream still use."""
    owner, user = streams
    with owner:
        torch.zeros(4, device="fakeacc:0").add_(1)
        x = torch.empty(1 << 16, device="fakeacc:0")
    with user:
        x.fill_(1.0)
    (report,) = take_reports()
    assert report.other == "the allocation"


def test_a_free_must_wait_for_other_streams_or_be_told_of_them(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    main = torch.accelerator.current_stream("fakeacc:0")
    for recorded in (True, False):
        x = torch.zeros(8, device="fakeacc:0")
        streams[0].wait_stream(main)
        with streams[0]:
            total = x.sum()
        if recorded:
            x.record_stream(streams[0])
        del x
        gc.collect()
        found = take_reports()
        assert [report.operation for report in found] == ([] if recorded else ["the free"])
        del total


def test_a_recorded_stream_answers_for_what_it_waited_for(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    first, second = streams
    main = torch.accelerator.current_stream("fakeacc:0")
    x = torch.zeros(8, device="fakeacc:0")
    first.wait_stream(main)
    with first:
        x.sum()
    second.wait_stream(first)
    x.record_stream(second)  # the block waits for second, and so for first
    del x
    assert take_reports() == []


def test_the_host_must_wait_before_it_reads_or_writes_pinned_memory() -> None:
    stream = torch.Stream("fakeacc:0")
    up, down = torch.zeros(8, pin_memory=True), torch.zeros(8, pin_memory=True)
    with stream:
        x = up.to("fakeacc:0", non_blocking=True)
        down.copy_(x, non_blocking=True)
    down.mul(2)
    up.mul(2)  # reading what is being read is fine
    up.add_(1)
    found = take_reports()
    assert [(report.operation, report.other) for report in found] == [
        ("aten::mul.Tensor", "the download"),
        ("aten::add_.Tensor", "the upload"),
    ]
    assert "on the host reads 32 bytes of pinned block" in found[0].message
    with stream:
        down.copy_(x, non_blocking=True)
    stream.synchronize()
    down.add_(1)
    assert take_reports() == []


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.view(2, 4).t()[0].expand(3, 2),
        lambda t: (t.shape, t.is_pinned(), t.data_ptr()),
        lambda t: t.untyped_storage().nbytes(),
        torch.empty_like,
        lambda t: t.detach(),
    ],
)
def test_looking_at_a_pinned_tensor_without_its_values_is_no_access(look: object) -> None:
    stream = torch.Stream("fakeacc:0")
    host = torch.zeros(8, pin_memory=True)
    with stream:
        host.copy_(torch.ones(8, device="fakeacc:0"), non_blocking=True)
    assert callable(look)
    look(host)
    assert take_reports() == []


def test_access_by_other_means_can_be_told() -> None:
    stream = torch.Stream("fakeacc:0")
    host = torch.zeros(2, 4, pin_memory=True)
    with stream:
        device = torch.ones(4, device="fakeacc:0")
        host[1].copy_(device, non_blocking=True)
    fakeacc.check_host_access(host[0], write=False, what="numpy")
    assert take_reports() == []
    with stream:
        host[1].copy_(device, non_blocking=True)
    fakeacc.check_host_access(host[:, 0], write=False, what="numpy")
    (report,) = take_reports()
    assert report.operation == "numpy"


def test_raise_stops_at_the_call_and_queues_nothing(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    writer, reader = streams
    with writer:
        x = torch.zeros(8, device="fakeacc:0")
    fakeacc.drain()
    with writer:
        x.fill_(1.0)
    with fakeacc.checker("raise"), reader:
        with pytest.raises(RuntimeError, match=r"aten::add.out on fakeacc:0/\d+ writes"):
            x.add_(1)
    assert len(take_reports()) == 1
    assert x.tolist() == [1.0] * 8


def test_off_collects_nothing(streams: tuple[torch.Stream, torch.Stream]) -> None:
    with fakeacc.checker("off"):
        with streams[0]:
            x = torch.zeros(8, device="fakeacc:0")
        with streams[1]:
            x.add_(1)
        fakeacc.drain()
        del x
    assert take_reports() == []
    with pytest.raises(ValueError, match="the checker is off, collect or raise, not on"):
        torch.get_device_module("fakeacc").native.set_checker("on")


def test_many_accesses_to_one_block_stay_bounded_and_checked(
    streams: tuple[torch.Stream, torch.Stream],
) -> None:
    x = torch.zeros(1000, device="fakeacc:0")
    fakeacc.drain()
    for i in range(1000):
        with streams[0]:
            x[i].add_(1)
    with streams[1]:
        x[999].add_(1)
    (report,) = take_reports()
    assert "writes 4 bytes" in report.message
