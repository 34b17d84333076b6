"""One forward of the real model, watched closely."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roundpipe.hf import private
from roundpipe.hf.encode import plain_contents
from roundpipe.microbatch.tree import flatten, unflatten


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        module: the module.
        args: positional arguments, with containers as they were before the call.
        kwargs: keyword arguments, likewise.
        output: what it returned.
        args_after: the positional arguments with containers as they were after the call.
        kwargs_after: the keyword arguments, likewise.
        collected: what the library collected inside, by output name.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None
    args_after: tuple[Any, ...] = ()
    kwargs_after: Mapping[str, Any] = field(default_factory=dict)
    collected: Mapping[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Enter:
    """A module's forward begins."""

    call: ModuleCall


@dataclass(frozen=True)
class Leave:
    """A module's forward has ended."""

    call: ModuleCall


@dataclass(frozen=True)
class Use:
    """A parameter is passed to an operation or a module."""

    parameter: nn.Parameter


Event = Enter | Leave | Use


@dataclass(frozen=True)
class Probe:
    """What one forward did, and what came out.

    Attributes:
        events: in order.
        output: the model's output.
    """

    events: list[Event]
    output: Any


def run_probe(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    layers: Iterable[nn.Module],
) -> Probe:
    """Run ``model`` without gradients and note what happens outside of its layers.

    Args:
        model: the model; its hooks are as before afterwards, and so is the random state.
        kwargs: keyword arguments.
        layers: what may be a layer; the arguments of each call are kept, the inside is not watched.
    """
    watcher = _Watcher(model, layers)
    # Compiled layers would be compiled once more, for the watcher.
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.no_grad(), quiet_random(), watcher.hooked(), watcher:
        output = model(**kwargs)
    return Probe(watcher.events, snapshot(output))


class _Watcher(TorchFunctionMode):
    """Notes calls of modules, by hooks, and uses of parameters, as a mode."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._layers = {id(layer) for layer in layers}
        self._modules = _outside_of(model, self._layers)
        self._stack: list[ModuleCall] = []
        self._depth = 0  # of calls of layers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Shape or dtype of a parameter can be had without the parameter.
        if self._depth == 0 and isinstance(result, (torch.Tensor, tuple, list)):
            self._note_parameters([*args, *kwargs.values()])
        return result

    def _note_parameters(self, arguments: Iterable[Any]) -> None:
        for value in _flat(arguments):
            if isinstance(value, nn.Parameter):
                self.events.append(Use(value))

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """With hooks on all modules outside of the layers, and on the layers."""
        handles = []
        try:
            for module in self._modules:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = ModuleCall(module)
        self._stack.append(call)
        if self._depth == 0:
            self._note_parameters([*args, *kwargs.values()])
            self.events.append(Enter(call))
        if id(module) in self._layers:
            self._depth += 1
            call.args, call.kwargs = snapshot(args), snapshot(kwargs)
            call.collected = {
                key: list(values) for key, values in private.active_collector().items()
            }

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call = self._stack.pop()
        if id(module) in self._layers:
            self._depth -= 1
            call.args_after, call.kwargs_after = snapshot(args), snapshot(kwargs)
            before = call.collected
            call.collected = {
                k: v[len(before.get(k, ())) :] for k, v in private.active_collector().items()
            }
        if self._depth == 0:
            call.output = snapshot(output)
            self.events.append(Leave(call))


def _outside_of(model: nn.Module, layers: set[int]) -> list[nn.Module]:
    """The modules that can be reached from ``model`` without passing through a layer."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            if id(module) not in layers:
                waiting += list(module.children())
    return list(found.values())


def snapshot(value: Any) -> Any:
    """The value with new containers and tensors, so that later writes do not show."""
    leaves, structure = flatten(value)
    return unflatten(structure, [_snapshot_leaf(leaf) for leaf in leaves])


def _snapshot_leaf(leaf: Any) -> Any:
    if isinstance(leaf, UserDict):
        return snapshot(plain_contents(leaf))
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


class _NoDropout(TorchFunctionMode):
    """Makes dropout the identity.

    The parts of a cut model draw their random numbers in another order than the model itself. To
    compare them, what is random has to be off; the training flags stay as they are, because some
    models change their weights when the flags change.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name and name != "scaled_dot_product_attention":
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def quiet_random() -> Iterator[None]:
    """Without dropout, and with the random state put back afterwards."""
    with torch.random.fork_rng(devices=[]), _NoDropout():
        yield
