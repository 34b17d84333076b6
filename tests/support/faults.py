"""A model with a fault to set off at one place, on one microbatch."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import CheckedPool, CpuChecks, DevicePool, open_cpu_pool

from .backends import Accelerator, with_accelerator

ROWS = 6
NUM_MICROBATCH = 3
MICROBATCHES = range(NUM_MICROBATCH)
"""The first, a middle and the last one."""

PLAN = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 3)], bwd_plan=[range(3, 5), range(2, 3), range(2)]
)


class InjectedError(Exception):
    """What the faults raise, unless a test says otherwise."""


@dataclass
class Switch:
    """Which visit of which place fails. Layers share it; any thread may visit.

    Attributes:
        visits: how often each (place, layer, microbatch) was visited since the switch was armed.
    """

    error: BaseException | None = None
    place: str = ""
    layer: int | None = None
    microbatch: int | None = None
    visits: Counter[tuple[str, int | None, int]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(
        self, error: BaseException, place: str, layer: int | None, microbatch: int | None
    ) -> None:
        self.error, self.place, self.layer, self.microbatch = error, place, layer, microbatch
        self.visits.clear()

    def disarm(self) -> None:
        self.error = None

    def visit(self, place: str, layer: int | None, microbatch: int) -> None:
        """Somebody is at ``place``; a layer's second forward of a microbatch is its recompute."""
        with self._lock:
            self.visits[place, layer, microbatch] += 1
            if place == "forward" and self.visits[place, layer, microbatch] > 1:
                place = "recompute"
        if self.error is not None and (place, layer, microbatch) == (
            self.place, self.layer, self.microbatch,
        ):  # fmt: skip
            raise self.error

    def __deepcopy__(self, _memo: dict[int, Any]) -> Switch:
        return Switch()  # a copied model is a good one


class _Backward(torch.autograd.Function):
    """Identity that visits the switch on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, visit: Callable[[], None]) -> torch.Tensor:
        ctx.visit = visit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.visit()
        return grad, None


class Block(nn.Module):
    """Weights, running statistics and dropout; the state says which microbatch it is."""

    def __init__(self, switch: Switch, index: int) -> None:
        super().__init__()
        self.switch, self.index = switch, index
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.25)

    def forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, ids = args if self.index == 0 else args[0]
        microbatch = int(ids[0])
        self.switch.visit("forward", self.index, microbatch)
        x = self.dropout(torch.relu(self.norm(self.linear(x))))
        x = _Backward.apply(x, lambda: self.switch.visit("backward", self.index, microbatch))
        return x, ids


def build(switch: Switch) -> nn.Sequential:
    """Five layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(switch, index) for index in range(5)))


def batch(seed: int = 0) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Inputs (rows, and for each row its microbatch) and labels."""
    generator = torch.Generator().manual_seed(seed)
    x, label = (torch.randn(ROWS, 4, generator=generator) for _ in range(2))
    rows_each = ROWS // NUM_MICROBATCH
    return (x, torch.arange(NUM_MICROBATCH).repeat_interleave(rows_each)), label


def loss_of(switch: Switch) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A squared error that visits the switch."""

    def loss(output: tuple[torch.Tensor, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
        x, ids = output
        switch.visit("loss", None, int(ids[0]))
        return ((x - label) ** 2).sum()

    return loss


CONFIG = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLAN)

KINDS = with_accelerator("plain", "checked", accelerator="accelerator")
"""What `open_kind` opens here."""


@dataclass
class Result:
    """What one fused call leaves behind, bit for bit."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]


def train_once(pipe: RoundPipe, switch: Switch, **options: Any) -> Result:
    """One fused call from a fixed random state."""
    torch.manual_seed(11)
    inputs, label = batch()
    loss = pipe.forward_backward(inputs, None, label, loss_of(switch), **options)
    pipe.synchronize()
    gradients = [parameter.grad for parameter in pipe.model.parameters()]
    pipe.zero_grad()
    return Result(loss, gradients, [b.clone() for b in pipe.model.buffers()])


def assert_equal(got: Result, want: Result) -> None:
    """Bitwise."""
    assert torch.equal(got.loss, want.loss)
    for mine, theirs in zip(got.gradients, want.gradients, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(got.buffers, want.buffers, strict=True):
        assert torch.equal(mine, theirs)


def fresh_result(pipe: RoundPipe, kind: str = "plain") -> Result:
    """What a model with the same weights gives that never saw a fault, on fresh devices."""
    model = copy.deepcopy(pipe.model)
    switch = Switch()
    with (
        open_kind(kind) as pool,
        RoundPipe(model, model_run_config=CONFIG, devices=pool, name="fresh") as fresh,
    ):
        fresh.zero_grad()
        return train_once(fresh, switch)


@contextlib.contextmanager
def watched_pool(count: int = 2, checks: CpuChecks | None = None) -> Iterator[CheckedPool]:
    """Checked CPU devices that at the end have no misuse to report."""
    with open_cpu_pool(count, checks or CpuChecks()) as pool:
        yield pool
        reports = pool.reports()
    assert not reports, "\n".join(reports)


@contextlib.contextmanager
def open_kind(kind: str, count: int = 2) -> Iterator[DevicePool]:
    """``"plain"`` or ``"checked"`` CPU devices, or ``"accelerator"``."""
    if kind == "checked":
        with watched_pool(count) as pool:
            yield pool
    elif kind == "accelerator":
        with Accelerator().open(count) as accelerators:
            yield accelerators
    else:
        with open_cpu_pool(count) as plain:
            yield plain


@contextlib.contextmanager
def no_thread_left() -> Iterator[None]:
    """Whatever is opened inside is closed inside."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) - before == set()


def notes_of(error: BaseException) -> list[str]:
    """The notes that roundpipe left on an exception."""
    return [note for note in getattr(error, "__notes__", []) if note.startswith("roundpipe:")]
