"""When a call's changes to buffers reach the user's model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig

ONE = RoundPipeRunConfig(num_microbatch=1)


def test_backward_of_an_earlier_forward_leaves_the_statistics_of_a_later_one() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    plain = copy.deepcopy(model)
    first, second = torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [9.0]])
    with RoundPipe(model, devices="cpu:2", model_run_config=ONE) as pipe:
        losses = [pipe(x).square().sum() for x in (first, second)]
        for x in (first, second):
            plain(x)
        for loss in losses:
            loss.backward()
        pipe.synchronize()
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_buffers_that_change_shape_or_dtype_replace_the_old_ones() -> None:
    class Growing(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x.detach().flatten()])
            return x * self.weight

    layer = Growing()
    with RoundPipe(nn.Sequential(layer), devices="cpu:2") as pipe:
        pipe.forward_backward((torch.arange(6.0).view(6, 1),), loss_fn=lambda out, _: out.sum())
    assert layer.seen.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_buffer_shared_by_two_layers_that_both_change_it_is_refused() -> None:
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    second.running_mean = first.running_mean
    with RoundPipe(nn.Sequential(first, second), devices="cpu:2") as pipe:
        with pytest.raises(
            RuntimeError,
            match=r"buffer 'running_mean' of BatchNorm1d is shared by layers 0 and 1, and layer 0 "
            r"changes it, which the others would not see; give each layer its own",
        ):
            pipe.forward_backward((torch.randn(8, 2),), loss_fn=lambda out, _: out.sum())
