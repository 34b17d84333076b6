"""Copies of a model's containers with other modules in place of some of its parts.

Only the modules on the way from the root to a replaced part are copied, and shallowly: config,
hooks, buffers and all other parts are the original's own objects. So changes of the config and
hooks on the original are seen, and nothing of the original is edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from roundpipe.hf import private
from roundpipe.hf.stubs import active_run
from roundpipe.microbatch.tree import flatten


@dataclass(frozen=True)
class Skeleton:
    """A copy of a model with some parts replaced.

    Attributes:
        root: the copy.
        copies: (copy, original) for each copied container.
    """

    root: nn.Module
    copies: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)


class SkeletonPiece(nn.Module):
    """A piece that runs the library's forward over a skeleton."""

    skeleton: nn.Module

    def __init__(self, skeleton: Skeleton) -> None:
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
) -> Skeleton:
    """Copy ``model`` with some of its modules replaced.

    Args:
        model: the root.
        replacements: by ``id`` of the module in ``model``, what takes its place.
        keep_parameter: whether a copied container keeps a parameter of its own.
    """
    memo: dict[int, nn.Module] = dict(replacements)
    _graft(model, memo)
    by_id = {id(module): module for module in model.modules()}
    copies = [
        (copy, by_id[key])
        for key, copy in memo.items()
        if key not in replacements and copy is not by_id[key]
    ]
    for copy, original in copies:
        _adopt(copy, original, memo, keep_parameter)
    for copy, original in copies:
        _keep_dtype_and_device(copy, original)
    return Skeleton(memo[id(model)], copies)


def _graft(module: nn.Module, memo: dict[int, nn.Module]) -> nn.Module:
    """What stands for ``module``: its replacement, a copy, or itself if nothing in it changes."""
    known = memo.get(id(module))
    if known is not None:
        return known
    memo[id(module)] = module  # ends recursion where a module contains itself
    children = {
        name: child if child is None else _graft(child, memo)
        for name, child in module._modules.items()
    }
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = children
    memo[id(module)] = copy
    return copy


def _adopt(
    copy: nn.Module,
    original: nn.Module,
    memo: Mapping[int, nn.Module],
    keep_parameter: Callable[[nn.Parameter], bool],
) -> None:
    """Make the copied instance attributes point at copies where they pointed at originals."""
    for name, value in vars(original).items():
        if name == "_parameters":
            kept = {k: p for k, p in value.items() if p is None or keep_parameter(p)}
            copy.__dict__[name] = kept
        elif name == "_buffers":
            copy.__dict__[name] = dict(value)
        elif name != "_modules":
            copy.__dict__[name] = _translate(value, memo)
    if "gradient_checkpointing" in vars(copy):
        copy.__dict__["gradient_checkpointing"] = False  # the engine recomputes already


def _translate(value: Any, memo: Mapping[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, memo.get(id(value.__self__), value.__self__))
    if type(value) in (list, tuple):
        translated = [_translate(item, memo) for item in value]
        if any(new is not old for new, old in zip(translated, value, strict=True)):
            return type(value)(translated)
    elif type(value) is dict:
        replaced = {key: _translate(item, memo) for key, item in value.items()}
        if any(replaced[key] is not item for key, item in value.items()):
            return replaced
    return value


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
