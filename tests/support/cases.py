"""Small models with numbers that can be worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipeRunConfig

STAGES = [1, 2, 4]


def stage_ranges(num_layers: int, stages: int) -> list[range]:
    """So many stages, as even as can be."""
    edges = [round(i * num_layers / stages) for i in range(stages + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]


def fused_plan(num_layers: int, stages: int) -> ModelExecutePlan:
    """A plan for ``forward_backward``."""
    ranges = stage_ranges(num_layers, stages)
    return ModelExecutePlan(ranges[:-1], ranges[::-1])


def split_plan(num_layers: int, stages: int) -> ModelExecutePlan:
    """A plan for ``forward``, and the user's backward later."""
    ranges = stage_ranges(num_layers, stages)
    return ModelExecutePlan(ranges, ranges[::-1])


def config_of(num_layers: int, stages: int, num_microbatch: int) -> RoundPipeRunConfig:
    """Options for a fused call."""
    return RoundPipeRunConfig(
        num_microbatch=num_microbatch, execute_plan=fused_plan(num_layers, stages)
    )


class Scale(nn.Module):
    """Multiplies by one number."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def grad_of(layer: nn.Module) -> float:
    """The gradient of a layer with one weight."""
    (parameter,) = layer.parameters()
    assert parameter.grad is not None
    return float(parameter.grad.item())


def sum_loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
    """Ends every hand calculation."""
    return output.sum()
