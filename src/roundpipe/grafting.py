"""Copies of a model's containers with other modules in place of some of its parts.

Only the modules on the way from the root to a replaced part are copied, and shallowly: config,
hooks, buffers and all other parts are the original's own objects. So changes of the config and
hooks on the original are seen, and nothing of the original is edited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

_STRUCTURE = ("_modules", "_parameters", "_buffers")


class Graft:
    """A copy of a model with some parts replaced.

    Attributes:
        root: the copy; the model itself if nothing in it was replaced.
        copies: (copy, original) for each copied container.
    """

    def __init__(
        self,
        root: nn.Module,
        copies: list[tuple[nn.Module, nn.Module]],
        stands_for: Mapping[int, nn.Module],
    ) -> None:
        self.root = root
        self.copies = copies
        self._stands_for = stands_for  # by id of a module of the model
        self._pulled: list[dict[str, Any]] = [{} for _ in copies]

    def pull(self) -> None:
        """Take over what was set on the originals since: training flags, attributes, buffers."""
        for index, (copy, original) in enumerate(self.copies):
            for name, value in vars(original).items():
                if name not in _STRUCTURE:
                    copy.__dict__[name] = _translate(value, self._stands_for)
            copy.__dict__["_buffers"] = dict(original._buffers)
            self._pulled[index] = dict(vars(copy))

    def push(self) -> None:
        """Give the originals what the copies' code has set since :meth:`pull`."""
        for (copy, original), pulled in zip(self.copies, self._pulled, strict=True):
            for name, value in vars(copy).items():
                if name not in _STRUCTURE and value is not pulled.get(name):
                    original.__dict__[name] = value
            original._buffers.update(copy._buffers)


def graft(
    model: nn.Module,
    replacements: Mapping[int, nn.Module],
    keep_parameter: Callable[[nn.Parameter], bool] = lambda _parameter: True,
) -> Graft:
    """Copy ``model`` with some of its modules replaced.

    Args:
        model: the root.
        replacements: by ``id`` of the module in ``model``, what takes its place.
        keep_parameter: whether a copied container keeps a parameter of its own.
    """
    memo: dict[int, nn.Module] = dict(replacements)
    _copy_containers(model, memo)
    by_id = {id(module): module for module in model.modules()}
    copies = [
        (copy, by_id[key])
        for key, copy in memo.items()
        if key not in replacements and copy is not by_id[key]
    ]
    for copy, original in copies:
        _adopt(copy, original, memo, keep_parameter)
    return Graft(memo[id(model)], copies, memo)


def _copy_containers(module: nn.Module, memo: dict[int, nn.Module]) -> nn.Module:
    """What stands for ``module``: its replacement, a copy, or itself if nothing in it changes."""
    known = memo.get(id(module))
    if known is not None:
        return known
    memo[id(module)] = module  # ends recursion where a module contains itself
    children = {
        name: child if child is None else _copy_containers(child, memo)
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
