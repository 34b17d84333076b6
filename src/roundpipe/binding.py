"""Where an optimizer finds a gradient that is no ``.grad``, and where else the result goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Binding:
    """Where a parameter's gradient lies, and where its new value goes besides the parameter.

    Attributes:
        gradient: float32, bfloat16 or float16, of the parameter's shape. It is only read.
        published: receives the new value, rounded to its own dtype (those of ``gradient``); of the
            parameter's shape. ``None``: only the parameter itself is updated.
    """

    gradient: Tensor
    published: Tensor | None = None


class FusedOptimizer(Protocol):
    """An optimizer that can step from bindings: those of :mod:`roundpipe.optim`."""

    def step_fused(self, bindings: Mapping[Tensor, Binding], grad_scale: float = 1.0) -> None:
        """Step the bound parameters in one pass over memory."""
