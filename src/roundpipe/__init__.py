"""roundpipe: train models larger than the memory of the accelerators at hand."""

from importlib import import_module
from types import ModuleType

from roundpipe.config import RoundPipeRunConfig
from roundpipe.errors import RoundPipeError
from roundpipe.facade import OptimizerCtx
from roundpipe.grad_scaler import GradScaler
from roundpipe.pipeline import RoundPipe
from roundpipe.plan import ModelExecutePlan
from roundpipe.recompute import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe.verification import verify
from roundpipe.wrapping import wrap_model_to_roundpipe

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "ModelExecutePlan",
    "OptimizerCtx",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipeRunConfig",
    "doing_recompute",
    "get_recompute_data",
    "save_for_recompute",
    "verify",
    "wrap_model_to_roundpipe",
]

_LAZY = ("hf", "optim")  # hf imports transformers, and neither is needed to import the package


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return import_module(f"roundpipe.{name}")
    raise AttributeError(f"module 'roundpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
