"""The schedule of an accelerator's streams: what goes on while something else stands still.

Streams are held, so nothing here depends on how fast anything is; one test slows kernels down and
asks what was over first.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, transfer
from roundpipe.devices.accelerator import AcceleratorDevice
from roundpipe.devices.base import Device, Event, Stream
from support.backends import Accelerator
from support.cases import sum_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.accelerator.is_available() and Accelerator().is_fake),
        reason="streams of a real accelerator cannot be held back",
    ),
]

WIDTH, COUNT = 8, 4
STAGES = [range(index, index + 1) for index in range(3)]
CONFIG = RoundPipeRunConfig(
    num_microbatch=COUNT, execute_plan=ModelExecutePlan(STAGES[:-1], STAGES[::-1])
)


class Watched(nn.Module):
    """A linear layer that says before each microbatch that it comes, and marks when it is done."""

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before = before
        self.done: list[torch.Event] = []  # shared with the replicas; recomputes come behind
        self.launched = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before(len(self.done))
        out: torch.Tensor = self.linear(x)
        event = torch.Event(device=x.device)
        event.record(torch.accelerator.current_stream(x.device))
        self.done.append(event)
        if len(self.done) == COUNT:
            self.launched.set()
        return out


def train(pipe: RoundPipe) -> None:
    pipe.forward_backward((torch.ones(2 * COUNT, WIDTH),), loss_fn=sum_loss)


def model_with(first: Watched, second: Watched | None = None) -> nn.Sequential:
    return nn.Sequential(first, second or nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Arrival:
    """When a stage's last microbatch is launched, the next stage's weights are all on their way."""

    def __init__(self, device: Device, once: Callable[[], None] = lambda: None) -> None:
        self._device = device
        self._once = once
        self._known = threading.Event()
        self._event: Event | None = None

    def before(self, microbatch: int) -> None:
        if microbatch == 0:
            self._once()
        if microbatch == COUNT - 1:
            self._event = self._device.record(Stream.WEIGHTS)
            self._known.set()

    def event(self) -> Event:
        """Behind the upload."""
        self._known.wait()
        assert self._event is not None
        return self._event


def beside(check: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Runs the check on a thread of its own."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            check()
        except BaseException as error:  # noqa: BLE001 - raised by the test
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failures


def holding(device: Device, stream: Stream, held: contextlib.ExitStack) -> Callable[[], None]:
    def hold() -> None:
        device.record(stream).synchronize()  # what the first stage itself needs is through
        context = Accelerator().hold(device, stream)
        assert context is not None
        held.enter_context(context)

    return hold


def test_the_next_weights_arrive_while_compute_stands_still_and_those_after_them_do_not() -> None:
    held = contextlib.ExitStack()
    with Accelerator().open(1) as pool:
        (device,) = pool.devices
        next_one = Arrival(device, holding(device, Stream.COMPUTE, held))
        after_next = Arrival(device)
        first, second = Watched(next_one.before), Watched(after_next.before)
        with RoundPipe(model_with(first, second), devices=pool, model_run_config=CONFIG) as pipe:

            def check() -> None:
                with held:
                    next_one.event().synchronize()  # or it raises, after a while
                    assert not first.done[0].query()
                    # A device holds two stages' weights: there is no room for a third.
                    assert not after_next.event().query()

            thread, failures = beside(check)
            train(pipe)
            thread.join()
    assert failures == []


def test_activations_overtake_the_next_weights() -> None:
    held = contextlib.ExitStack()
    with Accelerator().open(1) as pool:
        (device,) = pool.devices
        arrival = Arrival(device, holding(device, Stream.WEIGHTS, held))
        first = Watched(arrival.before)
        with RoundPipe(model_with(first), devices=pool, model_run_config=CONFIG) as pipe:

            def check() -> None:
                with held:
                    first.launched.wait()
                    for event in first.done[:COUNT]:
                        event.synchronize()  # or it raises, after a while
                    assert not arrival.event().query()

            thread, failures = beside(check)
            train(pipe)
            thread.join()
    assert failures == []


def test_no_activation_is_issued_behind_more_than_its_share_of_the_next_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One engine copies everything that comes in: what is issued first comes first."""
    row_bytes = 4 * WIDTH
    monkeypatch.setattr(transfer, "CHUNK_BYTES", row_bytes)
    issued: list[tuple[Stream, int]] = []
    copy = AcceleratorDevice.copy

    def noted(self: Device, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        issued.append((stream, source.numel() * source.element_size()))
        copy(self, target, source, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(AcceleratorDevice, "copy", noted)
    with Accelerator().open(1) as pool:
        first = Watched(lambda _: None)
        with RoundPipe(model_with(first), devices=pool, model_run_config=CONFIG) as pipe:
            train(pipe)
    inward = [index for index, (stream, _) in enumerate(issued) if stream is Stream.INWARD]
    gaps = [
        sum(size for stream, size in issued[begin:end] if stream is Stream.WEIGHTS)
        for begin, end in itertools.pairwise(inward[:COUNT])
    ]
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    assert all(0 < gap <= layer_bytes // COUNT + row_bytes for gap in gaps)


def test_with_slow_kernels_uploads_cost_nothing() -> None:
    """Four slow microbatches against one upload: it is over long before the stage is."""
    over: list[bool] = []
    with Accelerator().open(1) as pool, Accelerator().slow(kernel_ms=50.0, copy_ms=5.0):
        arrival = Arrival(pool.devices[0])
        first = Watched(arrival.before)
        with RoundPipe(model_with(first), devices=pool, model_run_config=CONFIG) as pipe:

            def check() -> None:
                first.launched.wait()
                first.done[COUNT - 1].synchronize()
                over.append(arrival.event().query())

            thread, failures = beside(check)
            train(pipe)
            thread.join()
    assert failures == []
    assert over == [True]
