"""Small programs in which one missing wait is a report, whatever the threads do.

What the queue orders is reported in any timing. Where a wait of the host is missing, the copy in
question is late: held back until the host is past the place, or slower than any host.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import DevicePool, open_pool
from roundpipe.devices.accelerator import AcceleratorDevice
from roundpipe.devices.base import Category, Device, Stream
from roundpipe.parameters import ParameterStore
from roundpipe.stage_weights import StageWeights
from roundpipe.transfer import download

from . import DEVICE_TYPE, hold, latency

Scenario = Callable[[], None]

LATE_MS = 200.0  # the host is there within a few
WIDTH = 4


@contextlib.contextmanager
def devices(count: int) -> Iterator[DevicePool]:
    with open_pool([torch.device(DEVICE_TYPE, index) for index in range(count)]) as pool:
        yield pool


def layers(count: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))).to(dtype)


def one_layer_per_stage(count: int, num_microbatch: int = 2) -> RoundPipeRunConfig:
    stages = [range(index, index + 1) for index in range(count)]
    plan = ModelExecutePlan(stages[:-1], stages[::-1])
    return RoundPipeRunConfig(num_microbatch=num_microbatch, execute_plan=plan)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor]:
    return (torch.ones(4, WIDTH, dtype=dtype),)


def sum_loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
    return output.sum()


def training() -> None:
    """Two devices, four stages, two calls."""
    with devices(2) as pool:
        config = one_layer_per_stage(4)
        with RoundPipe(layers(4), devices=pool, model_run_config=config) as pipe:
            for _ in range(2):
                pipe.forward_backward(batch(), loss_fn=sum_loss)


def accumulation() -> None:
    """Gradients of an earlier call come along in another dtype."""
    with devices(1) as pool:
        options: dict[str, Any] = {
            "model_run_config": one_layer_per_stage(2), "accumulate_dtype": torch.float32,
        }  # fmt: skip
        with RoundPipe(layers(2, torch.bfloat16), devices=pool, **options) as pipe:
            for _ in range(2):
                pipe.forward_backward(batch(torch.bfloat16), loss_fn=sum_loss)


class Overwrites(nn.Module):
    """Changes its input in place; then the streams may go on."""

    def __init__(self, go: Callable[[], None]) -> None:
        super().__init__()
        self.go = go

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        self.go()
        return x


def overwriting() -> None:
    """A layer overwrites what is still on its way home from the stage before."""
    with devices(1) as pool, contextlib.ExitStack() as held:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Overwrites(held.close), *layers(1))
        config = one_layer_per_stage(3, num_microbatch=1)
        with RoundPipe(model, devices=pool, model_run_config=config) as pipe:
            held.enter_context(hold(torch_stream(pool.devices[0], Stream.OUTWARD)))
            pipe.forward_backward(batch(), loss_fn=sum_loss)


def evaluation() -> None:
    """The output is used as soon as it is there."""
    with devices(1) as pool, RoundPipe(layers(1), devices=pool) as pipe:
        with latency(copy_ms=LATE_MS), torch.no_grad():
            pipe(*batch()).sum()


class Fails(nn.Module):
    """Raises when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise LookupError("the scenario's fault")


def failing_while_weights_arrive() -> None:
    """The next stage's weights are on their way when a layer fails; then the user changes them."""
    with devices(1) as pool:
        model = nn.Sequential(Fails(), *layers(1))
        config = one_layer_per_stage(2, num_microbatch=1)
        with RoundPipe(model, devices=pool, model_run_config=config) as pipe:
            with latency(copy_ms=LATE_MS):
                with pytest.raises(LookupError):
                    pipe.forward_backward(batch(), loss_fn=sum_loss)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()


def closing() -> None:
    """Memory that a copy still reads is written after the device was closed."""
    with devices(1) as pool:
        device = pool.devices[0]
        host = torch.ones(WIDTH).pin_memory()
        there = device.empty(host, Stream.INWARD, Category.ACTIVATIONS)
        with latency(copy_ms=LATE_MS):
            device.copy(there, host, Stream.INWARD)
            device.close()
            host.zero_()
        del there


def late_gradient(device: Device, model: nn.Module) -> tuple[ParameterStore, nn.Parameter]:
    """A store with one gradient on its way home, and the parameter it is of."""
    (parameter,) = model.parameters()
    store = ParameterStore([model], {id(parameter): "weight"}, None)
    with device.compute_scope():
        made = device.empty(parameter.detach(), Stream.COMPUTE, Category.GRADIENTS)
        made.fill_(1.0)
    store.record(parameter).slot((0, 0)).put(*download(device, made))
    return store, parameter


def single() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def stepping_early() -> None:
    """A step takes a gradient that is not home yet."""
    with devices(1) as pool, latency(copy_ms=LATE_MS):
        store, _ = late_gradient(pool.devices[0], single())
        for _, contributions in store.take_gradients():
            for contribution in contributions:
                contribution.wait().sum()


def showing_early() -> None:
    """The user asks for a gradient that is not home yet."""
    with devices(1) as pool, latency(copy_ms=LATE_MS):
        store, parameter = late_gradient(pool.devices[0], single())
        store.expose_gradients()
        assert parameter.grad is not None


def adding_early() -> None:
    """The user adds a gradient of their own to one that is not home yet."""
    with devices(1) as pool, latency(copy_ms=LATE_MS):
        store, parameter = late_gradient(pool.devices[0], single())
        parameter.grad = torch.ones_like(parameter)
        store.adopt_user_gradients()


def uploading_early() -> None:
    """The next call takes along a gradient that is not home yet."""
    with devices(1) as pool:
        device = pool.devices[0]
        store, _ = late_gradient(device, single())
        weights = StageWeights(device, store, range(1), 0, True, None)
        weights.arrive()
        weights.release()
        device.synchronize()


def publishing_early() -> None:
    """New parameters are published while an upload reads the old ones."""
    with devices(1) as pool, latency(copy_ms=LATE_MS):
        device, model = pool.devices[0], single().requires_grad_(False)
        (parameter,) = model.parameters()
        parameter.data = parameter.data.pin_memory()
        store = ParameterStore([model], {id(parameter): "weight"}, None)
        store.declare_reads([0])
        weights = StageWeights(device, store, range(1), 0, False, None)
        weights.arrive()
        record = store.record(parameter)
        store.wait_unread(record, store.declared_reads())
        parameter.zero_()
        weights.release()


def torch_stream(device: Device, stream: Stream) -> torch.Stream:
    assert isinstance(device, AcceleratorDevice)
    return device.torch_stream(stream)


def reading() -> None:
    """The host reads what a copy fills, after an event behind the copy."""
    with devices(1) as pool, latency(copy_ms=LATE_MS):
        device = pool.devices[0]
        there = device.empty(torch.ones(WIDTH), Stream.OUTWARD, Category.ACTIVATIONS)
        back = device.host_empty(there)
        device.copy(back, there, Stream.OUTWARD)
        device.record(Stream.OUTWARD).synchronize()
        back.sum()
