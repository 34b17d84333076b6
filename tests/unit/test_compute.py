"""Losses that cannot be differentiated, and recompute that does not repeat its forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import InvalidTypeError, InvalidValueError, StateError

X = torch.ones(4, 2)


@pytest.fixture
def pipe() -> Iterator[RoundPipe]:
    with RoundPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), devices="cpu:1") as opened:
        yield opened


def test_a_loss_must_be_a_scalar(pipe: RoundPipe) -> None:
    with pytest.raises(InvalidValueError, match=r"has shape \(2, 2\); return a scalar"):
        pipe.forward_backward((X,))


def test_a_loss_must_be_a_tensor(pipe: RoundPipe) -> None:
    with pytest.raises(InvalidTypeError, match="the loss function returned a float"):
        pipe.forward_backward((X,), loss_fn=lambda output, _: 1.0)


def test_a_loss_must_depend_on_something(pipe: RoundPipe) -> None:
    with pytest.raises(StateError, match="the loss requires no grad"):
        pipe.forward_backward((X,), loss_fn=lambda output, _: output.detach().sum())


class Fickle(nn.Module):
    """Returns something else every other time, as no layer may."""

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.outputs = outputs  # shared by all replicas

    def forward(self, x: torch.Tensor) -> Any:
        return self.outputs.pop(0)(x * self.factor)


class First(nn.Module):
    def forward(self, state: Any) -> torch.Tensor:
        first: torch.Tensor = state[0] if isinstance(state, tuple) else state
        return first * 1


def run_fickle(*outputs: Any) -> None:
    model = nn.Sequential(Fickle(list(outputs)), First())
    plan = ModelExecutePlan([range(1)], [range(1, 2), range(1)])
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    with RoundPipe(model, model_run_config=config, devices="cpu:1") as opened:
        opened.forward_backward((X,), loss_fn=lambda output, _: output.sum())


def test_recompute_that_returns_another_structure_is_refused() -> None:
    with pytest.raises(StateError, match=r"recompute returned .* the forward before it"):
        run_fickle(lambda x: (x,), lambda x: x)


def test_recompute_that_loses_its_graph_is_refused() -> None:
    with pytest.raises(StateError, match="an output that requires no grad where"):
        run_fickle(lambda x: x, lambda x: x.detach())
