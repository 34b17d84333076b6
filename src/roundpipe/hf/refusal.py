"""The one exception for models that cannot be cut into layers."""

from __future__ import annotations

from torch import nn

from roundpipe.errors import RoundPipeError

WAY_OUT = (
    "pass the layers yourself as nn.Sequential, or wrap the model with "
    "use_sequential_preset=False, which wraps its parts by size"
)


class CutRefusedError(RoundPipeError, NotImplementedError):
    """A model cannot be cut at its layers, or a call cannot be run by a cut model.

    Attributes:
        model_class: name of the model's class.
        reason: what was found.
        way_out: what to do instead.
        part: name of the part of the model that is concerned, if it is one part.
    """

    def __init__(
        self, model_class: str, reason: str, way_out: str = WAY_OUT, part: str | None = None
    ) -> None:
        super().__init__(model_class, reason, way_out, part)
        self.part = part
        self.model_class = model_class
        self.reason = reason
        self.way_out = way_out

    def __str__(self) -> str:
        return (
            f"{self.model_class} cannot run as a sequence of layers: {self.reason}; {self.way_out}"
        )


def class_name(model: nn.Module) -> str:
    """The name of the model's class, for messages."""
    return type(model).__name__
