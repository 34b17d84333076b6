"""One optimizer that two models step."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig, optim
from roundpipe.errors import InvalidValueError
from roundpipe.parameters import ParameterStore
from roundpipe.sharing import Sharing
from roundpipe.stepping import Stepper

CONFIG = RoundPipeRunConfig(num_microbatch=1)


def mean_square(output: Tensor, _label: Any) -> Tensor:
    return output.square().mean()


def total(output: Tensor, _label: Any) -> Tensor:
    return output.sum()


def wrap(seed: int, size: int = 4) -> RoundPipe:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(3)))
    return RoundPipe(model, devices="cpu:1", model_run_config=CONFIG, name=f"model {seed}")


@pytest.fixture
def pair() -> Iterator[tuple[RoundPipe, RoundPipe]]:
    """Two models with weights of one."""
    with wrap(0, 1) as first, wrap(1, 1) as second:
        for parameter in (*first.model.parameters(), *second.model.parameters()):
            nn.init.ones_(parameter)
        yield first, second


def masters_of(*pipes: RoundPipe) -> list[nn.Parameter]:
    return [master for pipe in pipes for master in pipe.optim_parameters()]


def weights(pipe: RoundPipe) -> list[float]:
    pipe.synchronize()
    return [parameter.item() for parameter in pipe.model.parameters()]


def train(is_shared: bool, make: Callable[[Any], Any], is_async: bool) -> list[Tensor]:
    """The parameters of two models after some steps, of one optimizer or one for each."""
    with wrap(0) as first, wrap(1) as second:
        pipes = (first, second)
        if is_shared:
            optimizers = [make(masters_of(*pipes))] * 2
        else:
            optimizers = [make(masters_of(pipe)) for pipe in pipes]
        scheduled = optimizers[1:] if is_shared else optimizers
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in scheduled]
        for number in range(4):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
            for pipe in pipes:
                pipe.forward_backward((x,), loss_fn=mean_square)
            mine = None if is_shared else schedulers[0]
            first.step(optimizers[0], is_async=is_async, scheduler=mine)
            second.step(optimizers[1], is_async=is_async, scheduler=schedulers[-1])
        for pipe in pipes:
            pipe.synchronize()
        return [p.detach() for pipe in pipes for p in pipe.model.parameters()]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, lr=0.1),
        lambda params: optim.AdamW(params, lr=0.1),
    ],
)
def test_it_makes_the_numbers_of_one_optimizer_for_each(
    make: Callable[[Any], Any], is_async: bool
) -> None:
    want = train(False, make, is_async)
    assert all(torch.equal(*both) for both in zip(train(True, make, is_async), want, strict=True))


def test_a_step_waits_until_that_of_the_other_model_is_over(
    pair: tuple[RoundPipe, RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    masters = masters_of(*pair)
    optimizer = torch.optim.SGD(masters, lr=1.0)
    step, settle = optimizer.step, Stepper.settle
    order, is_awaited = list[int](), threading.Event()

    def held() -> None:
        assert is_awaited.wait(60)
        order.extend(i for i, master in enumerate(masters) if master.grad is not None)
        step()

    def told(stepper: Stepper) -> None:
        if stepper is first._stepper:
            is_awaited.set()
        settle(stepper)

    for pipe in pair:
        pipe.forward_backward((torch.ones(1, 1),), loss_fn=total)
    setattr(optimizer, "step", held)  # noqa: B010 - a method, to mypy
    first.step(optimizer)
    monkeypatch.setattr(Stepper, "settle", told)
    second.step(optimizer)
    had_stepped = list(order[:3])
    is_awaited.set()
    assert had_stepped == [0, 1, 2]  # nobody but second.step() has waited for it
    assert weights(first) == weights(second) == [0.0] * 3
    assert order == [0, 1, 2, 3, 4, 5]


def test_the_turn_is_held_from_the_first_update_to_the_scheduler(
    pair: tuple[RoundPipe, RoundPipe],
) -> None:
    optimizer = torch.optim.SGD(masters_of(*pair), lr=1.0)
    sharing = Sharing.of(optimizer)
    assert Sharing.of(optimizer) is sharing
    seen: list[bool] = []

    def before(*_args: object) -> None:
        seen.append(sharing.turn.locked())

    def factor(_epoch: int) -> float:
        before()
        return 1.0

    optimizer.register_step_pre_hook(before)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    assert seen == [False]
    pair[0].forward_backward((torch.ones(1, 1),), loss_fn=total)
    pair[0].step(optimizer, scheduler=scheduler)
    pair[0].synchronize()
    assert seen == [False, True, True]
    assert not sharing.turn.locked()


@pytest.mark.parametrize("by_layer", [True, False])
def test_a_step_leaves_the_other_models_gradients_to_that_models_step(
    pair: tuple[RoundPipe, RoundPipe], by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParameterStore, "steps_by_layer", by_layer)
    first, second = pair
    optimizer = torch.optim.SGD(masters_of(*pair), lr=1.0)
    for pipe in pair:
        pipe.step(optimizer)
    second.synchronize()
    left = masters_of(second)[1]
    left.grad = torch.full((1, 1), 0.25)
    first.forward_backward((torch.ones(1, 1),), loss_fn=total)
    first.step(optimizer)
    assert weights(first) == [0.0] * 3
    assert left.item() == 1.0
    assert left.grad is not None
    second.step(optimizer)
    assert weights(second) == [1.0, 0.75, 1.0]
    assert left.grad is None


class Unknown(torch.optim.SGD):
    """May do anything with all gradients."""


def test_what_needs_the_gradients_of_all_models_is_refused(
    pair: tuple[RoundPipe, RoundPipe],
) -> None:
    first, second = pair
    optimizer = torch.optim.SGD(masters_of(*pair), lr=1.0)
    first.step(optimizer)
    for pipe in (second, first):
        with pytest.raises(InvalidValueError, match=f"{pipe.name}: .* max_norm is about the gra"):
            pipe.step(optimizer, max_norm=1.0)
    unknown = Unknown(masters_of(*pair), lr=1.0)
    first.step(unknown)
    with pytest.raises(
        InvalidValueError, match=r"this Unknown may look .* an optimizer of its own"
    ):
        second.step(unknown)
    alone = torch.optim.SGD(masters_of(second), lr=1.0)
    second.step(alone, max_norm=1.0)
    second.synchronize()


def test_a_failed_step_does_not_hold_up_the_other_model(pair: tuple[RoundPipe, RoundPipe]) -> None:
    first, second = pair
    optimizer = torch.optim.SGD(masters_of(*pair), lr=1.0)
    step, error = optimizer.step, OSError("no")

    def fail() -> None:
        raise error

    for pipe in pair:
        pipe.forward_backward((torch.ones(1, 1),), loss_fn=total)
    setattr(optimizer, "step", fail)  # noqa: B010 - a method, to mypy
    first.step(optimizer)
    first._stepper.settle()
    setattr(optimizer, "step", step)  # noqa: B010 - a method, to mypy
    second.step(optimizer)
    assert weights(second) == [0.0] * 3
    with pytest.raises(OSError, match="no") as caught:
        first.synchronize()
    assert caught.value is error


def test_copies_and_pickles_of_the_optimizer_share_nothing_with_it() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    sharing = Sharing.of(optimizer)
    with sharing.turn:
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert Sharing.of(twin) is not sharing
        assert not pickle.loads(pickle.dumps(sharing)).turn.locked()
