"""What is on a device at once depends on the largest stages, not on the model's depth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import CheckedPool, CpuChecks, open_cpu_pool
from roundpipe.devices.base import Category, MemoryReport

WIDTH = 64
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


class Block(nn.Module):
    """A layer that makes a few temporaries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def train(pool: CheckedPool, depth: int, grain: str) -> list[MemoryReport]:
    """Two iterations, one layer per stage; each device's memory afterwards."""
    torch.manual_seed(0)
    stages = [range(i, i + 1) for i in range(depth)]
    config = RoundPipeRunConfig(
        num_microbatch=2,
        execute_plan=ModelExecutePlan(stages[:-1], stages[::-1]),
        recompute_grain=grain,
    )
    model = nn.Sequential(*(Block() for _ in range(depth)))
    x = torch.randn(8, WIDTH)
    for device in pool.devices:
        device.reset_peak()
    with RoundPipe(model, model_run_config=config, devices=pool) as pipe:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            pipe.forward_backward((x,), loss_fn=lambda output, _: output.square().sum())
            pipe.step(step)
    return [device.memory() for device in pool.devices]


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("count", [1, 2])
def test_four_times_the_layers_need_no_more_device_memory(count: int, grain: str) -> None:
    with open_cpu_pool(count, CpuChecks()) as pool:
        shallow = train(pool, 8, grain)
        deep = train(pool, 32, grain)
        assert pool.reports() == []
    for before, after in zip(shallow, deep, strict=True):
        assert before.peak_bytes > LAYER_BYTES
        assert after.peak_bytes <= 1.02 * before.peak_bytes


@pytest.mark.parametrize("count", [1, 2])
def test_at_most_two_stages_weights_are_on_a_device(count: int) -> None:
    with open_cpu_pool(count, CpuChecks()) as pool:
        reports = train(pool, 8, "stage")
    for report in reports:
        assert report.peak_by_category[Category.WEIGHTS] == 2 * LAYER_BYTES
        assert report.by_category[Category.WEIGHTS] == 0


def test_nothing_stays_on_a_device_between_calls() -> None:
    with open_cpu_pool(2, CpuChecks()) as pool:
        reports = train(pool, 6, "stage")
    assert [report.allocated_bytes for report in reports] == [0, 0]
