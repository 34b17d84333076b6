"""Steps of an optimizer, layer by layer: the same numbers as one step for all, and who waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, optim
from roundpipe.binding import Binding
from roundpipe.devices import CpuChecks
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.parameters import ParameterStore
from support.faults import KINDS, InjectedError, open_kind, watched_pool

Make = Callable[[Any], torch.optim.Optimizer]
SINGLE = [range(i, i + 1) for i in range(4)]
CONFIG = RoundPipeRunConfig(
    num_microbatch=2, execute_plan=ModelExecutePlan(SINGLE[:-1], SINGLE[::-1])
)


def maker(module: Any, name: str, **options: Any) -> Make:
    return lambda params: getattr(module, name)(params, **{"lr": 0.01, **options})


OURS = {
    f"roundpipe {name}": maker(optim, name)
    for name in optim.__all__
    if name not in ("Binding", "KernelOptimizer")
}
OURS["roundpipe AdamW, bfloat16 moments"] = maker(optim, "AdamW", moment_dtype=torch.bfloat16)
THEIRS = {
    f"torch {name}": maker(torch.optim, name)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam",
                 "RAdam", "RMSprop", "Rprop", "SGD")
}  # fmt: skip
THEIRS["torch AdamW, fused"] = maker(torch.optim, "AdamW", fused=True)
THEIRS["torch SGD, foreach"] = maker(torch.optim, "SGD", momentum=0.9, foreach=True)
ALL = {**OURS, **THEIRS}


class Scale(nn.Module):
    """A vector weight, here and there complex, and one that no call uses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.frozen


class Tied(nn.Module):
    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.weight = owner.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(6, 6)
    return nn.Sequential(first, Scale(6), Tied(first), nn.Linear(6, 6, bias=False)).to(dtype)


def square(output: Tensor, label: Tensor) -> Tensor:
    return ((output - label).float() ** 2).sum()


