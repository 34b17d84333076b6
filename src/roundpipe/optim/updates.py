"""What a step is asked to do: which parameters, from which gradients, and into what besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundpipe.binding import Binding
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.optim.layout import is_dense
from roundpipe.optim.native import DTYPE_CODES

Group = dict[str, Any]
State = dict[str, Any]


@dataclass(frozen=True)
class Update:
    """One parameter to be stepped.

    Attributes:
        group: its parameter group.
        param: the parameter.
        grad: its gradient.
        published: also receives the new value, or ``None``.
        ordinal: its number among all parameters of the optimizer.
    """

    group: Group
    param: Tensor
    grad: Tensor
    published: Tensor | None
    ordinal: int


def updates_of(groups: list[Group], bindings: Mapping[Tensor, Binding] | None) -> Iterator[Update]:
    """The updates of one step, in the order of the parameter groups.

    Args:
        groups: an optimizer's parameter groups.
        bindings: the parameters to step; ``None``: all that have a ``.grad``.

    Raises:
        InvalidTypeError: a bound tensor has an impossible dtype, device or layout.
        InvalidValueError: a bound tensor has another shape than its parameter, or a key is in none
            of the groups.
    """
    bound = 0
    everything = ((group, param) for group in groups for param in group["params"])
    for ordinal, (group, param) in enumerate(everything):
        if bindings is None:
            if param.grad is not None:
                yield Update(group, param, param.grad, None, ordinal)
        elif (binding := bindings.get(param)) is not None:
            bound += 1
            _check_bound(param, "gradient", binding.gradient)
            if binding.published is not None:
                _check_bound(param, "published", binding.published)
            yield Update(group, param, binding.gradient, binding.published, ordinal)
    if bindings is not None and bound < len(bindings):
        raise InvalidValueError(
            f"{len(bindings) - bound} of {len(bindings)} bindings are for tensors that are no "
            "parameters of this optimizer; bind the tensors of its param_groups, or add them with "
            "add_param_group first"
        )


def _check_bound(param: Tensor, name: str, tensor: Tensor) -> None:
    if param.device.type != "cpu":
        raise InvalidTypeError(
            f"a {name} tensor is bound to a parameter of shape {tuple(param.shape)} on "
            f"{param.device}; expected a parameter on the CPU: set .grad and call step() for others"
        )
    if tensor.dtype not in DTYPE_CODES or not _is_plain(tensor):
        raise InvalidTypeError(
            f"the {name} tensor of a parameter of shape {tuple(param.shape)} is a "
            f"{type(tensor).__name__} of {tensor.dtype} ({tensor.layout}) on {tensor.device}; "
            "expected a strided float32, bfloat16 or float16 tensor on the CPU: convert it, or set "
            ".grad and call step()"
        )
    if tensor.shape != param.shape:
        raise InvalidValueError(
            f"the {name} tensor has shape {tuple(tensor.shape)}, its parameter "
            f"{tuple(param.shape)}; bind tensors of the parameter's shape"
        )


def _is_plain(tensor: Tensor) -> bool:
    """A strided CPU tensor, and no subclass that may keep its data elsewhere."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


def kernels_take(update: Update) -> bool:
    """Whether the kernels can do this update; torch does the others."""
    group, param, grad = update.group, update.param, update.grad
    return (
        param.dtype is torch.float32
        and grad.dtype in DTYPE_CODES
        and _is_plain(param)
        and _is_plain(grad)
        and is_dense(param)
        and not group.get("capturable", False)
        and not group.get("differentiable", False)
    )


def split(
    updates: list[Update], condition: Callable[[Update], bool]
) -> tuple[list[Update], list[Update]]:
    """The updates that fulfil the condition, and the others."""
    chosen: list[Update] = []
    others: list[Update] = []
    for update in updates:
        (chosen if condition(update) else others).append(update)
    return chosen, others
