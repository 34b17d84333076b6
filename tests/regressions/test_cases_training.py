"""Cases about losses, gradients and steps that went wrong in public, each told above its test."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from support.cases import STAGES, Scale, config_of, grad_of, sum_loss

# Gradients were divided by the token count only for the log, after backward.


def quarter_of_squares(output: torch.Tensor, _label: Any) -> torch.Tensor:
    return (output**2).sum() / 4


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("num_microbatch", [1, 2, 4])
def test_the_gradient_is_the_derivative_of_the_reported_loss(
    num_microbatch: int, stages: int
) -> None:
    layer = Scale(1.0)
    model = nn.Sequential(layer, *(nn.Identity() for _ in range(3)))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    config = config_of(4, stages, num_microbatch)

    def loss_at(weight: float) -> float:
        nn.init.constant_(layer.weight, weight)
        with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
            loss = pipe.forward_backward((x,), loss_fn=quarter_of_squares)
            pipe.synchronize()
        return float(loss)

    h = 0.125
    slope = (loss_at(1 + h) - loss_at(1 - h)) / (2 * h)
    layer.weight.grad = None
    assert loss_at(1.0) == 7.5
    assert grad_of(layer) == slope == 15.0


# Each call rescaled all gradients that were there, so earlier calls decayed; elsewhere the stored
# gradient was replaced instead of added to.


@pytest.mark.parametrize("stages", [1, 2])
def test_several_calls_before_one_step(stages: int) -> None:
    layer = Scale(1.0)
    model = nn.Sequential(layer, nn.Identity())
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(2, stages, 2)) as pipe:

        def call(value: float) -> float:
            pipe.forward_backward((torch.tensor([[value], [value]]),), loss_fn=sum_loss)
            pipe.synchronize()
            return grad_of(layer)

        assert [call(1.0), call(2.0), call(3.0)] == [2.0, 6.0, 12.0]
        pipe.zero_grad()
        assert call(1.0) == 2.0
        layer.weight.grad = torch.tensor(100.0)
        assert call(1.0) == 102.0


# With offloaded gradients only the first part was there when the norm was taken, and changes the
# user made to gradients were lost.


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Part(nn.Module):
    """One of two weights, in a layer of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, state: Any) -> Any:
        x, total = state if isinstance(state, tuple) else (state, 0.0)
        return x, total + x[:, self.index] * self.weight


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_norm_and_clipping_see_whole_gradients(spread: bool, is_async: bool) -> None:
    model = nn.Sequential(Part(0), nn.Identity(), Part(1)) if spread else nn.Sequential(Pair())
    x = torch.tensor([[0.75, 1.0]]).repeat(4, 1)
    layers = len(model)
    seen: dict[str, Any] = {}

    def loss(output: Any, _label: Any) -> torch.Tensor:
        return sum_loss(output[1] if spread else output, None)

    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(layers, layers, 4)) as pipe:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)

        def step() -> None:
            seen["before"] = [v for p in pipe.parameters() for v in p.grad.tolist()]  # type: ignore[union-attr]
            seen["norm"] = nn.utils.clip_grad_norm_(list(pipe.parameters()), 1.0).item()
            optimizer.step()

        pipe.forward_backward((x,), loss_fn=loss)
        pipe.step(step, is_async=is_async)
        pipe.synchronize()
    assert seen["before"] == [3.0, 4.0]
    assert seen["norm"] == 5.0
    values = [value for parameter in model.parameters() for value in parameter.tolist()]
    assert values == pytest.approx([-0.6, -0.8], abs=1e-5)


# Optimizers that are no torch optimizers are refused by every scheduler, and a learning rate that
# is a tensor was replaced, or multiplied on every step.


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_work_inside_the_step(tensor_lr: bool) -> None:
    layer = Scale(0.0)
    lr: Any = torch.tensor(1.0) if tensor_lr else 1.0
    with RoundPipe(nn.Sequential(layer), devices="cpu:2") as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=lr)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        values = []

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

        for _ in range(3):
            pipe.forward_backward((torch.full((3,), 1 / 3),), loss_fn=sum_loss)
            pipe.step(step)
            pipe.synchronize()
            values.append(layer.weight.item())
    assert values == pytest.approx([-1.0, -1.5, -1.75])
    assert float(optimizer.param_groups[0]["lr"]) == 0.125
    assert not tensor_lr or optimizer.param_groups[0]["lr"] is lr


