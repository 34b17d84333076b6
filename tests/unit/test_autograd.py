"""The bridge from torch's backward to a pipelined one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig


def make() -> RoundPipe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    return RoundPipe(model, devices="cpu:2", model_run_config=RoundPipeRunConfig(num_microbatch=2))


def test_a_second_backward_needs_a_retained_graph() -> None:
    with make() as pipe:
        loss = pipe(torch.ones(4, 2)).sum()
        loss.backward()
        with pytest.raises(
            RuntimeError, match="backward was run a second time through a roundpipe"
        ):
            loss.backward()
        loss = pipe(torch.ones(4, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()


def test_an_input_modified_in_place_before_backward_is_refused() -> None:
    with make() as pipe:
        x = torch.ones(4, 2, requires_grad=True)
        y = x * 1.0
        loss = pipe(y).sum()
        with torch.no_grad():
            y.add_(1.0)
        with pytest.raises(RuntimeError, match="an input of a roundpipe forward was modified in"):
            loss.backward()


def test_gradients_flow_into_what_came_before_and_from_what_comes_after() -> None:
    with make() as pipe:
        x = torch.linspace(-1, 1, 8).view(4, 2).requires_grad_()
        (pipe(x * 2.0) * 3.0).sum().backward()
        got = x.grad
        x.grad = None
        (pipe.model(x * 2.0) * 3.0).sum().backward()
        assert got is not None
        torch.testing.assert_close(got, x.grad)


def test_outputs_that_nobody_uses_and_inputs_that_nobody_reaches_have_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.weight, y * 2.0

    with RoundPipe(nn.Sequential(Two()), devices="cpu:2") as pipe:
        x, y = (torch.ones(4, 2, requires_grad=True) for _ in range(2))
        first, _ = pipe(x, y)
        first.sum().backward()
        assert x.grad is not None
        assert y.grad is None
