"""Out of device memory: the error keeps its type, and says what was held and what to lower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import CpuChecks
from support.faults import (
    CONFIG,
    Switch,
    batch,
    build,
    loss_of,
    no_thread_left,
    notes_of,
    train_once,
    watched_pool,
)

ADVICE = [
    "a larger num_microbatch",
    'recompute_grain="layer"',
    "a plan with smaller stages",
    "a smaller batch",
]


def assert_advised(error: BaseException) -> str:
    """The note with the advice, its points in order."""
    (advice,) = (
        note
        for note in getattr(error, "__notes__", [])
        if "to lower what a device must hold" in note
    )
    places = [advice.find(point) for point in ADVICE]
    assert places == sorted(places)
    assert places[0] > 0
    return str(advice)


@pytest.mark.parametrize("place", ["forward", "recompute", "backward"])
def test_a_layer_that_runs_out_of_memory(place: str) -> None:
    switch = Switch()
    with no_thread_left(), watched_pool() as pool:
        with RoundPipe(build(switch), model_run_config=CONFIG, devices=pool, name="net") as pipe:
            error = torch.OutOfMemoryError("no room for 8 GiB")
            switch.arm(error, place, 1, 2)
            inputs, label = batch()
            with pytest.raises(torch.OutOfMemoryError, match="no room for 8 GiB") as caught:
                pipe.forward_backward(inputs, None, label, loss_of(switch))
            assert caught.value is error
            assert f"layer 1 (Block), stage {0 if place == 'forward' else 4} " in notes_of(error)[0]
            assert "layers 0..1: 0.0 MiB of weights" in assert_advised(error)
            switch.disarm()
            train_once(pipe, switch)


def test_the_devices_own_limit_and_a_plan_that_stays_below_it() -> None:
    def sum_loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
        return output.sum()

    width = 64
    layer_bytes = 4 * width * width
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
    x = torch.randn(4, width)
    plain = model(x).sum()
    with no_thread_left(), watched_pool(2, CpuChecks(limit_bytes=7 * layer_bytes)) as pool:
        with RoundPipe(model, devices=pool, name="net") as pipe:
            # Six layers' weights and their gradients are twelve layers' bytes.
            whole = RoundPipeRunConfig(execute_plan=ModelExecutePlan([], [range(6)]))
            with pytest.raises(torch.OutOfMemoryError, match="cpu:0 is out of memory") as caught:
                pipe.forward_backward((x,), loss_fn=sum_loss, run_config=whole)
            assert "stage 0 (layers 0..5)" in notes_of(caught.value)[0]
            assert "layers 0..5: 0.1 MiB of weights" in assert_advised(caught.value)
            # The error is still held here, and does not hold what was on the device.
            single = [range(index, index + 1) for index in range(6)]
            plan = ModelExecutePlan(single[:-1], single[::-1])
            loss = pipe.forward_backward(
                (x,), loss_fn=sum_loss, run_config=RoundPipeRunConfig(execute_plan=plan)
            )
            torch.testing.assert_close(loss, plain.detach())
