"""A step function that raises: who is told, once, and what is left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from support.faults import InjectedError, no_thread_left, notes_of

X = torch.tensor([[1.0], [2.0]])
CONFIG = RoundPipeRunConfig(num_microbatch=2)


def make(name: str = "net") -> tuple[nn.Linear, RoundPipe]:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = nn.Sequential(layer)
    return layer, RoundPipe(model, devices="cpu:2", name=name, model_run_config=CONFIG)


def sum_loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
    return output.sum()


def call(pipe: RoundPipe) -> torch.Tensor:
    loss: torch.Tensor = pipe.forward_backward((X,), loss_fn=sum_loss)
    return loss


NEXT: dict[str, Callable[[RoundPipe], Any]] = {
    "step": lambda pipe: pipe.step(lambda: None),
    "synchronous step": lambda pipe: pipe.step(lambda: None, is_async=False),
    "synchronize": lambda pipe: pipe.synchronize(),
    "load_state_dict": lambda pipe: pipe.load_state_dict(pipe.model.state_dict()),
    "deepcopy": lambda pipe: pipe.__deepcopy__({}),
}


def fail_step(pipe: RoundPipe, error: BaseException) -> None:
    """A failed asynchronous step that is over."""
    over = threading.Event()

    def step_that_fails() -> None:
        over.set()
        raise error

    pipe.step(step_that_fails)
    over.wait()


@pytest.mark.parametrize("kind", [InjectedError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("name", NEXT)
def test_the_next_call_that_waits_raises_it_once(name: str, kind: type[BaseException]) -> None:
    error = kind("in the step")
    with no_thread_left():
        layer, pipe = make()
        with pipe:
            call(pipe)
            fail_step(pipe, error)
            with pytest.raises(kind, match="in the step") as caught:
                NEXT[name](pipe)
            assert caught.value is error
            assert notes_of(error) == ["roundpipe: model net, phase step"]
            assert any(entry.name == "step_that_fails" for entry in caught.traceback)
            NEXT[name](pipe)
            pipe.synchronize()
            assert layer.weight.item() == 1.0


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_call_that_begins_after_the_step_failed_raises_it_before_anything_runs(
    is_fused: bool,
) -> None:
    error = InjectedError("in the step")
    layer, pipe = make()
    with pipe:
        call(pipe)
        fail_step(pipe, error)
        # Until the thread has written down how the step ended, the call is free to begin.
        pipe._stepper._done.wait(1, "the test")
        ran: list[int] = []
        layer.register_forward_hook(lambda *_: ran.append(1))
        with pytest.raises(InjectedError) as caught:
            call(pipe) if is_fused else pipe(X)
        assert caught.value is error
        assert ran == []
        assert call(pipe) == 3.0


def test_a_call_during_which_the_step_failed_raises_it_and_leaves_no_gradient() -> None:
    error, begun = InjectedError("in the step"), threading.Event()
    _, pipe = make()

    def wait_and_fail() -> None:
        begun.wait()
        raise error

    def loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
        begun.set()
        pipe._stepper._done.wait(1, "the test")
        return output.sum()

    with pipe:
        call(pipe)
        pipe.step(wait_and_fail)
        with pytest.raises(InjectedError) as caught:
            pipe.forward_backward((X,), loss_fn=loss)
        assert caught.value is error
        call(pipe)
        seen: list[torch.Tensor | None] = []
        pipe.step(lambda: seen.extend(p.grad for p in pipe.parameters()), is_async=False)
        # The failed step has folded the first call's gradient, 3; the second call's was dropped.
        assert [None if grad is None else grad.item() for grad in seen] == [6.0]


def test_a_synchronous_step_raises_at_once_and_parameters_follow_the_masters() -> None:
    layer, pipe = make()
    error = InjectedError("halfway")

    def halfway() -> None:
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.add_(1.0)
        raise error

    with pipe:
        call(pipe)
        with pytest.raises(InjectedError) as caught:
            pipe.step(halfway, is_async=False)
        assert caught.value is error
        assert layer.weight.item() == 2.0
        pipe.synchronize()


def test_a_failed_step_keeps_the_gradients_of_later_calls() -> None:
    _, pipe = make()
    seen: list[float] = []

    def collect() -> None:
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            seen.append(parameter.grad.item())
            parameter.grad = None

    with pipe:
        call(pipe)
        pipe.step(collect, is_async=False)
        fail_step(pipe, InjectedError("second step"))
        with pytest.raises(InjectedError):
            pipe.synchronize()
        call(pipe)
        fail_step(pipe, InjectedError("third step"))
        with pytest.raises(InjectedError):
            pipe.step(collect)
        pipe.step(collect, is_async=False)
    assert seen == [3.0, 3.0]


def test_closing_logs_a_failure_that_nobody_was_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with no_thread_left(), caplog.at_level(logging.ERROR, logger="roundpipe"):
        _, pipe = make("forgotten")
        call(pipe)
        fail_step(pipe, InjectedError("nobody asked"))
        pipe.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        "an asynchronous step of forgotten failed and nothing was called afterwards that could "
        "raise the error"
    )
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "nobody asked"


def test_a_step_function_that_calls_its_own_model_is_told_so() -> None:
    _, pipe = make()
    with pipe:
        for inside in (lambda: call(pipe), pipe.synchronize, lambda: pipe.step(print)):
            with pytest.raises(
                RuntimeError,
                match="net was called from its own step function, which it would wait for",
            ):
                pipe.step(inside, is_async=False)
        assert call(pipe) == 3.0


@pytest.mark.parametrize("stepped", [False, True])
def test_after_close_synchronize_publishes_and_step_is_refused(stepped: bool) -> None:
    with no_thread_left():
        layer, pipe = make()
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        call(pipe)
        if stepped:
            pipe.step(optimizer.step)
        pipe.close()
        for refused in (optimizer, optimizer.step):
            with pytest.raises(RuntimeError, match="net was closed; make a new RoundPipe"):
                pipe.step(refused)
        pipe.synchronize()
        # The gradient is the sum of the inputs, 3.
        assert layer.weight.item() == pytest.approx(0.7 if stepped else 1.0)
