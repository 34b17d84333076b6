"""The library's ``generate`` over another forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from roundpipe.hf.refusal import CutRefusedError, class_name


def generating_copy(model: nn.Module, forward: Callable[..., Any]) -> Any:
    """A shallow copy of a model of transformers whose ``generate`` calls ``forward``.

    Args:
        model: the model, or a PEFT model around it; it is not changed.
        forward: takes the keyword arguments that ``generate`` gives to the model.

    Raises:
        CutRefusedError: the model has an encoder apart, or cannot generate.
    """
    base = getattr(model, "get_base_model", None)
    inner: Any = base() if callable(base) else model
    if not callable(getattr(inner, "can_generate", None)) or not inner.can_generate():
        raise CutRefusedError(
            class_name(inner), "it cannot generate", "use a class with a language model head"
        )
    if getattr(inner.config, "is_encoder_decoder", False):
        raise CutRefusedError(
            class_name(inner),
            "generate runs its encoder apart from the layers of the sequence",
            "call synchronize(), then generate of the plain model",
        )
    cls = type(inner)

    def run(_self: Any, **kwargs: Any) -> Any:
        return forward(**kwargs)

    # The library looks up which arguments the model takes.
    vars(run)["__signature__"] = inspect.signature(cls.forward)
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": run}
    twin: Any = type(cls.__name__, (cls,), members)
    copy = twin.__new__(twin)
    copy.__dict__.update(inner.__dict__)
    return copy
