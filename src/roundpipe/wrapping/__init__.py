"""Wrapping models that are no ``nn.Sequential``."""

from roundpipe.wrapping.parted import NoSequenceError, PartedModel
from roundpipe.wrapping.wrap import UnknownModelError, wrap_model_to_roundpipe

__all__ = ["NoSequenceError", "PartedModel", "UnknownModelError", "wrap_model_to_roundpipe"]
