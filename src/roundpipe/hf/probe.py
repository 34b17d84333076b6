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
    """A parameter is passed to an operation."""

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
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep_arguments: Iterable[nn.Module],
) -> Probe:
    """Run ``model`` without gradients and note what happens.

    Args:
        model: the model; its hooks are as before afterwards, and so is the random state.
        args: positional arguments.
        kwargs: keyword arguments.
        keep_arguments: modules of which the arguments of each call are kept.
    """
    events: list[Event] = []
    wanted = {id(module) for module in keep_arguments}
    with torch.no_grad(), quiet_random(), _hooks(model, events, wanted):
        with _ParameterWatch(events):
            output = model(*args, **kwargs)
    return Probe(events, output)


@contextmanager
def _hooks(model: nn.Module, events: list[Event], wanted: set[int]) -> Iterator[None]:
    stack: list[ModuleCall] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = ModuleCall(module)
        if id(module) in wanted:
            call.args, call.kwargs = snapshot(args), snapshot(kwargs)
            call.collected = {key: list(values) for key, values in _collector().items()}
        stack.append(call)
        events.append(Enter(call))

    def leave(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call = stack.pop()
        call.output = output
        if id(module) in wanted:
            call.args_after, call.kwargs_after = snapshot(args), snapshot(kwargs)
            before = call.collected
            call.collected = {k: v[len(before.get(k, ())) :] for k, v in _collector().items()}
        events.append(Leave(call))

    handles = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _collector() -> Mapping[str, list[torch.Tensor]]:
    return private.active_collector() or {}


def snapshot(value: Any) -> Any:
    """The value with new containers, so that later writes into the old ones do not show."""
    leaves, structure = flatten(value)
    leaves = [plain_contents(leaf) if isinstance(leaf, UserDict) else leaf for leaf in leaves]
    return unflatten(structure, leaves)


class _ParameterWatch(TorchFunctionMode):
    """Notes every parameter that an operation gets; reading its shape or dtype is no operation."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self._events = events

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (torch.Tensor, tuple, list)):
            for value in _flat([*args, *(kwargs or {}).values()]):
                if isinstance(value, nn.Parameter):
                    self._events.append(Use(value))
        return result


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
