"""What layers and their users do with autograd, as in a plain loop or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from support.cases import STAGES, Scale, config_of, grad_of, split_plan, sum_loss

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


def square_sum(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).sum()


def assert_equal(*layers: nn.Module) -> None:
    """Bitwise equal to a plain loop, in three plans and both grains."""
    model = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))
    counts = (2, 3)
    report = roundpipe.verify(model, X, torch.zeros(6, 4), square_sum, num_microbatches=counts)
    assert report.ok, str(report)
    assert len(report.compared) == 3 * len(counts)


class Fork(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x, x.argmax(1), x > 0, x.sum(1, keepdim=True)


class Middle(nn.Linear):
    def forward(self, state: Any) -> Any:
        h, *others = state
        return (super().forward(h), *others)


class Join(nn.Linear):
    """Leaves one output unused."""

    def forward(self, state: Any) -> torch.Tensor:
        h, x, ids, mask, _unused = state
        result: torch.Tensor = super().forward(h) * mask + x * ids[:, None]
        return result


def test_tensors_passed_through_used_by_several_stages_and_not_at_all() -> None:
    torch.manual_seed(0)
    assert_equal(Fork(4, 4), Middle(4, 4), Middle(4, 4), Join(4, 4))


class ReturnsItsWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.bias


class UsesWeight(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        h, bias = pair
        result: torch.Tensor = h * bias
        return result


def test_a_parameter_returned_as_an_output() -> None:
    torch.manual_seed(0)
    assert_equal(ReturnsItsWeight(4, 4), UsesWeight())


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = 3 * x**2 * grad
        return result


class Cube(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cubed: torch.Tensor = _Cube.apply(super().forward(x))
        return cubed


class HooksItsOutput(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1, 1))
        return y


class Normed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach()).relu_()


def test_custom_functions_hooks_on_tensors_and_detached_inputs() -> None:
    torch.manual_seed(0)
    assert_equal(Cube(4, 4), HooksItsOutput(4, 4))
    assert_equal(Normed(4, 4))


class CheckpointedDropout(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(x), 0.4)


def test_a_checkpoint_with_dropout_inside_a_layer() -> None:
    torch.manual_seed(0)
    assert_equal(CheckpointedDropout(4, 4), nn.Dropout(0.3), CheckpointedDropout(4, 4))


class NoisyLoss:
    """A loss function that draws random numbers."""

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output - label + 0.1 * torch.randn_like(output)) ** 2).sum()


def test_a_loss_function_that_draws_random_numbers_is_repeatable() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    losses = []
    with RoundPipe(model, devices="cpu:2") as pipe:
        for _ in range(3):
            torch.manual_seed(1)
            losses.append(pipe.forward_backward((X,), label=X, loss_fn=NoisyLoss()).item())
    assert len(set(losses)) == 1


# --- hooks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("stages", STAGES)
def test_how_often_hooks_of_modules_fire(stages: int, grain: str) -> None:
    counts = {"pre": 0, "forward": 0, "backward": 0}

    def count(name: str) -> Any:
        def hook(*_args: Any) -> None:
            counts[name] += 1

        return hook

    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(count("pre"))
    layer.register_forward_hook(count("forward"))
    layer.register_full_backward_hook(count("backward"))
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Linear(4, 4))
    for calls in (1, 2):
        config = RoundPipeRunConfig(
            num_microbatch=3, recompute_grain=grain,
            execute_plan=config_of(4, stages, 3).execute_plan,
        )  # fmt: skip
        with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
            pipe.forward_backward((X,), loss_fn=sum_loss)
        recomputed = stages > 1  # then the layer is in front of the fused stage
        forwards = 3 * (2 if recomputed else 1)
        assert counts == {
            "pre": forwards * calls, "forward": forwards * calls, "backward": 3 * calls,
        }  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2])
def test_hooks_on_a_parameters_gradient_fire_once_a_microbatch(stages: int) -> None:
    layer = Scale(2.0)
    seen: list[float] = []

    def halve(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.item())
        return grad / 2

    handle = layer.weight.register_hook(halve)
    model = nn.Sequential(layer, nn.Identity())
    config = config_of(2, stages, 3)
    x = torch.tensor([1.0, 2.0, 3.0])
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        pipe.forward_backward((x,), loss_fn=sum_loss)
        pipe.synchronize()
        assert (seen, grad_of(layer)) == ([1.0, 2.0, 3.0], 3.0)
        handle.remove()
        pipe.zero_grad()
        pipe.forward_backward((x,), loss_fn=sum_loss)
        pipe.synchronize()
    assert (len(seen), grad_of(layer)) == (3, 6.0)


def test_a_hook_for_after_accumulation_is_refused() -> None:
    layer = Scale()
    layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    with RoundPipe(nn.Sequential(layer), devices="cpu:1") as pipe:
        with pytest.raises(RuntimeError, match=r"'0.weight' has a hook for after its gradient was"):
            pipe.forward_backward((torch.ones(4),), loss_fn=sum_loss)


# --- a backward that the user drives --------------------------------------------------------------


def driven(layers: list[nn.Module], x: torch.Tensor) -> tuple[RoundPipe, torch.Tensor]:
    pipe = RoundPipe(nn.Sequential(*layers), devices="cpu:2")
    plan = split_plan(len(layers), 2)
    options = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    return pipe, pipe(x, roundpipe_run_config=options).square().sum()


def test_autograd_grad_for_an_input_leaves_the_parameters_alone() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    layers = [Scale(2.0), Scale(3.0)]
    pipe, loss = driven([*layers], x)
    with pipe:
        (gradient,) = torch.autograd.grad(loss, x)
        pipe.synchronize()
    assert gradient.tolist() == [72.0, 144.0]
    assert x.grad is None
    assert [layer.weight.grad for layer in layers] == [None, None]


def test_backward_for_an_input_leaves_the_parameters_alone_and_everything_later_not() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    layers = [Scale(2.0), Scale(3.0)]
    pipe, loss = driven([*layers], x)
    with pipe:
        loss.backward(inputs=[x], retain_graph=True)
        pipe.synchronize()
        assert x.grad is not None
        assert x.grad.tolist() == [72.0, 144.0]
        assert layers[0].weight.grad is None
        loss.backward()
        pipe.synchronize()
    assert x.grad.tolist() == [144.0, 288.0]
    assert [grad_of(layer) for layer in layers] == [180.0, 120.0]


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_a_gradient_of_one_parameter_alone_is_refused(how: str) -> None:
    layer = Scale(2.0)
    pipe, loss = driven([layer, Scale(3.0)], torch.tensor([1.0, 2.0]))

    def ask() -> None:
        if how == "grad":
            torch.autograd.grad(loss, layer.weight)
        else:
            loss.backward(inputs=[layer.weight])

    with pipe, pytest.raises(RuntimeError, match="was called for a parameter of a roundpipe model"):
        ask()


def test_a_second_derivative_through_the_pipeline_is_refused() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    pipe, loss = driven([Scale(2.0), Scale(3.0)], x)
    with pipe:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
            gradient.sum().backward()
