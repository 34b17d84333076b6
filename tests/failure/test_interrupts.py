"""Ctrl-C in the caller: the call ends after the layers that run, and the model stays usable."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.devices import DevicePool
from roundpipe.dispatch import Run, _DeviceRun
from roundpipe.parameters import ParameterStore
from roundpipe.records import ParameterRecord
from roundpipe.stepping import Stepper
from roundpipe.workers import Uninterrupted
from support.faults import KINDS, no_thread_left, open_kind
from support.matrix import is_bitwise

LAYERS, MICROBATCHES = 4, 8
CONFIG = RoundPipeRunConfig(num_microbatch=MICROBATCHES)


class CtrlC:
    """Sends the signal to the caller, and knows when it has been noticed there."""

    def __init__(self) -> None:
        self.noticed = threading.Event()

    def press(self) -> None:
        # To the thread, as the terminal does: a blocked main thread must wake up for it.
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        self.noticed.wait()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Like Python's own handler."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            self.noticed.set()
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Slow(nn.Module):
    """A layer that calls ``visit`` before it runs, and whose run takes as long as that."""

    def __init__(self, visit: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.visit = visit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.visit()
        out: torch.Tensor = self.linear(x)
        return out


def square_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).sum()


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    with no_thread_left(), open_kind(request.param) as opened:
        yield opened


def plain_gradients(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    for piece in x.tensor_split(MICROBATCHES):
        square_loss(model(piece), piece).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("when", [0, 5, 20, 40])
def test_a_call_ends_behind_the_layers_that_run(when: int, pool: DevicePool) -> None:
    key, visits, lock, over = CtrlC(), [0, 0], threading.Lock(), threading.Event()

    def visit() -> None:
        with lock:
            visits[0] += 1
            visits[1] += key.noticed.is_set()
            number = visits[0]
        if number == when + 1 and not over.is_set():
            key.press()
        elif number > when + 1:
            over.wait(0.1)  # layers take a while, in which the caller ends the run

    torch.manual_seed(0)
    model = nn.Sequential(*(Slow(visit) for _ in range(LAYERS)))
    x = torch.randn(2 * MICROBATCHES, 2)
    with RoundPipe(model, devices=pool, model_run_config=CONFIG, name="net") as pipe, key.caught():
        with pytest.raises(KeyboardInterrupt):
            pipe.forward_backward((x,), label=x, loss_fn=square_loss)
        # Each device at most began a few more layers before it was told.
        assert when < visits[0]
        assert visits[1] <= 3 * len(pool.devices)
        over.set()
        want = plain_gradients(model, x)
        pipe.forward_backward((x,), label=x, loss_fn=square_loss)
        pipe.synchronize()
    tolerance = 0.0 if is_bitwise(pool) else 1e-5
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("waiter", ["synchronize", "step", "synchronous step"])
def test_waiting_for_a_step_can_be_interrupted_and_waited_for_again(waiter: str) -> None:
    key, go = CtrlC(), threading.Event()
    x = torch.ones(4, 2)
    with RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices="cpu:2") as pipe, key.caught():
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1.0)
        weight = pipe.model[0].weight
        before = weight.detach().clone()

        def step() -> None:
            key.press()
            go.wait()
            optimizer.step()

        pipe.forward_backward((x,), loss_fn=lambda out, _: out.sum())
        waits: dict[str, Callable[[], None]] = {
            "synchronize": pipe.synchronize,
            "step": lambda: pipe.step(optimizer.zero_grad),
            "synchronous step": lambda: None,
        }

        def wait() -> None:
            pipe.step(step, is_async=waiter != "synchronous step")
            waits[waiter]()

        with pytest.raises(KeyboardInterrupt):
            wait()
        go.set()
        pipe.synchronize()
        # The gradient of each weight is the sum of four ones.
        assert torch.equal(weight.detach(), before - 4.0)


def test_a_publish_is_not_left_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two versions: the first had the step's weights, the rest those before it."""
    key, go = CtrlC(), threading.Event()
    publish = ParameterStore._publish_parameter

    def pressed(store: ParameterStore, record: ParameterRecord, declared: list[int]) -> None:
        publish(store, record, declared)
        if not key.noticed.is_set():
            key.press()
            go.wait()

    x = torch.ones(4, 2)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    with RoundPipe(model, devices="cpu:2") as pipe, key.caught():
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe.forward_backward((x,), loss_fn=lambda out, _: out.sum())
        pipe.step(optimizer.step)
        pipe._stepper.wait()
        monkeypatch.setattr(ParameterStore, "_publish_parameter", pressed)
        with pytest.raises(KeyboardInterrupt):
            pipe.synchronize()
        go.set()
        with torch.no_grad():
            got = pipe(x)
        weights = [m.detach() for m in pipe.optim_parameters()]
    want = x
    for weight in weights:
        want = nn.functional.linear(want, weight)
    torch.testing.assert_close(got, want)


