"""Packed data: two models in a row are one model, and gradients flow back through both."""

from __future__ import annotations

import pytest
import torch

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import DevicePool, open_cpu_pool
from roundpipe.errors import InvalidValueError
from roundpipe.microbatch import RoundPipePackedData
from support.subjects import SUBJECTS

PACKED = RoundPipeRunConfig(num_microbatch=3, merge_output=False)


def two_halves(pool: DevicePool, model: torch.nn.Sequential) -> tuple[RoundPipe, RoundPipe]:
    front = RoundPipe(model[:2], devices=pool, name="front")
    config = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(3)], [range(2, 3), range(2)]))
    return front, RoundPipe(model[2:], devices=pool, name="back", model_run_config=config)


def test_two_chained_models_equal_one() -> None:
    subject = SUBJECTS["mlp"]
    (x,) = subject.batch(0).args
    whole, cut = subject.build(), subject.build()
    with open_cpu_pool(2) as pool:
        one = RoundPipe(whole, devices=pool, name="one")
        front, back = two_halves(pool, cut)
        want_x, got_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        want = one(want_x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
        packed = front(got_x, roundpipe_run_config=PACKED)
        assert isinstance(packed, RoundPipePackedData)
        assert len(packed) == 3
        got = back(packed)
        assert torch.equal(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        for pipe in (one, front, back):
            pipe.synchronize()
        assert want_x.grad is not None
        assert got_x.grad is not None
        assert torch.equal(got_x.grad, want_x.grad)
        for mine, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)


def test_packed_data_wants_its_own_number_of_microbatches() -> None:
    subject = SUBJECTS["mlp"]
    (x,) = subject.batch(0).args
    with open_cpu_pool(1) as pool:
        front, back = two_halves(pool, subject.build())
        with torch.no_grad():
            packed = front(x, roundpipe_run_config=PACKED)
            assert back(packed).shape == (12, 3)
            with pytest.raises(InvalidValueError, match="3") as caught:
                back(packed, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
        assert "2" in str(caught.value)
