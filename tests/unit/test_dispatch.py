"""Dealing stages to devices, and runs that cannot begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe
from support.faults import no_thread_left


def sum_loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_closed_model_says_so_and_waits_for_nobody(devices: str) -> None:
    with no_thread_left():
        pipe = RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices=devices)
        pipe.forward_backward((torch.ones(4, 2),), loss_fn=sum_loss)
        pipe.close()
        pipe.close()
        with pytest.raises(RuntimeError, match="the devices were closed; make a new RoundPipe"):
            pipe(torch.ones(4, 2))
        with pytest.raises(RuntimeError, match="the devices were closed; make a new RoundPipe"):
            pipe.forward_backward((torch.ones(4, 2),), loss_fn=sum_loss)
        pipe.synchronize()
