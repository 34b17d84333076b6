"""Autocast follows torch's own lists on this device."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_get_the_dtype_of_their_list(dtype: torch.dtype) -> None:
    x = torch.randn(4, 4, device="fakeacc:0")
    with torch.autocast("fakeacc", dtype=dtype):
        assert (x @ x).dtype == dtype
        assert torch.nn.functional.linear(x, x).dtype == dtype
        assert x.to(dtype).exp().dtype == torch.float32
        assert x.to(dtype).softmax(-1).dtype == torch.float32
        assert x.to(dtype).norm().dtype == torch.float32
        assert torch.addcmul(x, x.to(dtype), x).dtype == torch.float32
        assert (x + x).dtype == torch.float32
        with torch.autocast("fakeacc", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_values_are_those_of_explicit_casts() -> None:
    x = torch.randn(4, 4, device="fakeacc:1")
    with torch.autocast("fakeacc", dtype=torch.bfloat16):
        found = x @ x
    assert torch.equal(found, x.bfloat16() @ x.bfloat16())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_under_the_same_autocast(reentrant: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).to("fakeacc:0")
    x = torch.randn(4, 8, device="fakeacc:0", requires_grad=True)

    def part(t: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(t).relu()
        return result

    grads = []
    for recompute in (False, True):
        layer.zero_grad()
        with torch.autocast("fakeacc", dtype=torch.bfloat16):
            y = checkpoint(part, x, use_reentrant=reentrant) if recompute else part(x)
            assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.clone())
    assert torch.equal(grads[0], grads[1])


def test_a_grad_scaler_skips_a_step_with_inf() -> None:
    layer = torch.nn.Linear(2, 1, bias=False).to("fakeacc:0")
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("fakeacc", init_scale=4.0)
    scaler.scale(layer(torch.full((1, 2), float("inf"), device="fakeacc:0")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight.detach(), before)
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(layer(torch.ones(1, 2, device="fakeacc:0")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight.detach(), before - 1)