def train(
    make: Make,
    step: Callable[[RoundPipe, torch.optim.Optimizer], None],
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    devices: Any = "cpu:2",
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Losses, parameters and the optimizer's state of a run whose steps ``step`` submits."""
    model, losses = build(dtype), []
    with RoundPipe(model, torch.float32, devices=devices, model_run_config=CONFIG) as pipe:
        optimizer = make(pipe.optim_parameters())
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            x = torch.randn(4, 6, generator=generator).to(dtype)
            losses.append(float(pipe.forward_backward((x,), label=x, loss_fn=square)))
            step(pipe, optimizer)
        pipe.synchronize()
        return losses, dict(pipe.state_dict()), optimizer.state_dict()


def whole(is_async: bool = False) -> Callable[[RoundPipe, torch.optim.Optimizer], None]:
    def step(pipe: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)

    return step


def assert_same_run(got: Any, want: Any) -> None:
    assert got[0] == want[0]
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["roundpipe AdamW", "torch AdamW"])
@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_it_matter_what_devices_there_are(
    kind: str, name: str, dtype: torch.dtype
) -> None:
    with open_kind(kind) as pool:
        want = train(ALL[name], whole(), dtype, devices=pool)
        got = train(ALL[name], lambda p, optimizer: p.step(optimizer), dtype, devices=pool)
    assert_same_run(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_layer_by_layer_equals_one_synchronous_step_bitwise(name: str, dtype: torch.dtype) -> None:
    want = train(ALL[name], whole(), dtype)
    got = train(ALL[name], lambda pipe, optimizer: pipe.step(optimizer), dtype)
    assert_same_run(got, want)


@pytest.mark.parametrize("name", ["roundpipe AdamW", "torch AdamW"])
def test_an_asynchronous_step_of_an_optimizer_equals_one_of_a_function(name: str) -> None:
    want = train(ALL[name], whole(is_async=True), torch.bfloat16, steps=4)
    with watched_pool(2, CpuChecks(delay_seed=1)) as pool:
        got = train(
            ALL[name], lambda p, optimizer: p.step(optimizer, is_async=True), torch.bfloat16, 4,
            devices=pool,
        )  # fmt: skip
    assert_same_run(got, want)


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("name", ["roundpipe SGD", "roundpipe AdamW", "torch SGD", "torch AdamW"])
def test_clipping_and_scheduling_equal_a_step_function_that_does_both(
    name: str, max_norm: float
) -> None:
    schedulers: list[Any] = []

    def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
        if not schedulers or schedulers[-1].optimizer is not optimizer:
            schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        return schedulers[-1]

    def by_hand(pipe: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        scheduler = scheduler_of(optimizer)

        def step() -> None:
            params = [p for g in optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(params, max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        pipe.step(step, is_async=False)

    def by_layer(pipe: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        pipe.step(optimizer, scheduler=scheduler_of(optimizer), max_norm=max_norm)

    assert_same_run(train(ALL[name], by_layer), train(ALL[name], by_hand))
    assert [scheduler.get_last_lr() for scheduler in schedulers] == [[0.00125], [0.00125]]


# --- who waits for whom -------------------------------------------------------------------------


class Told(nn.Module):
    """A weight whose forward tells when it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.begun = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.begun.set()
        return x * self.weight

    def __deepcopy__(self, _memo: object) -> Told:
        return self


def total(output: Tensor, _label: Any) -> Tensor:
    return output.sum()


def test_the_next_call_begins_while_later_layers_are_still_being_updated() -> None:
    layers = [Told() for _ in range(4)]
    with watched_pool(2) as pool:
        with RoundPipe(nn.Sequential(*layers), devices=pool, model_run_config=CONFIG) as pipe:
            optimizer = optim.SGD(pipe.optim_parameters(), lr=0.5)
            masters = list(pipe.optim_parameters())
            step_fused, order = optimizer.step_fused, list[int]()

            def gated(bindings: Mapping[Tensor, Binding], grad_scale: float = 1.0) -> None:
                (index,) = [i for i, master in enumerate(masters) if master in bindings]
                if index == 2:
                    assert layers[0].begun.wait(60)  # runs with its new weights by now
                    assert layers[1].begun.wait(60)
                    assert not layers[2].begun.is_set()
                order.append(index)
                step_fused(bindings, grad_scale)

            pipe.forward_backward((torch.ones(2, 1),), loss_fn=total)
            for layer in layers:
                layer.begun.clear()
            setattr(optimizer, "step_fused", gated)  # noqa: B010 - a method, to mypy
            pipe.step(optimizer)
            assert pipe.forward_backward((torch.ones(2, 1),), loss_fn=total).item() == 0.0
            assert order == [0, 1, 2, 3]


def test_an_asynchronous_step_begins_with_the_layers_whose_buffers_are_needed_first() -> None:
    layers = [Told() for _ in range(4)]
    with watched_pool(2) as pool:
        with RoundPipe(nn.Sequential(*layers), devices=pool, model_run_config=CONFIG) as pipe:
            masters = list(pipe.optim_parameters())
            optimizer = torch.optim.SGD(masters, lr=0.5)
            step, order = optimizer.step, list[int]()

            def noted() -> None:
                order.extend(i for i, master in enumerate(masters) if master.grad is not None)
                step()

            setattr(optimizer, "step", noted)  # noqa: B010 - a method, to mypy
            pipe.forward_backward((torch.ones(2, 1),), loss_fn=total)
            pipe.step(optimizer, is_async=True)
            pipe.synchronize()
            assert order == [3, 2, 1, 0]
            assert [layer.weight.item() for layer in layers] == [0.0] * 4


# --- optimizers that cannot be taken apart ------------------------------------------------------


class Normalized(torch.optim.Optimizer):
    """Divides by the norm of all gradients together, and counts its steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"count": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            params = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            with torch.no_grad():
                for p in params:
                    p.sub_(p.grad / norm)


def test_an_unknown_optimizer_makes_one_step_for_all() -> None:
    want = train(Normalized, whole())
    got = train(Normalized, lambda pipe, optimizer: pipe.step(optimizer))
    assert_same_run(got, want)
    assert got[2]["param_groups"][0]["count"] == 3


def test_an_optimizer_with_hooks_makes_one_step_for_all() -> None:
    calls: list[str] = []

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = optim.AdamW(params, lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        return optimizer

    want = train(maker(optim, "AdamW"), whole())
    assert_same_run(train(make, lambda pipe, optimizer: pipe.step(optimizer)), want)
    assert calls == ["before", "after"] * 3


# --- gradients of all kinds ---------------------------------------------------------------------


def test_parameters_of_no_model_step_once_and_what_was_left_in_grad_counts() -> None:
    stranger = nn.Parameter(torch.ones(1))
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    with RoundPipe(nn.Sequential(*layers), devices="cpu:2") as pipe:
        masters = list(pipe.optim_parameters())
        optimizer = torch.optim.SGD([*masters, stranger], lr=1.0)
        masters[0].grad = torch.full((1, 1), 10.0)
        stranger.grad = torch.full((1,), 0.25)
        pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
        pipe.step(optimizer)
        pipe.synchronize()
        assert [layer.weight.item() for layer in layers] == [1 - 13.0, 1 - 3.0]
        assert stranger.item() == 0.75
        assert [p.grad for p in (*masters, stranger)] == [None] * 3


def test_a_step_without_gradients_changes_nothing_and_schedulers_do_not_complain() -> None:
    with RoundPipe(nn.Sequential(nn.Linear(1, 1)), devices="cpu:2") as pipe:
        optimizer = optim.AdamW(pipe.optim_parameters(), lr=1.0, weight_decay=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        before = [p.detach().clone() for p in pipe.model.parameters()]
        pipe.step(optimizer, scheduler=[scheduler], max_norm=1.0)
        pipe.synchronize()
        assert scheduler.get_last_lr() == [0.5]
        for mine, old in zip(pipe.model.parameters(), before, strict=True):
            assert torch.equal(mine, old)


def test_masters_that_the_optimizer_does_not_have_keep_their_gradient() -> None:
    with RoundPipe(nn.Sequential(nn.Linear(1, 1)), devices="cpu:2") as pipe:
        weight, bias = pipe.optim_parameters()
        optimizer = optim.SGD([weight], lr=1.0)
        for _ in range(2):
            pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
            pipe.step(optimizer)
        pipe.synchronize()
        assert weight.grad is None
        assert bias.grad is not None
        assert bias.grad.item() == 6.0


def ones(count: int) -> nn.Sequential:
    """Layers that multiply by a weight of one."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(count)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


# --- failures -----------------------------------------------------------------------------------


def test_a_failure_in_the_middle_is_raised_once_and_nobody_waits_for_ever() -> None:
    layers = [nn.Linear(1, 1, bias=False) for _ in range(4)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    with watched_pool(2) as pool:
        with RoundPipe(nn.Sequential(*layers), devices=pool, model_run_config=CONFIG) as pipe:
            optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.5)
            step, error = optimizer.step, InjectedError("no")
            calls: list[None] = []

            def fail_third() -> None:
                calls.append(None)
                if len(calls) == 3:
                    raise error
                step()

            setattr(optimizer, "step", fail_third)  # noqa: B010 - a method, to mypy
            pipe.forward_backward((torch.ones(2, 1),), loss_fn=total)
            pipe.step(optimizer)
            with pytest.raises(InjectedError) as caught:
                pipe.forward_backward((torch.ones(2, 1),), loss_fn=total)
            assert caught.value is error
            assert "phase step" in getattr(caught.value, "__notes__")[0]  # noqa: B009
            pipe.synchronize()
            assert [layer.weight.item() for layer in layers] == [0.0, 0.0, 1.0, 1.0]
            for master in pipe.optim_parameters():
                nn.init.ones_(master).grad = None
            pipe.step(lambda: None, is_async=False)
            pipe.forward_backward((torch.ones(2, 1),), loss_fn=total)
            pipe.step(optimizer)
            pipe.synchronize()
            assert [layer.weight.item() for layer in layers] == [0.0] * 4


@pytest.mark.parametrize("way", ["function", "optimizer", "layer by layer"])
def test_a_failed_publish_leaves_no_call_waiting_for_a_gradients_buffer(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched_pool(2) as pool:
        with RoundPipe(ones(4), devices=pool, model_run_config=CONFIG) as pipe:
            optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.5)

            def iterate() -> None:
                pipe.forward_backward((torch.ones(2, 1),), loss_fn=total)
                if way == "function":
                    whole(is_async=True)(pipe, optimizer)
                else:
                    pipe.step(optimizer, is_async=way == "optimizer")

            iterate()
            pipe.synchronize()
            with monkeypatch.context() as patched:

                def fail(*_args: object) -> None:
                    raise InjectedError("no copy")

                patched.setattr(ParameterStore, "publish_layer", fail)
                iterate()
                with pytest.raises(InjectedError):
                    pipe.synchronize()
            pipe.synchronize()
            iterate()
            pipe.synchronize()
            masters = [master.item() for master in pipe.optim_parameters()]
            assert [p.item() for p in pipe.model.parameters()] == masters


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_norm": 0}, InvalidValueError, "max_norm is 0; give a positive number, or None"),
        ({"max_norm": "1"}, InvalidTypeError, "max_norm is a str; give a positive number"),
        ({"scheduler": 3}, InvalidTypeError, "scheduler is a int; give a learning rate scheduler"),
        ({"closure": 3}, InvalidTypeError, r"got closure; it takes is_async, scheduler and max_"),
    ],
)
def test_options_of_a_step_that_make_no_sense(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with RoundPipe(nn.Sequential(nn.Linear(1, 1)), devices="cpu:2") as pipe:
        optimizer = optim.SGD(pipe.optim_parameters())
        with pytest.raises(error, match=text):
            pipe.step(optimizer, **options)


def test_optimizers_and_schedulers_that_cannot_step_by_themselves() -> None:
    with RoundPipe(nn.Sequential(nn.Linear(1, 1)), devices="cpu:2") as pipe:
        optimizer = optim.SGD(pipe.optim_parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        with pytest.raises(InvalidValueError, match="ReduceLROnPlateau needs a metric at each"):
            pipe.step(optimizer, scheduler=plateau)
        others = torch.optim.lr_scheduler.StepLR(optim.SGD(pipe.optim_parameters()), 1)
        with pytest.raises(InvalidValueError, match="a StepLR, was made for another optimizer"):
            pipe.step(optimizer, scheduler=others)
        with pytest.raises(InvalidValueError, match="LBFGS evaluates the model several times"):
            pipe.step(torch.optim.LBFGS(pipe.optim_parameters()))
        with pytest.raises(InvalidValueError, match="none of the optimizer's parameters is a mast"):
            pipe.step(optim.SGD(list(pipe.model.parameters())))
        with pytest.raises(InvalidTypeError, match="step_fn is a int; give a function that steps"):
            pipe.step(3)  # type: ignore[arg-type]


def test_a_state_saved_during_a_step_layer_by_layer_has_layers_of_one_version() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    turns: list[int] = []
    at_second, go_on = threading.Event(), threading.Event()
    with RoundPipe(model, devices="cpu:2", model_run_config=CONFIG) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1.0)
        plain_step = optimizer.step

        def step() -> None:
            turns.append(len(turns))
            if len(turns) == 2:  # the second layer's
                at_second.set()
                assert go_on.wait(60)
            plain_step()

        optimizer.step = step  # type: ignore[assignment, method-assign]
        pipe.forward_backward((torch.ones(2, 2),), loss_fn=lambda output, _: output.sum())
        pipe.step(optimizer)
        assert at_second.wait(60)
        threading.Timer(0.05, go_on.set).start()
        saved = {name: value.clone() for name, value in pipe.state_dict().items()}
    assert all(not torch.equal(saved[name], before[name]) for name in before)
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
