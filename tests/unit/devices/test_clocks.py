"""What comes after what, as vector clocks see it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roundpipe.devices.base import Stream
from roundpipe.devices.clocks import Clock, Clocks, Operation, StreamKey

A = StreamKey(0, Stream.WEIGHTS)
B = StreamKey(0, Stream.COMPUTE)
C = StreamKey(1, Stream.OUTWARD)
STREAMS = [A, B, C]


def do(clocks: Clocks, stream: StreamKey) -> Operation:
    return Operation(stream, clocks.advance(stream), "copy")


def test_a_stream_is_in_order_with_itself_and_with_nobody_else() -> None:
    clocks = Clocks()
    operation = do(clocks, A)
    assert clocks.is_ordered(operation, A)
    assert not clocks.is_ordered(operation, B)


def test_waiting_for_an_event_orders_what_came_before_it_only() -> None:
    clocks = Clocks()
    before = do(clocks, A)
    event = clocks.snapshot(A)
    after = do(clocks, A)
    clocks.wait(B, event)
    assert clocks.is_ordered(before, B)
    assert not clocks.is_ordered(after, B)


def test_order_is_handed_on() -> None:
    clocks = Clocks()
    first = do(clocks, A)
    clocks.wait(B, clocks.snapshot(A))
    clocks.wait(C, clocks.snapshot(B))
    assert clocks.is_ordered(first, C)


def test_what_a_stream_learns_later_is_not_in_an_earlier_event() -> None:
    clocks = Clocks()
    early = clocks.snapshot(B)
    first = do(clocks, A)
    clocks.wait(B, clocks.snapshot(A))
    clocks.wait(C, early)
    assert not clocks.is_ordered(first, C)


def test_what_the_host_has_seen_is_before_everything_enqueued_later() -> None:
    clocks = Clocks()
    first = do(clocks, A)
    clocks.host_saw(clocks.snapshot(A))
    second = do(clocks, A)
    assert clocks.is_ordered(first, C)
    assert not clocks.is_ordered(second, C)


steps = st.lists(
    st.tuples(st.sampled_from(STREAMS), st.sampled_from(STREAMS), st.booleans()), max_size=40
)


@given(steps)
def test_clocks_agree_with_a_search_through_the_graph_of_waits(
    history: list[tuple[StreamKey, StreamKey, bool]],
) -> None:
    clocks = Clocks()
    before: dict[StreamKey, set[Operation]] = {stream: set() for stream in STREAMS}
    events: list[tuple[Clock, set[Operation]]] = []
    done: list[Operation] = []
    for stream, other, is_wait in history:
        if is_wait and events:
            clock, reached = events[len(done) % len(events)]
            clocks.wait(stream, clock)
            before[stream] |= reached
        else:
            operation = do(clocks, stream)
            done.append(operation)
            before[stream].add(operation)
            events.append((clocks.snapshot(other), set(before[other])))
    for operation in done:
        for stream in STREAMS:
            assert clocks.is_ordered(operation, stream) == (operation in before[stream])


def test_streams_and_operations_have_readable_names() -> None:
    assert str(A) == "cpu:0 weights"
    assert str(Operation(C, 3, "aten.mm.default")) == "cpu:1 outward (aten.mm.default)"
