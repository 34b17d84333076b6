"""A stage's weights on a device: what arrives, what is accumulated, what goes home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import InvalidValueError
from support.faults import watched_pool


def sum_loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize("accumulate_dtype", [None, torch.float32])
def test_what_earlier_calls_accumulated_is_added_to_in_the_right_order(
    accumulate_dtype: torch.dtype | None,
) -> None:
    # It comes to the device on the weights stream, is added to (or converted) by compute, and is
    # dropped: the pool reports if that memory could go to an upload too early.
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    x = torch.ones(4, 2, dtype=torch.bfloat16)
    want = model[1](model[0](x)).sum()
    want.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    with watched_pool() as pool:
        with RoundPipe(model, devices=pool, accumulate_dtype=accumulate_dtype) as pipe:
            for _ in range(4):
                pipe.forward_backward((x,), loss_fn=sum_loss)
            pipe.synchronize()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, 4 * gradient, rtol=0.02, atol=0.02)


class Weight(nn.Module):
    """Its gradient is the sum of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


@pytest.mark.parametrize(("accumulate_dtype", "gradient"), [(None, 256.0), (torch.float32, 300.0)])
def test_many_microbatches_cost_no_precision_if_they_accumulate_in_fp32(
    accumulate_dtype: torch.dtype | None, gradient: float
) -> None:
    # In bfloat16, as in a plain loop, 256 + 1 is 256.
    config = RoundPipeRunConfig(num_microbatch=300)
    with RoundPipe(
        Weight(), model_run_config=config, devices="cpu:1", accumulate_dtype=accumulate_dtype
    ) as pipe:
        pipe.forward_backward((torch.ones(300, 1, dtype=torch.bfloat16),), loss_fn=sum_loss)
        pipe.synchronize()
        assert pipe.model.w.grad.item() == gradient


def test_accumulating_in_another_dtype_needs_a_torch_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roundpipe.pipeline.grad_dtype_is_settable", lambda: False)
    with pytest.raises(InvalidValueError, match=r"needs Tensor\.grad_dtype, which torch"):
        RoundPipe(Weight(), devices="cpu:1", accumulate_dtype=torch.float32)
