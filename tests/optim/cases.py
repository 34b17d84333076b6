"""Every optimizer with every combination of its flags, and the torch optimizer it must equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roundpipe import optim
from roundpipe.optim.base import KernelOptimizer
from roundpipe.optim.lion import TorchLion

NAMES = [
    *("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax"),
    *("NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "Lion"),
]
FUSED_IN_TORCH = ("Adam", "AdamW", "SGD", "Adagrad")

_BOTH = (False, True)
_DECAY = (0.0, 0.1)
_GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Adam": {
        "betas": ((0.9, 0.999), (0.3, 0.6)),
        "weight_decay": _DECAY,
        "amsgrad": _BOTH,
        "decoupled_weight_decay": _BOTH,
    },
    "AdamW": {"weight_decay": _DECAY, "amsgrad": _BOTH},
    "SGD": {
        "lr": (0.01,),
        "momentum": (0.0, 0.9),
        "dampening": (0.0, 0.2),
        "nesterov": _BOTH,
        "weight_decay": _DECAY,
    },
    "Adagrad": {
        "lr_decay": (0.0, 0.1),
        "initial_accumulator_value": (0.0, 0.5),
        "weight_decay": _DECAY,
    },
    "RMSprop": {
        "alpha": (0.99, 0.9),
        "momentum": (0.0, 0.9),
        "centered": _BOTH,
        "weight_decay": _DECAY,
    },
    "Adamax": {"weight_decay": _DECAY},
    "NAdam": {"weight_decay": _DECAY, "decoupled_weight_decay": _BOTH},
    "RAdam": {"weight_decay": _DECAY, "decoupled_weight_decay": _BOTH},
    "Adadelta": {"rho": (0.9, 0.4), "weight_decay": _DECAY},
    "ASGD": {"t0": (1e6, 3.0), "weight_decay": _DECAY},
    "Rprop": {"etas": ((0.5, 1.2), (0.9, 1.01))},
    "Lion": {"weight_decay": _DECAY, "betas": ((0.9, 0.99), (0.4, 0.3))},
}


@dataclass(frozen=True)
class Case:
    """One optimizer with one combination of flags."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        flags = ",".join(f"{key}={value}" for key, value in self.flags.items())
        return f"{self.name}({flags})".replace(" ", "")

    def ours(self, params: Any, **more: Any) -> KernelOptimizer:
        made = getattr(optim, self.name)(params, **self.flags, **more)
        assert isinstance(made, KernelOptimizer)
        return made

    def reference(self, params: Any, **more: Any) -> torch.optim.Optimizer:
        torch_class = getattr(torch.optim, self.name, TorchLion)
        made = torch_class(params, **self.flags, **more)
        assert isinstance(made, torch.optim.Optimizer)
        return made


def _cases() -> Iterator[Case]:
    for name, grid in _GRIDS.items():
        for values in itertools.product(*grid.values(), _BOTH):
            flags = dict(zip((*grid, "maximize"), values, strict=True))
            impossible = flags.get("nesterov") and (not flags["momentum"] or flags["dampening"])
            if not impossible:
                yield Case(name, flags)


CASES = tuple(_cases())
PLAIN = tuple(Case(name) for name in NAMES)


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def copies(params: list[Tensor]) -> list[Tensor]:
    return [param.detach().clone().requires_grad_() for param in params]


def train(
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    steps: int = 10,
    seed: int = 1,
    change: Callable[[Tensor], Tensor] = lambda grad: grad,
) -> None:
    """Step with the same random gradients whoever asks; the same seed goes on where it left off."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = change(torch.randn(param.shape, generator=generator))
        optimizer.step()


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        scale = other.abs().clamp_min(1)
        error = ((one - other).abs() / scale).max().item() if other.numel() else 0.0
        assert error <= tolerance, f"parameter {index} of shape {tuple(other.shape)}: {error:.2e}"
