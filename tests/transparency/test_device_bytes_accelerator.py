"""Peak memory of an accelerator, byte for byte: what stands in the promise and nothing else.

A device holds the weights of the stage that runs and of the one that is arriving, the gradients of
the stage, and one microbatch's activations. On the fake accelerator the peak depends on the order
of allocations and frees alone, so it is the sum of these, whatever the threads do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from support.backends import Accelerator
from support.cases import sum_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.accelerator.is_available() and Accelerator().is_fake),
        reason="libraries of a real accelerator take memory of their own",
    ),
]

WIDTH, ROWS = 64, 4
WEIGHT_BYTES = 4 * WIDTH * WIDTH
ACTIVATION_BYTES = 4 * WIDTH * ROWS
# In backward of a linear layer: its input, its output, and the gradients of both.
ACTIVATIONS = 4


def peaks(
    count: int, depth: int, num_microbatch: int, grain: str, after_call: Callable[[RoundPipe], None]
) -> list[list[int]]:
    """Each device's peak in two calls, one layer per stage."""
    stages = [range(index, index + 1) for index in range(depth)]
    config = RoundPipeRunConfig(
        num_microbatch=num_microbatch,
        execute_plan=ModelExecutePlan(stages[:-1], stages[::-1]),
        recompute_grain=grain,
    )
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    x = torch.ones(num_microbatch * ROWS, WIDTH)
    found = []
    gc.collect()  # errors of earlier tests, whose frames hold tensors
    with Accelerator().open(count) as pool, Accelerator().late(depth):
        assert [device.memory().allocated_bytes for device in pool.devices] == [0] * count
        with RoundPipe(model, model_run_config=config, devices=pool) as pipe:
            for _ in range(2):
                for device in pool.devices:
                    device.synchronize()
                    device.reset_peak()
                pipe.forward_backward((x,), loss_fn=sum_loss)
                after_call(pipe)
                found.append([device.memory().peak_bytes for device in pool.devices])
        assert [device.memory().allocated_bytes for device in pool.devices] == [0] * count
    return found


def step(pipe: RoundPipe) -> None:
    def drop_gradients() -> None:
        for parameter in pipe.parameters():
            parameter.grad = None

    pipe.step(drop_gradients)


def promised_bytes(count: int, num_microbatch: int, accumulated: bool) -> int:
    """What a device may hold.

    Args:
        count: devices of the pool.
        num_microbatch: microbatches of a call.
        accumulated: whether earlier calls left gradients, which come along with the weights.
    """
    weights = 2  # the running stage's and the arriving one's
    gradients = 1 + accumulated
    if num_microbatch > 1 or accumulated:
        gradients += 1  # the microbatch's own, until it is added to the others'
    activations = ACTIVATIONS
    if count == 1:
        # The next stage runs here, too, and there is room: the other microbatches' stay.
        activations += num_microbatch - 1
    return (weights + gradients) * WEIGHT_BYTES + activations * ACTIVATION_BYTES


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize(("depth", "num_microbatch"), [(6, 1), (6, 3), (20, 2)])
@pytest.mark.parametrize("count", [1, 2])
def test_the_peak_is_the_promised_one_whatever_the_depth(
    count: int, depth: int, num_microbatch: int, grain: str
) -> None:
    want = promised_bytes(count, num_microbatch, accumulated=False)
    found = peaks(count, depth, num_microbatch, grain, step)
    assert found == [[want] * count, [want] * count]


@pytest.mark.parametrize("num_microbatch", [1, 3])
def test_gradients_of_earlier_calls_come_along_with_the_weights(num_microbatch: int) -> None:
    first, second = peaks(2, 6, num_microbatch, "stage", lambda _: None)
    assert first == [promised_bytes(2, num_microbatch, accumulated=False)] * 2
    assert second == [promised_bytes(2, num_microbatch, accumulated=True)] * 2
