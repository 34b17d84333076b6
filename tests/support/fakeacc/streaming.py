"""A small streaming pipeline with every wait it needs, and a way to leave one out.

Weights live in pinned memory. Each of two devices has two slots for them, which a copy stream
fills while the current stream computes. Layer i runs on device i mod 2. Backward uploads the
weights again, and a third stream brings the gradients home.

    upload     ---[w0]--[w2]--------        waits for a free slot
    compute    ------[x0 w0]--[x2 w2]-      waits for the weight
    download   ------------------[g2]-      waits for the gradient (backward only)
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

Omission = Literal[
    "weight, forward", "free slot", "weight, backward", "gradient", "record_stream", "host"
]
DEVICES = ("fakeacc:0", "fakeacc:1")
SLOTS = 2


@dataclass
class Device:
    """What the pipeline owns on one device."""

    name: str
    width: int
    compute: torch.Stream = field(init=False)
    upload: torch.Stream = field(init=False)
    download: torch.Stream = field(init=False)
    slots: list[torch.Tensor] = field(init=False)
    free: list[torch.Event] = field(init=False)
    next_slot: int = 0

    def __post_init__(self) -> None:
        self.compute = torch.accelerator.current_stream(self.name)
        self.upload, self.download = torch.Stream(self.name), torch.Stream(self.name)
        self.slots = [torch.empty(self.width, self.width, device=self.name) for _ in range(SLOTS)]
        self.free = [self.compute.record_event() for _ in range(SLOTS)]


class StreamingPipeline:
    """`y = tanh(... tanh(tanh(x w0) w1) ...)` and the gradients of sum(y) for all weights."""

    def __init__(self, weights: list[torch.Tensor], omit: Omission | None = None) -> None:
        self.weights = [weight.pin_memory() for weight in weights]
        self.gradients = [torch.empty_like(weight, pin_memory=True) for weight in weights]
        self.omit = omit
        self.devices = [Device(name, weights[0].shape[0]) for name in DEVICES]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Returns sum(y) and all gradients, in one host tensor."""
        inputs, outputs = [], []
        for i in range(len(self.weights)):
            inputs.append(x.to(DEVICES[i % 2]))
            x = self.forward(i, inputs[-1])
            outputs.append(x)
        total = x.sum()
        grad = torch.ones_like(x)
        arrived = []
        for i in reversed(range(len(self.weights))):
            grad, event = self.backward(i, inputs.pop(), outputs.pop(), grad.to(DEVICES[i % 2]))
            arrived.append(event)
        if self.omit != "host":
            for event in arrived:
                event.synchronize()
        return torch.cat([total.reshape(1).cpu(), *(g.flatten() for g in self.gradients)])

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        device = self.devices[layer % 2]
        with device.compute:
            slot = self.fetch(layer, wait=self.omit != "weight, forward")
            y = (x @ device.slots[slot]).tanh()
            device.free[slot].record(device.compute)
        return y

    def backward(
        self, layer: int, x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Event]:
        device = self.devices[layer % 2]
        with device.compute:
            slot = self.fetch(layer, wait=self.omit != "weight, backward")
            grad = grad * (1 - y * y)
            weight_grad = x.t() @ grad
            grad = grad @ device.slots[slot].t()
            device.free[slot].record(device.compute)
            ready = device.compute.record_event()
        if self.omit != "gradient":
            device.download.wait_event(ready)
        with device.download:
            self.gradients[layer].copy_(weight_grad, non_blocking=True)
            arrived = device.download.record_event()
        if self.omit != "record_stream":
            weight_grad.record_stream(device.download)
        return grad, arrived

    def fetch(self, layer: int, wait: bool) -> int:
        """Queues the upload of a weight and makes the compute stream wait for it."""
        device = self.devices[layer % 2]
        slot = device.next_slot
        device.next_slot = (slot + 1) % SLOTS
        with device.upload:
            if self.omit != "free slot":
                device.upload.wait_event(device.free[slot])
            device.slots[slot].copy_(self.weights[layer], non_blocking=True)
            ready = device.upload.record_event()
        if wait:
            device.compute.wait_event(ready)
        return slot


def plain_step(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The same without streams, slots or a second device: everything on the first one."""
    weights = [weight.to(DEVICES[0]).requires_grad_() for weight in weights]
    x = x.to(DEVICES[0])
    for weight in weights:
        x = (x @ weight).tanh()
    total = x.sum()
    total.backward()
    grads = [weight.grad.flatten().cpu() for weight in weights if weight.grad is not None]
    return torch.cat([total.detach().reshape(1).cpu(), *grads])
