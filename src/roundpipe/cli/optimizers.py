"""Optimizer and learning rate from their recipe sections."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
from collections.abc import Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import OptimizerSection, ScheduleSection

# These need something that a step over finished gradients does not give: a closure that evaluates
# the loss again, or sparse gradients.
_UNUSABLE = ("LBFGS", "SparseAdam")
_BASE_CLASSES = ("Optimizer", "KernelOptimizer")


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """The optimizer class called ``name``, in ``roundpipe.optim`` or else in ``torch.optim``.

    Raises:
        UsageError: there is none, or it cannot work from gradients alone.
    """
    known = {key: found for module in _modules() for key, found in _optimizers(module)}
    if name in _UNUSABLE:
        raise UsageError(f"optimizer.name: {name} cannot step on finished gradients; take AdamW")
    for module in reversed(_modules()):
        if name in dict(_optimizers(module)):
            return known[name]
    by_lower_case = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    hint = f"did you mean '{by_lower_case[near[0]]}'?" if near else f"known: {', '.join(known)}"
    raise UsageError(f"optimizer.name: there is no optimizer {name!r}; {hint}")


def build_optimizer(
    section: OptimizerSection, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Create the optimizer; fused, where the class can do that and the recipe does not object.

    Raises:
        UsageError: the class refuses an argument or these parameters; the message has its reason.
    """
    kind = find_optimizer(section.name)
    accepted = inspect.signature(kind).parameters
    options = {"lr": section.lr, "weight_decay": section.weight_decay, **section.options}
    if section.weight_decay == 0 and "weight_decay" not in accepted:
        del options["weight_decay"]
    if "fused" in accepted:
        options.setdefault("fused", True)
    for key, value in options.items():
        if key not in accepted:
            raise UsageError(
                f"optimizer.options: {section.name} takes no {key!r}; it takes "
                f"{', '.join(name for name in accepted if name != 'params')}"
            )
        options[key] = _argument(key, value)
    try:
        return kind(list(parameters), **options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"optimizer: {section.name} refuses: {error}") from error


def lr_factor(section: ScheduleSection, total_steps: int, step: int) -> float:
    """The share of the full learning rate in step ``step`` (the first is 0) of ``total_steps``."""
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.kind == "constant":
        return 1.0
    progress = (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps)
    progress = min(progress, 1.0)
    fall = progress if section.kind == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1.0 - fall * (1.0 - section.final_ratio)


def build_schedule(
    section: ScheduleSection, total_steps: int, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    """The scheduler that applies :func:`lr_factor` to ``optimizer``."""
    factor = partial(lr_factor, section, total_steps)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _argument(key: str, value: Any) -> Any:
    """A value of the recipe as the optimizer takes it."""
    if isinstance(value, list):
        return tuple(value)
    if key.endswith("dtype") and isinstance(value, str):
        dtype = getattr(torch, value, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"optimizer.options.{key}: {value!r} is no dtype; try float32")
        return dtype
    return value


def _modules() -> list[ModuleType]:
    names = ("torch.optim", "roundpipe.optim")
    return [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]


def _optimizers(module: ModuleType) -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    for name, value in vars(module).items():
        is_class = isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        if is_class and name not in _BASE_CLASSES:
            yield name, value