# The next forward began before all updated weights had arrived: some layers new, some old.


@pytest.mark.parametrize("delay_last", [False, True])
def test_a_call_beside_a_step_sees_one_version(delay_last: bool) -> None:
    layers = [Scale(1.0) for _ in range(4)]
    config = RoundPipeRunConfig(num_microbatch=1)
    with RoundPipe(nn.Sequential(*layers), devices="cpu:2", model_run_config=config) as pipe:
        masters = list(pipe.optim_parameters())
        for _ in range(20):
            halfway, go = threading.Event(), threading.Event()

            def step(halfway: threading.Event = halfway, go: threading.Event = go) -> None:
                with torch.no_grad():
                    for index, master in enumerate(masters):
                        if index == 2:
                            halfway.set()
                            go.wait()
                        master.fill_(2.0)

            with torch.no_grad():
                for master in masters:
                    master.fill_(1.0)
            pipe.step(lambda: None, is_async=False)
            pipe.step(step)
            halfway.wait()
            if not delay_last:
                go.set()
            with torch.no_grad():
                assert pipe(torch.ones(1, 1)).item() == 1.0
            go.set()
            pipe.synchronize()
            with torch.no_grad():
                assert pipe(torch.ones(1, 1)).item() == 16.0


# Errors in background threads were not passed on: training waited for ever. If nothing else is
# called, the process must end, and say what went wrong.


