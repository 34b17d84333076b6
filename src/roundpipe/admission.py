"""Which parameters a model may have: refused with the reason before anything is built on them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .compat import flatten_subclass
from .errors import InvalidTypeError


def check_parameters(model: nn.Module) -> None:
    """Refuse what cannot be streamed to devices and trained.

    Raises:
        InvalidTypeError: a parameter that is not in host memory, has no shape yet, or is of a kind
            whose parts cannot be told apart or trained.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise InvalidTypeError(
                f"{name!r} has no shape yet (a lazy module); run a small batch through the plain "
                "model before wrapping it, which makes it"
            )
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise InvalidTypeError(
                f"parameter {name!r} is on {parameter.device}; weights live in host memory: call "
                'model.to("cpu") before wrapping'
            )
        if type(parameter) is not nn.Parameter:
            _check_kind(name, parameter)


def _check_kind(name: str, parameter: torch.Tensor) -> None:
    kind = type(parameter).__name__
    if flatten_subclass(parameter) is None:
        raise InvalidTypeError(
            f"parameter {name!r} is a {kind}, which does not tell what it is made of "
            "(__tensor_flatten__), so it cannot be moved to a device as it is; give an "
            "nn.Parameter, or a subclass that does"
        )
    if parameter.requires_grad:
        raise InvalidTypeError(
            f"parameter {name!r} is a {kind} that requires grad; weights of a tensor subclass are "
            "streamed as they are but not trained: freeze it with requires_grad_(False) and train "
            "adapters, or convert it"
        )
