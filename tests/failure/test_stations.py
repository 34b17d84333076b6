"""One fault at each station of a call, on the first, a middle and the last microbatch.

The exception that comes out is the one that was raised, with a note that says where; threads go
idle, buffers are as before, the gradients accumulated since the last step are gone (which the note
says), and the next call equals one of a model that never saw a fault.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from roundpipe import RoundPipe
from roundpipe.devices import DevicePool
from support.faults import (
    CONFIG,
    MICROBATCHES,
    InjectedError,
    Switch,
    assert_equal,
    batch,
    build,
    fresh_result,
    loss_of,
    no_thread_left,
    notes_of,
    open_kind,
    train_once,
)

DROPPED = "gradients accumulated since the last step were dropped"


@dataclass(frozen=True)
class Station:
    """Where the fault is, and what the note must say of it (besides microbatch and device)."""

    place: str
    layer: int | None
    position: int
    where: str


# Positions in the plan: forward 0..1, forward 2, fused 3..4, backward 2, backward 0..1.
STATIONS = {
    "forward": Station("forward", 1, 0, "layer 1 (Block), stage 0 (layers 0..1)"),
    "forward of a fused stage": Station("forward", 4, 2, "layer 4 (Block), stage 2 (layers 3..4)"),
    "loss": Station("loss", None, 2, "stage 2 (layers 3..4)"),
    "backward of a fused stage": Station(
        "backward", 3, 2, "layer 3 (Block), stage 2 (layers 3..4)"
    ),
    "recompute": Station("recompute", 2, 3, "layer 2 (Block), stage 3 (layer 2)"),
    "recompute of a wider stage": Station(
        "recompute", 1, 4, "layer 1 (Block), stage 4 (layers 0..1)"
    ),
    "backward": Station("backward", 2, 3, "layer 2 (Block), stage 3 (layer 2)"),
    "backward of a wider stage": Station(
        "backward", 0, 4, "layer 0 (Block), stage 4 (layers 0..1)"
    ),
}


@pytest.fixture(scope="module", params=["plain", "checked"])
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    with no_thread_left(), open_kind(request.param) as opened:
        yield opened


@contextlib.contextmanager
def trained_pipe(pool: DevicePool, switch: Switch) -> Iterator[RoundPipe]:
    """A model that has taken a step and then accumulated a gradient."""
    with RoundPipe(build(switch), model_run_config=CONFIG, devices=pool, name="net") as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1, momentum=0.9)
        inputs, label = batch(1)
        pipe.forward_backward(inputs, None, label, loss_of(switch))
        pipe.step(optimizer.step, is_async=False)
        pipe.step(optimizer.zero_grad, is_async=False)
        pipe.forward_backward(inputs, None, label, loss_of(switch))
        yield pipe


def state_of(pipe: RoundPipe) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in pipe.model.state_dict().items()}


def assert_unharmed(pipe: RoundPipe, switch: Switch, before: dict[str, torch.Tensor]) -> None:
    """Parameters and buffers are as before, and the next call equals a fresh model's."""
    after = state_of(pipe)
    assert all(torch.equal(after[key], before[key]) for key in before)
    want = fresh_result(pipe)
    switch.disarm()
    switch.visits.clear()
    assert_equal(train_once(pipe, switch), want)


@pytest.mark.parametrize("microbatch", MICROBATCHES)
@pytest.mark.parametrize("name", STATIONS)
def test_a_fault_inside_a_stage_comes_home(name: str, microbatch: int, pool: DevicePool) -> None:
    station, switch = STATIONS[name], Switch()
    phase = name.split(" of ", maxsplit=1)[0]
    with trained_pipe(pool, switch) as pipe:
        before, threads = state_of(pipe), set(threading.enumerate())
        device = (pool.cursor + station.position) % len(pool.devices)
        error = InjectedError(name)
        switch.arm(error, station.place, station.layer, microbatch)
        inputs, label = batch()
        with pytest.raises(InjectedError) as caught:
            pipe.forward_backward(inputs, None, label, loss_of(switch))
        assert caught.value is error
        assert notes_of(error) == [
            f"roundpipe: model net, {station.where}, microbatch {microbatch}, "
            f"phase {phase}, device cpu:{device}",
            f"roundpipe: model net; {DROPPED}",
        ]
        assert set(threading.enumerate()) == threads
        assert_unharmed(pipe, switch, before)