@pytest.mark.parametrize("kind", ["ValueError", "SystemExit"])
def test_a_failed_step_at_the_end_of_a_script(kind: str) -> None:
    program = f"""
        import torch
        from torch import nn
        from roundpipe import RoundPipe

        def step_fn():
            raise {kind}("boom 1")

        pipe = RoundPipe(nn.Sequential(nn.Linear(1, 1)), devices="cpu:2")
        pipe.forward_backward((torch.ones(3, 1),), loss_fn=lambda out, label: out.sum())
        pipe.step(step_fn)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert f"{kind}: boom 1" in done.stderr
    assert "in step_fn" in done.stderr


# An optimizer over all parameters crashed on frozen ones; parameters without a gradient were
# decayed, or moved by momentum.


def test_frozen_parameters_stay_and_have_no_state() -> None:
    torch.manual_seed(0)
    frozen, trained = nn.Linear(2, 2), nn.Linear(2, 2)
    frozen.requires_grad_(False)
    before = copy.deepcopy(frozen.state_dict())
    with RoundPipe(nn.Sequential(frozen, trained), devices="cpu:2") as pipe:
        with OptimizerCtx():
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            pipe.forward_backward((torch.ones(3, 2),), loss_fn=sum_loss)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        pipe.synchronize()
    assert all(torch.equal(frozen.state_dict()[key], before[key]) for key in before)
    assert len(optimizer.state) == 2


class MaybeUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.use_both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.used + (x * self.unused if self.use_both else 0.0)


def test_parameters_without_a_gradient_are_not_touched() -> None:
    layer = MaybeUsed()
    with RoundPipe(nn.Sequential(layer), devices="cpu:2") as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=0.1, weight_decay=0.1)
        pipe.forward_backward((torch.ones(3),), loss_fn=sum_loss)
        pipe.step(optimizer.step, is_async=False)
    assert layer.used.item() == pytest.approx(0.89)
    assert layer.unused.item() == 1.0


def test_momentum_does_not_move_what_a_later_step_has_no_gradient_for() -> None:
    layer = MaybeUsed()
    layer.use_both = True
    with RoundPipe(nn.Sequential(layer), devices="cpu:2") as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            pipe.forward_backward((torch.full((3,), 1 / 3),), loss_fn=sum_loss)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            layer.use_both = False
    assert layer.unused.item() == pytest.approx(0.9)


# Shared weights were refused, drifted apart, or were untied; the copy of the key was then missing.


class Head(nn.Module):
    def __init__(self, tied: Scale) -> None:
        super().__init__()
        self.weight = tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_tied_weights() -> None:
    first = Scale(2.0)
    model = nn.Sequential(first, nn.Identity(), nn.Identity(), Head(first))
    x = torch.tensor([1.0, 2.0, 3.0])
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(4, 4, 3)) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.01)
        assert len(optimizer.param_groups[0]["params"]) == 1
        loss = pipe.forward_backward((x,), loss_fn=sum_loss)
        pipe.synchronize()
        assert (loss.item(), grad_of(first)) == (24.0, 24.0)
        pipe.step(optimizer.step)
        pipe.synchronize()
        assert first.weight.item() == pytest.approx(1.76)
        state = pipe.state_dict()
        assert list(state) == ["0.weight", "3.weight"]
        assert state["0.weight"].data_ptr() == state["3.weight"].data_ptr()
        assert model[3].weight is model[0].weight
        saved = copy.deepcopy(state)
        nn.init.zeros_(first.weight)
        pipe.load_state_dict(saved)
        assert model[3].weight is model[0].weight
        del saved["3.weight"]
        missing = pipe.load_state_dict(saved, strict=False)
        assert list(missing.missing_keys) == ["3.weight"]
        assert first.weight.item() == pytest.approx(1.76)


# Checkpoints were tied to the device layout: on resume with other stages the loss jumped.


def test_resume_on_another_number_of_stages() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))

    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(6, 3, generator=generator) for _ in range(6)]

    def square(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output - label) ** 2).sum()

    def train(
        model: nn.Sequential, stages: int, batches: Any, state: Any = None
    ) -> tuple[list[float], Any]:
        losses = []
        with RoundPipe(model, devices="cpu:2", model_run_config=config_of(4, stages, 2)) as pipe:
            optimizer = torch.optim.Adam(pipe.optim_parameters(), lr=0.01)
            if state is not None:
                optimizer.load_state_dict(copy.deepcopy(state))  # it shares what it is given
            for x in batches:
                losses.append(float(pipe.forward_backward((x,), label=x, loss_fn=square)))
                pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            return losses, copy.deepcopy(optimizer.state_dict())

    model = build()
    _, optimizer_state = train(model, 4, data[:3])
    saved = copy.deepcopy(model.state_dict())
    want, _ = train(model, 4, data[3:], optimizer_state)
    for stages in (1, 2, 3):
        resumed = build()
        resumed.load_state_dict(saved)
        assert train(resumed, stages, data[3:], optimizer_state)[0] == pytest.approx(want, rel=1e-6)
        for mine, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    plain = build()
    plain.load_state_dict(saved)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(optimizer_state))
    losses = []
    for x in data[3:]:
        loss = square(plain(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(want, rel=1e-5)


# The loss fell, but the saved adapter was untrained: it was saved from another copy.


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(1, 1), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.base + x @ self.a @ self.b


def test_the_saved_weights_are_the_trained_ones() -> None:
    layer = Adapter()
    config = RoundPipeRunConfig(num_microbatch=1)
    with RoundPipe(nn.Sequential(layer), devices="cpu:2", model_run_config=config) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe.forward_backward((torch.ones(1, 1),), loss_fn=sum_loss)
        pipe.step(optimizer.step)
        with pytest.warns(UserWarning, match="while a step is not published yet"):
            pipe.state_dict()
        pipe.synchronize()
        saved = {key: value.item() for key, value in pipe.state_dict().items()}
        with torch.no_grad():
            assert pipe(torch.ones(1, 1)).item() == pytest.approx(0.9)
    assert saved == pytest.approx({"0.base": 1.0, "0.a": 1.0, "0.b": -0.1})
