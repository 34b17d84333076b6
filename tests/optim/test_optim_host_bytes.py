"""Host memory of training: 16 bytes for each trained parameter of a 16-bit model with Adam."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, optim
from roundpipe.compat import grad_dtype_is_settable
from support.backends import run_on
from support.faults import KINDS, open_kind, watched_pool

SIZE = 64
TRAINED, FROZEN = 3 * SIZE * SIZE, SIZE * SIZE
SINGLE = [range(i, i + 1) for i in range(4)]
CONFIG = RoundPipeRunConfig(
    num_microbatch=2, execute_plan=ModelExecutePlan(SINGLE[:-1], SINGLE[::-1])
)

pytestmark = pytest.mark.skipif(
    not grad_dtype_is_settable(), reason="this torch cannot hold a 16-bit gradient of a float32"
)


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))).to(dtype)
    model[1].requires_grad_(False)
    return model


def parts(pipe: RoundPipe, optimizer: torch.optim.Optimizer) -> Iterator[Tensor | None]:
    """Everything that roundpipe and the optimizer hold, as long as it is a tensor."""
    for record in pipe._engine.store.records():
        yield from (record.parameter, record.parameter.grad, record.master)
        if record.master is not None:
            yield record.master.grad
        for slot in record.slots.values():
            yield from (slot.content, slot.buffer)
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def host_bytes(pipe: RoundPipe, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all parts, and of all other tensors of a parameter's size that are alive."""
    pool = pipe._engine.pool
    for index in range(len(pool.devices)):
        run_on(pool, index, lambda: None).result()  # idle: what devices held is gone
    everything = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.is_cpu]
    everything += [part for part in parts(pipe, optimizer) if part is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in everything}
    return sum(nbytes for nbytes in storages.values() if nbytes >= 2 * SIZE * SIZE)


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Devices whose memory is the host's, and devices with memory of their own."""
    with open_kind(request.param) as opened:
        yield opened


Submit = Callable[[RoundPipe, torch.optim.Optimizer, Callable[[], None]], None]


def by_function(
    pipe: RoundPipe, optimizer: torch.optim.Optimizer, look: Callable[[], None]
) -> None:
    def step() -> None:
        look()
        optimizer.step()
        look()
        optimizer.zero_grad()

    pipe.step(step, is_async=False)


def by_layer(pipe: RoundPipe, optimizer: torch.optim.Optimizer, look: Callable[[], None]) -> None:
    pipe.step(optimizer)
    pipe.synchronize()


def measure(pool: Any, submit: Submit, make: Any, dtype: torch.dtype) -> list[int]:
    """Bytes at every moment of two iterations at which nothing is computed."""
    gc.collect()
    model, seen = build(dtype), list[int]()
    with RoundPipe(model, torch.float32, devices=pool, model_run_config=CONFIG) as pipe:
        optimizer = make(pipe.optim_parameters())

        def look() -> None:
            seen.append(host_bytes(pipe, optimizer))

        for _ in range(2):
            x = torch.ones(4, SIZE, dtype=dtype)
            pipe.forward_backward((x,), loss_fn=lambda out, label: out.float().sum())
            look()
            submit(pipe, optimizer, look)
            look()
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("submit", [by_function, by_layer])
def test_16_bytes_for_each_trained_parameter_and_2_for_each_frozen(
    submit: Submit, dtype: torch.dtype, pool: Any
) -> None:
    seen = measure(pool, submit, optim.AdamW, dtype)
    assert max(seen) == 16 * TRAINED + 2 * FROZEN


def test_12_bytes_with_16_bit_moments(pool: Any) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return optim.AdamW(params, moment_dtype=torch.bfloat16)

    seen = measure(pool, by_function, make, torch.bfloat16)
    assert max(seen) == 12 * TRAINED + 2 * FROZEN


def test_what_other_optimizers_cost(pool: Any) -> None:
    """torch's read float32 gradients: all at once in a step function, one layer's otherwise."""
    whole = max(measure(pool, by_function, torch.optim.AdamW, torch.bfloat16))
    # Gradients in buffers of their own stay in them beside the float32 ones.
    buffers = 0 if pool.devices[0].shares_host_memory else 2
    assert whole == (18 + buffers) * TRAINED + 2 * FROZEN
    assert max(measure(pool, by_layer, torch.optim.AdamW, torch.bfloat16)) < whole


def test_a_gradient_that_somebody_keeps_is_not_overwritten() -> None:
    """Lent gradients lie in buffers that the next call writes; unless somebody still has one."""
    kept: list[Tensor] = []
    copies: list[Tensor] = []
    model = build(torch.bfloat16)
    with watched_pool(2) as pool:
        with RoundPipe(model, torch.float32, devices=pool, model_run_config=CONFIG) as pipe:
            masters = list(pipe.optim_parameters())
            optimizer = optim.SGD(masters, lr=0.0)

            def step() -> None:
                kept.extend(p.grad[0] for p in masters if p.grad is not None)
                copies.extend(p.grad[0].clone() for p in masters if p.grad is not None)
                optimizer.step()
                optimizer.zero_grad()

            for scale in (1.0, 3.0, 5.0):
                x = torch.full((4, SIZE), scale, dtype=torch.bfloat16)
                pipe.forward_backward((x,), loss_fn=lambda out, label: out.float().sum())
                pipe.step(step, is_async=False)
    assert len(kept) == 9
    assert not torch.equal(copies[0], copies[3])
    for mine, copy in zip(kept, copies, strict=True):
        assert torch.equal(mine, copy)


def test_gradients_that_are_not_zeroed_add_up_in_float32() -> None:
    model = build(torch.bfloat16)
    with watched_pool(2) as pool:
        with RoundPipe(model, torch.float32, devices=pool, model_run_config=CONFIG) as pipe:
            masters = list(pipe.optim_parameters())
            optimizer = optim.SGD(masters, lr=0.0)
            x = torch.ones(4, SIZE, dtype=torch.bfloat16)
            for _ in range(3):
                pipe.forward_backward((x,), loss_fn=lambda out, label: out.float().sum())
                pipe.step(optimizer.step, is_async=False)
            summed = [p.grad for p in masters if p.grad is not None]
            assert [grad.dtype for grad in summed] == [torch.float32] * 3
            single = [grad / 3 for grad in summed]
            optimizer.zero_grad()
            pipe.forward_backward((x,), loss_fn=lambda out, label: out.float().sum())
            pipe.step(optimizer.step, is_async=False)
            for master, want in zip(masters, single, strict=True):
                assert master.grad is not None
                assert master.grad.dtype is torch.bfloat16
                assert torch.equal(master.grad.float(), want)