def test_a_second_press_does_not_leave_the_devices_running(pool: DevicePool) -> None:
    key, visits, lock = CtrlC(), [0], threading.Lock()

    def visit() -> None:
        with lock:
            visits[0] += 1
            number = visits[0]
        if number in (3, 4):
            key.noticed.clear()
            key.press()

    torch.manual_seed(0)
    model = nn.Sequential(*(Slow(visit) for _ in range(LAYERS)))
    x = torch.randn(2 * MICROBATCHES, 2)
    with RoundPipe(model, devices=pool, model_run_config=CONFIG, name="net") as pipe, key.caught():
        with pytest.raises(KeyboardInterrupt):
            pipe.forward_backward((x,), label=x, loss_fn=square_loss)
        running, visits[0] = visits[0], 10
        assert running < LAYERS * MICROBATCHES
        pipe.forward_backward((x,), label=x, loss_fn=square_loss)


WINDOWS: dict[str, tuple[type, str]] = {
    "before the devices get their lists": (_DeviceRun, "__init__"),
    "before reads are announced": (ParameterStore, "declare_reads"),
    "before the devices are told": (DevicePool, "submit"),
    "when a step takes the gradients": (ParameterStore, "take_gradients"),
    "before a step is handed over": (Stepper, "_start"),
    "before a call in flight starts": (Run, "start"),
    "before the wait for the devices": (Run, "wait"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["merged", "packed"])
@pytest.mark.parametrize("window", WINDOWS)
def test_no_moment_leaves_the_model_stuck(
    window: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads were announced that nobody made, versions counted that nobody made, locks kept."""
    owner, name = WINDOWS[window]
    real = getattr(owner, name)

    def pressed(*args: Any) -> Any:
        setattr(owner, name, real)
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    x = torch.ones(2, 2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    config = RoundPipeRunConfig(num_microbatch=2, merge_output=not packed)
    with no_thread_left(), RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)

        def iterate() -> None:
            if packed:
                pipe(x)
            pipe.forward_backward((x,), loss_fn=lambda out, _: out.sum())
            pipe.step(optimizer)

        iterate()
        pipe.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, pressed)
            with pytest.raises(KeyboardInterrupt):
                iterate()
        pipe.synchronize()
        before = [p.detach().clone() for p in pipe.optim_parameters()]
        pipe.zero_grad()
        iterate()
        pipe.synchronize()
        after = list(pipe.optim_parameters())
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_ctrl_c_in_a_block_that_must_not_be_interrupted_comes_at_its_end() -> None:
    reached: list[str] = []

    def run() -> None:
        with Uninterrupted(), Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("inside")
        reached.append("behind")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert reached == ["inside"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


PROGRAM = """
    import sys, threading, time
    import torch
    from torch import nn
    from roundpipe import RoundPipe, RoundPipeRunConfig

    class Slow(nn.Linear):
        def forward(self, x):
            print("running", flush=True)
            time.sleep(0.1)
            return super().forward(x)

    def slow_step():
        print("running", flush=True)
        time.sleep(0.5)

    config = RoundPipeRunConfig(num_microbatch=50)
    model = nn.Sequential(Slow(1, 1), Slow(1, 1))
    pipe = RoundPipe(model, devices="cpu:2", model_run_config=config)
    x = torch.ones(50, 1)
    if sys.argv[1] == "call":
        pipe.forward_backward((x,), loss_fn=lambda out, label: out.sum())
    pipe.step(slow_step)
    if sys.argv[1] == "synchronize":
        pipe.synchronize()
    if sys.argv[1] == "step":
        for _ in range(100):
            pipe.step(slow_step)
"""


@pytest.mark.parametrize("waiter", ["call", "synchronize", "step"])
def test_a_script_dies_of_ctrl_c(waiter: str) -> None:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), waiter]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, -signal.SIGKILL)
    assert "\nKeyboardInterrupt\n" in errors
