"""Every wait of the accelerator back end has teeth: left out, the checker reports it."""

from __future__ import annotations

import pytest
import torch

from support.backends import Accelerator
from support.fakeacc.teeth import TEETH, bites

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.accelerator.is_available() and Accelerator().is_fake),
        reason="only the fake accelerator can tell that a wait is missing",
    ),
]


@pytest.mark.parametrize("name", [name for name, tooth in TEETH.items() if tooth.scenario])
def test_a_wait_that_is_left_out_is_reported(name: str) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("two devices take part")
    assert bites(name)
