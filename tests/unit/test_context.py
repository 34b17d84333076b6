"""The caller's thread-local state, entered by a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from roundpipe.context import CallerContext

State = tuple[bool, bool, bool, torch.dtype]


def state() -> State:
    """Gradients, inference mode, autocast and its dtype, of the calling thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


def on_another_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def entered(context: CallerContext, requires_grad: bool) -> list[State]:
    """What another thread sees before, within and after."""
    seen: list[State] = []

    def enter() -> None:
        seen.append(state())
        with context.enter(requires_grad):
            seen.append(state())
        seen.append(state())

    on_another_thread(enter)
    return seen


def test_autocast_travels_with_its_dtype_and_cache() -> None:
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        context = CallerContext.capture({"cpu"})
    before, within, after = entered(context, True)
    assert within == (True, False, True, torch.float16)
    assert before == after
    assert not before[2]
    assert context.autocast[0].cache_enabled is False


def test_without_autocast_nothing_is_entered() -> None:
    context = CallerContext.capture(set())
    assert context.autocast == ()
    assert entered(context, True)[1][:3] == (True, False, False)


def test_gradients_are_as_the_call_wants_them_and_inference_mode_as_the_caller_had_it() -> None:
    with torch.inference_mode():
        context = CallerContext.capture({"cpu"})
    assert entered(context, False)[1][:2] == (False, True)
    assert entered(CallerContext.capture({"cpu"}), False)[1][:2] == (False, False)
