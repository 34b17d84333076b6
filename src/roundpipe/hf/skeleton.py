"""Skeletons: a model's containers, copied, with stand-ins for its layers and other parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.grafting import Graft, graft
from roundpipe.hf import private
from roundpipe.hf.stubs import active_run
from roundpipe.microbatch.tree import flatten


class SkeletonPiece(nn.Module):
    """A piece that runs the library's forward over a skeleton."""

    skeleton: nn.Module

    def __init__(self, skeleton: Graft) -> None:
        super().__init__()
        self.skeleton = skeleton.root
        self._copies = tuple(skeleton.copies)  # a plain tuple: the originals are no submodules
        self.refresh_flags()

    def refresh_flags(self) -> None:
        """Take over the training flags of the original's containers.

        All other modules are the original's own objects.
        """
        for copy, original in self._copies:
            copy.training = original.training

    def train(self, mode: bool = True) -> SkeletonPiece:
        """Set the flags of all modules, and of the containers in the original."""
        super().train(mode)
        for copy, original in self._copies:
            copy.training = original.training = mode
        return self


def build_skeleton(
    model: nn.Module,
    replacements: Mapping[int, nn.Module],
    keep_parameter: Callable[[nn.Parameter], bool],
) -> Graft:
    """Copy ``model`` with some of its modules replaced; see :func:`roundpipe.grafting.graft`."""
    skeleton = graft(model, replacements, keep_parameter)
    for copy, original in skeleton.copies:
        if "gradient_checkpointing" in vars(copy):
            copy.__dict__["gradient_checkpointing"] = False  # the engine recomputes already
        _keep_dtype_and_device(copy, original)
    return skeleton


def _keep_dtype_and_device(copy: nn.Module, original: nn.Module) -> None:
    """Let the first parameter of ``copy`` have the dtype that the original's first one has.

    The library takes ``model.dtype`` and ``model.device`` from it, and the copy may lack it.
    """
    first = next(original.parameters(), None)
    mine = next(copy.parameters(), None)
    if first is None or not private.is_pretrained(original):
        return
    if mine is not None and _first_float_dtype(copy) == _first_float_dtype(original):
        return
    dtype = _first_float_dtype(original) or first.dtype
    cls = type(original)

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[torch.Tensor]:
        yield torch.empty(0, dtype=dtype, device=_piece_device(self))
        yield from nn.Module.parameters(self, recurse)

    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,  # the library keeps tables by the class's full name
        "parameters": parameters,
    }
    copy.__class__ = type(cls.__name__, (cls,), members)


def _first_float_dtype(module: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _piece_device(module: nn.Module) -> torch.device:
    run = active_run()
    if run is not None:
        return run.device
    named = next(module.named_parameters(), None)
    return torch.device("cpu") if named is None else named[1].device


def first_device(tree: Any, module: nn.Module) -> torch.device:
    """The device of the first tensor in ``tree``, else of the first parameter, else the CPU."""
    leaves, _ = flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found = next(iter([*tensors, *module.parameters()][:1]), None)
    return found.device if found is not None else torch.device("cpu")
