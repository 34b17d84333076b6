"""Layers that tell which version of their parameters they computed with, and steps to match."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

NUM_LAYERS = 3
NUM_MICROBATCH = 2
PLAN = ModelExecutePlan(
    [range(1), range(1, 2)], [range(2, 3), range(1, 2), range(1)]
)  # each layer its own stage, and a recompute of all but the last
CONFIG = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLAN)
VISITS = NUM_MICROBATCH * (2 * NUM_LAYERS - 1)
"""How often a fused call runs a layer: the fused stage once, the others twice."""


class Versioned(nn.Module):
    """Adds its weights, which hold the number of the version; notes what it saw."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen = seen  # shared by replicas; appending is safe from any thread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.extend(self.weight.tolist())
        return x + self.weight


def build(seen: list[float]) -> nn.Sequential:
    return nn.Sequential(*(Versioned(seen) for _ in range(NUM_LAYERS)))


def advance(pipe: RoundPipe) -> None:
    """A step function: the masters become the next version."""
    with torch.no_grad():
        for master in pipe.parameters():
            master.add_(1.0)
            master.grad = None


def scaled_sum(output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient with respect to every weight is the sum of the scales."""
    return (output * scale).sum()


class Play:
    """Runs a program of calls and steps, a letter each.

    ``C`` fused call, ``F`` forward and user-driven backward, ``E`` evaluation, ``A`` asynchronous
    step, ``S`` synchronous step, ``Y`` synchronize. And steps of an optimizer, which need the
    gradients of exactly one call to make the next version: ``L`` layer by layer, ``B``
    asynchronous.
    """

    def __init__(
        self,
        pipe: RoundPipe,
        seen: list[float],
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        self.pipe = pipe
        masters = list(pipe.optim_parameters())
        # One call's gradient is 4 (the rows) for every weight.
        self._optimizer = optimizer_class(masters, lr=0.25, maximize=True)  # type: ignore[call-arg]
        self._seen = seen
        self.versions: list[float] = []

    def run(self, program: str) -> list[float]:
        """Returns the version that each call computed with, after checking that it was one."""
        actions: dict[str, Callable[[], Any]] = {
            "C": lambda: self._call(self._fused),
            "F": lambda: self._call(self._driven),
            "E": lambda: self._call(self._evaluate),
            "A": lambda: self.pipe.step(advance, True, self.pipe),
            "S": lambda: self.pipe.step(advance, False, self.pipe),
            "L": lambda: self.pipe.step(self._optimizer),
            "B": lambda: self.pipe.step(self._optimizer, is_async=True),
            "Y": self.pipe.synchronize,
        }
        for letter in program:
            actions[letter]()
        return self.versions

    def _call(self, call: Callable[[], int]) -> None:
        self._seen.clear()
        visits = call()
        assert len(self._seen) == 2 * visits
        (version,) = set(self._seen)  # all layers, microbatches and recomputes saw the same
        self.versions.append(version)

    def _fused(self) -> int:
        self.pipe.forward_backward((torch.ones(4, 2),), label=torch.ones(4, 1), loss_fn=scaled_sum)
        return VISITS

    def _driven(self) -> int:
        config = RoundPipeRunConfig(
            execute_plan=ModelExecutePlan(
                [range(1), range(1, 3)], [range(2, 3), range(1, 2), range(1)]
            )
        )
        self.pipe(torch.ones(4, 2), roundpipe_run_config=config).sum().backward()
        return NUM_MICROBATCH * 2 * NUM_LAYERS

    def _evaluate(self) -> int:
        config = RoundPipeRunConfig(
            execute_plan=ModelExecutePlan([range(2), range(2, 3)], [range(2, 3), range(2)])
        )
        with torch.no_grad():
            self.pipe(torch.ones(4, 2), roundpipe_run_config=config)
        return NUM_MICROBATCH * NUM_LAYERS


class Gate:
    """A place in another thread where it stands until the test lets it go on."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def stand(self) -> None:
        self._reached.set()
        self._opened.wait()

    def wait_reached(self) -> None:
        self._reached.wait()

    def open(self) -> None:
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()


def expected(program: str) -> Iterator[float]:
    """The versions that the calls of a program are entitled to."""
    made = entitled = 0
    for letter in program:
        if letter in "CFE":
            yield entitled
        elif letter in "AB":
            made, entitled = made + 1, made
        elif letter in "SL":
            made = entitled = made + 1
        else:
            entitled = made
