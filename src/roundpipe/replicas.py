"""A layer's module tree with other tensors in it, so that several devices can run it at once.

The user's modules are never edited: a replica is a new object for every module of the tree, with
the same attributes, and with device tensors where the original has parameters and buffers.
Everything else is shared by reference: hooks, configuration, plain Python state.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .compat import compile_call_like, compiled_module_of, is_compiled, recompile_like

_CONTAINERS = (list, tuple, dict)


BufferName = tuple[str, str]  # (path of the module in the layer, name of the buffer)


class LayerOnDevice:
    """One layer's replica, and its buffers by name.

    Attributes:
        original: the user's layer.
        module: its replica.
    """

    def __init__(self, original: nn.Module, replica: nn.Module) -> None:
        self.original = original
        self.module = replica
        # A place for a buffer may be empty at first, and filled by a forward.
        self._holders = _holders_of_buffers(replica)

    @functools.cached_property
    def is_compiled(self) -> bool:
        """Whether ``torch.compile`` is at work in it."""
        return any(is_compiled(module) for module in self.original.modules())

    @property
    def has_buffers(self) -> bool:
        """Whether any module of the layer has a place for a buffer."""
        return bool(self._holders)

    def buffers(self) -> dict[BufferName, torch.Tensor]:
        """The replica's buffers now."""
        return _buffers_in(self._holders)

    def original_buffers(self) -> dict[BufferName, torch.Tensor]:
        """The user's buffers, in host memory."""
        return _buffers_in(_holders_of_buffers(self.original))

    def set_buffers(self, tensors: Mapping[BufferName, torch.Tensor]) -> None:
        """Make these the replica's buffers; a place that is not named becomes empty."""
        for path, holder in self._holders.items():
            for name in holder._buffers:
                holder._buffers[name] = tensors.get((path, name))


def _holders_of_buffers(module: nn.Module) -> dict[str, nn.Module]:
    return {path: holder for path, holder in module.named_modules() if holder._buffers}


def _buffers_in(holders: Mapping[str, nn.Module]) -> dict[BufferName, torch.Tensor]:
    return {
        (path, name): buffer
        for path, holder in holders.items()
        for name, buffer in holder._buffers.items()
        if buffer is not None
    }


def replicate(
    module: nn.Module,
    parameters: Mapping[int, nn.Parameter],
    buffers: Mapping[int, torch.Tensor],
) -> nn.Module:
    """A replica of ``module``.

    Args:
        module: the original.
        parameters: by identity of each original parameter, what the replica holds instead.
        buffers: likewise for buffers; one that is not named is shared.

    Returns:
        The replica. Attributes that a forward rebinds on it are lost with it.
    """
    memo: dict[int, nn.Module] = {}
    replica = _copy_tree(module, parameters, buffers, memo)
    originals = {**parameters, **buffers, **memo}
    for copy in memo.values():
        _redirect(copy.__dict__, originals)
    return replica


def _copy_tree(
    module: nn.Module,
    parameters: Mapping[int, nn.Parameter],
    buffers: Mapping[int, torch.Tensor],
    memo: dict[int, nn.Module],
) -> nn.Module:
    compiled = compiled_module_of(module)
    if compiled is not None:
        inner = _copy_tree(compiled, parameters, buffers, memo)
        replica = memo[id(module)] = recompile_like(module, inner)
        return replica
    replica = module.__class__.__new__(module.__class__)
    memo[id(module)] = replica
    state = dict(module.__dict__)
    state["_parameters"] = {
        name: None if value is None else parameters[id(value)]
        for name, value in module._parameters.items()
    }
    state["_buffers"] = {
        name: None if value is None else buffers.get(id(value), value)
        for name, value in module._buffers.items()
    }
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        if child is None:
            children[name] = None
        else:
            known = memo.get(id(child))
            children[name] = known or _copy_tree(child, parameters, buffers, memo)
    state["_modules"] = children
    # Not through setattr: Module.__setattr__ would try to register what it is given.
    replica.__dict__.update(state)
    compile_call_like(module, replica)
    return replica


def _redirect(state: dict[str, Any], originals: Mapping[int, Any]) -> None:
    """Attributes that point at an original (RNN's flat weights, patched forwards) follow it."""
    for name, value in state.items():
        kind = type(value)
        if kind is types.MethodType:
            state[name] = _redirect_method(value, originals)
        elif kind in _CONTAINERS and name not in ("_parameters", "_buffers", "_modules"):
            items = value.values() if kind is dict else value
            if any(id(item) in originals for item in items):
                state[name] = _redirect_container(value, originals)
        elif isinstance(value, nn.Parameter | nn.Module) and id(value) in originals:
            state[name] = originals[id(value)]


def _redirect_method(method: types.MethodType, originals: Mapping[int, Any]) -> Callable[..., Any]:
    owner = originals.get(id(method.__self__))
    return method if owner is None else types.MethodType(method.__func__, owner)


def _redirect_container(value: Any, originals: Mapping[int, Any]) -> Any:
    if isinstance(value, dict):
        return {key: originals.get(id(item), item) for key, item in value.items()}
    return type(value)(originals.get(id(item), item) for item in value)
