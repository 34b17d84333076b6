"""Autograd over streams and devices: torch's engine orders everything, and the checker agrees."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support import fakeacc


class TwoDevices(torch.nn.Module):
    """A model cut into two halves, one per device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU())
        self.second = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 6))
        self.dropout = torch.nn.Dropout(0.25)

    def spread(self, first: str, second: str) -> "TwoDevices":
        self.devices = (first, second)
        self.first.to(first)
        self.second.to(second)
        return self

    def forward(self, x: torch.Tensor, recompute: str = "nothing") -> torch.Tensor:
        x = x.to(self.devices[0])
        if recompute == "nothing":
            x = self.run_part(self.first, x)
        else:
            x = checkpoint(self.run_part, self.first, x, use_reentrant=recompute == "reentrant")
        return self.run_part(self.second, x.to(self.devices[1]))

    def run_part(self, part: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(part(x))
        return dropped


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def run(first: str, second: str, recompute: str = "nothing") -> list[torch.Tensor]:
    model = TwoDevices().spread(first, second)
    torch.manual_seed(5)
    x = torch.randn(4, 6).to(first).requires_grad_()
    for device in (0, 1):
        torch.get_device_module("fakeacc").set_rng_state(
            torch.Generator("fakeacc:0").manual_seed(device).get_state(), f"fakeacc:{device}"
        )
    model(x, recompute).square().sum().backward()
    assert x.grad is not None
    return [*gradients(model), x.grad.cpu()]


@pytest.mark.parametrize("recompute", ["nothing", "reentrant", "not reentrant"])
def test_latencies_change_no_bit_on_two_devices(recompute: str) -> None:
    expected = run("fakeacc:0", "fakeacc:1")
    for seed in range(3):
        with fakeacc.latency(jitter_ms=0.5, seed=seed):
            found = run("fakeacc:0", "fakeacc:1", recompute)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_backward_runs_a_node_on_its_forward_stream() -> None:
    stream = torch.Stream("fakeacc:0")
    seen: list[torch.Stream] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(torch.accelerator.current_stream("fakeacc:0"))
            return grads[0] * 1

    x = torch.ones(3, device="fakeacc:0", requires_grad=True)
    stream.wait_stream(torch.accelerator.current_stream("fakeacc:0"))
    with stream:
        y: torch.Tensor = Look.apply(x)
        loss = y.sum()
        loss.backward()
    torch.accelerator.current_stream("fakeacc:0").wait_stream(stream)
    assert seen == [stream]
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 3


def test_gradients_of_two_streams_are_joined() -> None:
    one, two = torch.Stream("fakeacc:0"), torch.Stream("fakeacc:0")
    main = torch.accelerator.current_stream("fakeacc:0")
    x = torch.ones(1000, device="fakeacc:0", requires_grad=True)
    parts = []
    with fakeacc.latency(kernel_ms=2.0):
        y = x * 1  # on the main stream, where both gradients meet
        for factor, stream in ((2.0, one), (3.0, two)):
            stream.wait_stream(main)
            with stream:
                parts.append((y * factor).sum())
            main.wait_stream(stream)
        torch.stack(parts).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0] * 1000


def test_hooks_see_ordered_gradients_and_may_change_them() -> None:
    x = torch.ones(4, device="fakeacc:1", requires_grad=True)
    after: list[float] = []
    x.register_hook(lambda grad: grad * 2)
    x.register_post_accumulate_grad_hook(
        lambda p: after.append(p.grad.sum().item() if p.grad is not None else -1.0)
    )
    (x.to("fakeacc:0") * 3).sum().backward()
    assert after == [24.0]


def test_saved_tensors_may_wait_on_the_host() -> None:
    x = torch.randn(5, 5, device="fakeacc:0", requires_grad=True)
    (plain,) = torch.autograd.grad((x @ x).tanh().sum(), x)
    for pin_memory in (False, True):
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            loss = (x @ x).tanh().sum()
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad.cpu(), plain.cpu())


def test_an_exception_in_backward_reaches_the_caller() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            raise KeyError("planted")

    x = torch.ones(3, device="fakeacc:1", requires_grad=True)
    y: torch.Tensor = Fails.apply(x)
    with pytest.raises(KeyError, match="planted"):
        y.sum().backward()
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_functional_transforms() -> None:
    x = torch.arange(3.0, device="fakeacc:0")
    assert torch.func.grad(lambda t: (t**3).sum())(x).tolist() == [0.0, 3.0, 12.0]
    assert torch.vmap(lambda t: t * 2)(x).tolist() == [0.0, 2.0, 4.0]
    layer = torch.nn.Linear(3, 1, bias=False)
    weight = {"weight": torch.ones(1, 3, device="fakeacc:0")}
    assert torch.func.functional_call(layer, weight, (x,)).item() == 3.0
