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
from typing import Any

import pytest
import torch

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import DevicePool
from support.faults import (
    CONFIG,
    KINDS,
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


CASES = pytest.mark.parametrize(
    ("pool", "microbatch"),
    # Other devices are slow, and what they add does not depend on the microbatch.
    [
        *(("plain", microbatch) for microbatch in MICROBATCHES),
        *((kind, MICROBATCHES[1]) for kind in KINDS if kind != "plain"),
    ],
    indirect=["pool"],
)
EACH_KIND = pytest.mark.parametrize("pool", KINDS, indirect=True)


@pytest.fixture(scope="module")
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


def assert_unharmed(
    pool: DevicePool, pipe: RoundPipe, switch: Switch, before: dict[str, torch.Tensor]
) -> None:
    """Parameters and buffers are as before, and the next call equals a fresh model's."""
    after = state_of(pipe)
    assert all(torch.equal(after[key], before[key]) for key in before)
    kind = pool.devices[0].torch_device.type
    want = fresh_result(pipe, "plain" if kind == "cpu" else "accelerator")
    switch.disarm()
    switch.visits.clear()
    assert_equal(train_once(pipe, switch), want)


@CASES
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
            f"phase {phase}, device {pool.devices[device].name}",
            f"roundpipe: model net; {DROPPED}",
        ]
        assert set(threading.enumerate()) == threads
        assert_unharmed(pool, pipe, switch, before)


@EACH_KIND
def test_without_anything_accumulated_the_note_speaks_of_no_loss(pool: DevicePool) -> None:
    switch = Switch()
    with RoundPipe(build(switch), model_run_config=CONFIG, devices=pool, name="net") as pipe:
        error = InjectedError("first call")
        switch.arm(error, "forward", 0, 0)
        inputs, label = batch()
        with pytest.raises(InjectedError):
            pipe.forward_backward(inputs, None, label, loss_of(switch))
        assert not any(DROPPED in note for note in notes_of(error))


class SplitAt:
    """A split function that makes the pieces one by one and fails at one of them."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> tuple[list[Any], list[Any]]:
        pieces = []
        for microbatch in range(count):
            self.switch.visit("split", None, microbatch)
            pieces.append(tuple(tensor.tensor_split(count)[microbatch] for tensor in args))
        return pieces, [dict(kwargs) for _ in pieces]


class MergeAt:
    """A merge function that takes the outputs one by one and fails at one of them."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def __call__(self, outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        rows = []
        for x, ids in outputs:
            self.switch.visit("merge", None, int(ids[0]))
            rows.append(x)
        return torch.cat(rows)


@CASES
@pytest.mark.parametrize("place", ["split", "merge"])
def test_a_fault_in_a_users_split_or_merge_comes_home(
    place: str, microbatch: int, pool: DevicePool
) -> None:
    switch = Switch()
    config = RoundPipeRunConfig(split_input=SplitAt(switch), merge_output=MergeAt(switch))
    with trained_pipe(pool, switch) as pipe:
        before = state_of(pipe)
        error = InjectedError(place)
        switch.arm(error, place, None, microbatch)
        inputs, label = batch()
        with pytest.raises(InjectedError) as caught:
            pipe.forward_backward(
                inputs, None, label, loss_of(switch), return_outputs=True, run_config=config
            )
        assert caught.value is error
        assert ", ".join(notes_of(error)).startswith(f"roundpipe: model net, phase {place}")
        assert DROPPED in notes_of(error)[-1]
        assert_unharmed(pool, pipe, switch, before)


@CASES
@pytest.mark.parametrize("name", ["forward", *(name for name in STATIONS if "wider" in name)])
def test_a_fault_comes_home_through_the_users_own_backward(
    name: str, microbatch: int, pool: DevicePool
) -> None:
    station, switch = STATIONS[name], Switch()
    plan = ModelExecutePlan([range(2), range(2, 5)], [range(3, 5), range(2, 3), range(2)])
    config = RoundPipeRunConfig(execute_plan=plan)
    layer = station.where.split(",", maxsplit=1)[0]
    with trained_pipe(pool, switch) as pipe:
        before, phase = state_of(pipe), name.split(" of ", maxsplit=1)[0]
        error = InjectedError(name)
        switch.arm(error, station.place, station.layer, microbatch)
        inputs, label = batch()

        def forward() -> torch.Tensor:
            output: torch.Tensor = pipe(*inputs, roundpipe_run_config=config)[0]
            return output

        if phase == "forward":
            with pytest.raises(InjectedError) as caught:
                forward()
        else:
            loss = ((forward() - label) ** 2).sum()
            before = state_of(pipe)  # the forward was a good one: its buffers stay
            with pytest.raises(InjectedError) as caught:
                loss.backward()
        assert caught.value is error
        place, cost = notes_of(error)
        assert place.startswith(f"roundpipe: model net, {layer}, stage ")
        assert (
            f"microbatch {microbatch}, phase {phase}, device {pool.devices[0].torch_device.type}:"
            in place
        )
        assert DROPPED in cost
        assert_unharmed(pool, pipe, switch, before)


@EACH_KIND
def test_a_fault_in_an_evaluation_costs_nothing(pool: DevicePool) -> None:
    switch = Switch()
    with trained_pipe(pool, switch) as pipe:
        pipe.eval()
        pipe.synchronize()
        want = [p.grad.clone() for p in pipe.model.parameters() if p.grad is not None]
        for place, layer in [("forward", 3), ("split", None), ("merge", None)]:
            config = RoundPipeRunConfig(
                split_input=SplitAt(switch),
                merge_output=MergeAt(switch),
                execute_plan=ModelExecutePlan([range(5)]),
            )
            error = InjectedError(place)
            switch.arm(error, place, layer, 2)
            with torch.no_grad(), pytest.raises(InjectedError) as caught:
                pipe(*batch()[0], roundpipe_run_config=config)
            assert caught.value is error
            assert len(notes_of(error)) == 1
            assert DROPPED not in notes_of(error)[0]
        pipe.synchronize()
        got = [p.grad for p in pipe.model.parameters() if p.grad is not None]
        assert len(got) == len(want) > 0
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
