"""The matrix on a real accelerator, held against the plain loop on the CPU.

Kernels of an accelerator sum in another order, so equality is to a tolerance, relative to each
tensor's largest element: fp32 with products in full precision.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from roundpipe import RoundPipeRunConfig
from roundpipe.devices import open_pool
from support.plain import assert_same, plans, train_plain, train_roundpipe
from support.subjects import SUBJECTS

TOLERANCE = 2e-3  # after three optimizer steps, whose first is about sign(gradient)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="no accelerator on this machine"
    ),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("logical_devices", [1, 2, 3])
@pytest.mark.parametrize("name", SUBJECTS)
def test_an_accelerator_trains_as_the_cpu_does(
    name: str, logical_devices: int, is_async: bool
) -> None:
    subject = SUBJECTS[name]
    torch.set_float32_matmul_precision("highest")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    want = train_plain(subject, 3, is_async, steps=3)
    with open_pool([torch.device(accelerator.type, 0)] * logical_devices) as pool:
        for plan, grain in itertools.product(plans(5).values(), ("stage", "layer")):
            config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan, recompute_grain=grain)
            got = train_roundpipe(subject, pool, config, is_async, steps=3)
            assert_same(got, want, TOLERANCE)
