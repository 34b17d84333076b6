"""Python state around a layer, before and after its forward."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

State = dict[str, object]

_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def fingerprint(value: object, depth: int = 0) -> object:
    """Something that is equal later if nobody rebound or changed ``value``."""
    if isinstance(value, _ATOMS):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return (id(value), -1 if value.is_inference() else value._version)
    if depth < 3:
        if isinstance(value, dict):
            return (id(value), [(id(k), fingerprint(v, depth + 1)) for k, v in value.items()])
        if isinstance(value, list | tuple | set | frozenset):
            return (id(value), [fingerprint(item, depth + 1) for item in value])
    return (id(value), repr(value) if type(value).__module__ in ("itertools", "random") else None)


def attributes_of(layer: nn.Module) -> State:
    """The plain attributes of all modules of a layer, by their names in it.

    Those of torch's own modules are caches (an LSTM lists its weights anew).
    """
    state: State = {}
    for path, module in layer.named_modules():
        if type(module).__module__.startswith("torch."):
            continue
        prefix = f"{path}." if path else ""
        for name, value in module.__dict__.items():
            if name not in _OWN and not name.endswith("hooks") and not _is_bound(value):
                state[f"self.{prefix}{name}"] = fingerprint(value)
    return state


def surroundings_of(layer: nn.Module) -> State:
    """Globals, class attributes and closures that the code of a layer's modules names."""
    state: State = {}
    for module in layer.modules():
        kind = type(module)
        if kind.__module__.split(".")[0] in ("torch", "transformers"):
            continue
        for name, value in vars(kind).items():
            if not name.startswith("__") and isinstance(value, list | dict | set | int | float):
                state[f"{kind.__name__}.{name}"] = fingerprint(value)
        for function in _functions(kind):
            state.update(_outside(function))
    return state


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for value in vars(kind).values():
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(inner, types.FunctionType):
            yield inner


def _outside(function: types.FunctionType) -> State:
    state: State = {}
    code = function.__code__
    for name in code.co_names:
        value = function.__globals__.get(name)
        if name in function.__globals__ and not isinstance(value, types.ModuleType | type):
            state[f"the global {name}"] = fingerprint(value)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if name != "__class__":
            state[f"the outer variable {name}"] = fingerprint(_content(cell))
    return state


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_bound(value: object) -> bool:
    return isinstance(value, types.MethodType)


def foreign_random_state() -> dict[str, object]:
    """The states of generators that are not torch's."""
    import random

    states: dict[str, object] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names whose value is another one, or new, or gone."""
    names = [name for name in after if name not in before or before[name] != after[name]]
    return names + [name for name in before if name not in after]
