"""A kernel that fails fails late: at the next wait of the host for its device, once."""

from collections.abc import Callable

import pytest
import torch

from support import fakeacc


def queue_failure(device: str) -> None:
    table = torch.zeros(4, 2, device=device)
    torch.nn.functional.embedding(torch.tensor([9], device=device), table)


def query_until_done(event: torch.Event) -> None:
    while not event.query():
        pass


# Every way in which the host may learn that the stream got somewhere.
WAITS: dict[str, Callable[[torch.Event, torch.Tensor], object]] = {
    "device": lambda event, one: torch.accelerator.synchronize("fakeacc:0"),
    "stream": lambda event, one: torch.accelerator.current_stream("fakeacc:0").synchronize(),
    "event": lambda event, one: event.synchronize(),
    "query": lambda event, one: query_until_done(event),
    "item": lambda event, one: one.item(),
    "download": lambda event, one: one.cpu(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_next_wait_raises_and_the_device_stays_usable(wait: str) -> None:
    one = torch.ones(1, device="fakeacc:0")
    queue_failure("fakeacc:0")
    event = torch.accelerator.current_stream("fakeacc:0").record_event()
    with pytest.raises(torch.AcceleratorError, match=r"index_select failed on stream fakeacc:0/0"):
        WAITS[wait](event, one)
    torch.accelerator.synchronize("fakeacc:0")  # raised once
    assert (one + 1).item() == 2.0


def test_the_error_belongs_to_its_device() -> None:
    queue_failure("fakeacc:0")
    torch.accelerator.synchronize("fakeacc:1")
    assert torch.ones(1, device="fakeacc:1").item() == 1.0
    with pytest.raises(RuntimeError, match="index out of range"):
        torch.accelerator.synchronize("fakeacc:0")


def test_only_the_first_error_is_kept() -> None:
    x = torch.zeros(3, device="fakeacc:0")
    index = torch.tensor([5], device="fakeacc:0")
    queue_failure("fakeacc:0")
    x.gather(0, index)
    with pytest.raises(torch.AcceleratorError, match="index_select"):
        fakeacc.drain()
    fakeacc.drain()


def test_later_tasks_of_the_stream_run_on() -> None:
    queue_failure("fakeacc:0")
    x = torch.full((2,), 3.0, device="fakeacc:0")
    with pytest.raises(torch.AcceleratorError, match="failed on stream"):
        fakeacc.drain()
    assert x.tolist() == [3.0, 3.0]


def test_an_operator_that_waits_raises_its_own_error_at_once() -> None:
    singular = torch.zeros(2, 2, device="fakeacc:0")
    with pytest.raises(RuntimeError, match="singular"):
        torch.linalg.inv(singular)
    fakeacc.drain()


def test_poison_as_an_index_raises() -> None:
    index = torch.empty(3, dtype=torch.int64, device="fakeacc:0")
    x = torch.zeros(4, device="fakeacc:0")
    x.index_select(0, index)
    with pytest.raises(torch.AcceleratorError, match="out of range"):
        fakeacc.drain()


def test_a_wait_that_raises_has_waited_for_everything() -> None:
    streams = [torch.Stream(device) for device in ("fakeacc:0", "fakeacc:1") for _ in range(3)]
    queue_failure("fakeacc:0")
    queue_failure("fakeacc:1")
    with fakeacc.latency(kernel_ms=5.0):
        for stream in streams:
            with stream:
                torch.zeros(1, device=stream.device)
    with pytest.raises(torch.AcceleratorError, match="failed on stream"):
        fakeacc.drain()
    assert all(stream.query() for stream in streams)
    fakeacc.drain()
