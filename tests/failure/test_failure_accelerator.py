"""What only an accelerator can fail with: its own memory, and kernels that run after their call.

Faults that any device can have come from the other files of this folder, which run here, too.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import DevicePool
from support import faults
from support.backends import Accelerator
from support.cases import sum_loss
from support.faults import no_thread_left, notes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.accelerator.is_available() and Accelerator().is_fake),
        reason="limits its memory and breaks its kernels, which only the fake accelerator survives",
    ),
]

ROWS, TOKENS, WIDTH, LAYERS = 8, 12, 64, 6
LAYER_BYTES = 4 * WIDTH * WIDTH
SINGLE = [range(index, index + 1) for index in range(LAYERS)]
STAGES = RoundPipeRunConfig(
    num_microbatch=2, execute_plan=ModelExecutePlan(SINGLE[:-1], SINGLE[::-1])
)


class Enter(nn.Module):
    """An embedding, which an index out of range makes fail when the kernel runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.table(tokens)
        return hidden


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Enter(), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS - 1)))


def tokens() -> torch.Tensor:
    return torch.randint(0, TOKENS, (ROWS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[1, 2])
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    with no_thread_left(), Accelerator().open(request.param) as opened:
        yield opened


def train(pipe: RoundPipe) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One good call: its loss and gradients."""
    loss = pipe.forward_backward((tokens(),), loss_fn=sum_loss)
    pipe.synchronize()
    gradients = [p.grad.clone() for p in pipe.model.parameters() if p.grad is not None]
    pipe.zero_grad()
    return loss, gradients


def assert_as_fresh(pipe: RoundPipe) -> None:
    """The pipe that failed trains as one that never did."""
    loss, gradients = train(pipe)
    with Accelerator().open(2) as pool:
        with RoundPipe(build(), devices=pool, model_run_config=STAGES) as fresh:
            want_loss, want_gradients = train(fresh)
    assert torch.equal(loss, want_loss)
    assert len(gradients) == len(want_gradients) == LAYERS
    assert all(torch.equal(a, b) for a, b in zip(gradients, want_gradients, strict=True))


def assert_advised(error: BaseException) -> None:
    (advice,) = (
        note for note in getattr(error, "__notes__", []) if "to lower what a device" in note
    )
    assert "fakeacc:0 held layers 0..5: 0.1 MiB of weights" in advice


def test_the_devices_own_memory_runs_out(pool: DevicePool) -> None:
    from support import fakeacc

    with RoundPipe(build(), devices=pool, model_run_config=STAGES, name="net") as pipe:
        whole = RoundPipeRunConfig(execute_plan=ModelExecutePlan([], [range(LAYERS)]))
        torch.accelerator.empty_cache()
        # Five layers' weights, the table, and gradients of some of them.
        with fakeacc.memory_limit(0, 8 * LAYER_BYTES):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                pipe.forward_backward((tokens(),), loss_fn=sum_loss, run_config=whole)
            assert "stage 0 (layers 0..5)" in notes_of(caught.value)[0]
            assert "device fakeacc:0" in notes_of(caught.value)[0]
            assert_advised(caught.value)
            # The error is still held here, and does not hold what was on the device.
            assert fakeacc.allocated_bytes(0) == 0
            train(pipe)
        assert_as_fresh(pipe)


@pytest.mark.parametrize("phase", ["training", "by hand", "evaluation"])
@pytest.mark.parametrize("row", [0, ROWS - 1], ids=["first microbatch", "last microbatch"])
def test_a_kernel_that_fails_after_its_call(pool: DevicePool, row: int, phase: str) -> None:
    bad = tokens()
    bad[row] = TOKENS
    plan = ModelExecutePlan(SINGLE, SINGLE[::-1])
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    threads = set(threading.enumerate())
    with RoundPipe(build(), devices=pool, model_run_config=STAGES, name="net") as pipe:

        def call() -> Any:
            if phase == "training":
                return pipe.forward_backward((bad,), loss_fn=sum_loss)
            with torch.set_grad_enabled(phase == "by hand"):
                return pipe(bad, roundpipe_run_config=config)

        with pytest.raises(torch.AcceleratorError, match="index out of range") as caught:
            call()
        assert notes_of(caught.value)[0].startswith("roundpipe: model net, ")
        assert_as_fresh(pipe)
    assert set(threading.enumerate()) == threads


def test_the_failed_kernel_does_not_reach_a_model_beside_it() -> None:
    """Two models share the devices; one fails, the other's numbers are as ever."""
    bad = tokens()
    bad[0] = TOKENS
    with Accelerator().open(2) as pool:
        with (
            RoundPipe(build(), devices=pool, model_run_config=STAGES, name="good") as good,
            RoundPipe(build(), devices=pool, model_run_config=STAGES, name="bad") as failing,
        ):
            train(good)
            with pytest.raises(torch.AcceleratorError, match="index out of range"):
                failing.forward_backward((bad,), loss_fn=sum_loss)
            assert_as_fresh(good)
            assert_as_fresh(failing)


@pytest.mark.parametrize("place", ["loss", "recompute", "backward"])
def test_a_failure_that_is_forgotten_leaves_nothing_on_the_devices(place: str) -> None:
    """The traceback holds the graph; nothing that Python cannot collect holds the traceback."""
    from support import fakeacc

    gc.collect()
    with Accelerator().open(2) as pool:
        before = [fakeacc.allocated_bytes(device.index) for device in pool.devices]
        switch = faults.Switch()
        layers = faults.build(switch)
        with RoundPipe(layers, devices=pool, model_run_config=faults.CONFIG) as pipe:
            inputs, label = faults.batch()
            layer = None if place == "loss" else 1
            switch.arm(faults.InjectedError(place), place, layer, 2)
            with pytest.raises(faults.InjectedError):
                pipe.forward_backward(inputs, None, label, faults.loss_of(switch))
            switch.disarm()
        pool.devices[0].synchronize()
        gc.collect()
        after = [fakeacc.allocated_bytes(device.index) for device in pool.devices]
    assert after == before
