"""Modules that stand in for others in the two copies of the model's skeleton.

The library's own ``forward`` runs over them: a :class:`LayerStub` in place of each layer, a
:class:`HeldStub` in place of what only the prefix computes, a :class:`Watched` around it in the
prefix, an :class:`Absent` in place of what a piece never uses. They keep no data of a call. What
happens at a call is decided by the run that is active in the thread, see :func:`activate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from roundpipe.hf.refusal import CutRefusedError

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)


class Run(Protocol):
    """One pass of the library's forward over a skeleton."""

    model_class: str
    device: torch.device

    def position(self) -> str:
        """How far the forward has come, in words."""

    def changes_in_place(self, name: str) -> None:
        """The function ``name`` is about to write into, or from, a stand-in."""

    def call(self, element: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer is called; returns what stands in for its output."""

    def held(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """A held module is called in the tail; (False, None) lets the module itself run."""

    def note_held(self, name: str, output: Any) -> None:
        """A held module has run in the prefix."""

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation had a stand-in for a layer's output among its inputs."""

    def value_read(self, name: str, args: Any) -> None:
        """The value of a stand-in among ``args`` is read by the function ``name``."""


# Several threads run pieces of one model at a time, and the library's code between a piece and its
# stubs takes no extra argument: the active run is local to the thread's context.
_RUN: ContextVar[Run | None] = ContextVar("roundpipe_hf_run", default=None)


@contextmanager
def activate(run: Run) -> Iterator[None]:
    """Let the stubs that are called inside the block report to ``run``."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def active_run() -> Run | None:
    """The run of this thread, if any."""
    return _RUN.get()


def _refuse(reason: str, part: str) -> NoReturn:
    run = _RUN.get()
    raise CutRefusedError(run.model_class if run else "the model", reason, part=part)


def is_plain(value: object) -> bool:
    """Whether ``value`` is an immutable constant, or a tuple, list, set or dict of such."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, (tuple, list, set, frozenset)):
        return type(value).__module__ == "builtins" and all(is_plain(item) for item in value)
    return type(value) is dict and all(is_plain(item) for item in value.values())


class View:
    """A read-only window on a module: plain values come through, submodules as views.

    The skeleton's code reads things like ``layer.attention_type``. Tensors, methods and writes
    would reach the weights of the original behind the back of the engine, so they are refused.
    """

    __slots__ = ("_module", "_part", "_path")

    def __init__(self, module: nn.Module, part: str, path: str) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_part", part)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # deepcopy and pickle look for their methods
            raise AttributeError(name)
        return self._seen(getattr(self._module, name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(f"its forward sets {self._path}.{name} from outside of it", self._part)

    def __reduce__(self) -> tuple[type[View], tuple[nn.Module, str, str]]:
        return View, (self._module, self._part, self._path)

    def __len__(self) -> int:
        return len(self._module)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._module, nn.ModuleDict):
            return iter(self._module.keys())
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        return self._seen(self._module[key], f"[{key!r}]")

    def __contains__(self, key: object) -> bool:
        return key in self._module

    def _seen(self, value: Any, name: str) -> Any:
        if is_plain(value):
            return value
        if isinstance(value, nn.Module):
            return View(value, self._part, f"{self._path}.{name}")
        if name in ("keys", "__len__") and isinstance(self._module, nn.ModuleDict):
            return value
        kind = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        return _refuse(
            f"its forward uses {self._path}.{name} (a {kind}) from outside of {self._part}",
            self._part,
        )


class _Stub(nn.Module):
    """Common part: attribute reads go to a view of the module that this one stands for."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.training = module.training
        self.stub_name = name
        self.stub_view = View(module, name, name)  # from here on, writes are refused

    def __getattr__(self, name: str) -> Any:
        view = self.__dict__.get("stub_view")
        if view is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(view, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "stub_view" in self.__dict__ and name not in self.__dict__ and not name.startswith("_"):
            setattr(self.stub_view, name, value)  # refuses, with the name
        super().__setattr__(name, value)


class LayerStub(_Stub):
    """Stands for one decoder layer."""

    def __init__(self, module: nn.Module, name: str, element: int) -> None:
        super().__init__(module, name)
        self.__dict__["stub_element"] = element

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the arguments to the active run."""
        run = _RUN.get()
        if run is None:
            _refuse(
                f"{self.stub_name} of its skeleton was called outside of a call", self.stub_name
            )
        return run.call(self.stub_element, args, kwargs)


class Absent(_Stub):
    """Stands for a module that the piece did not use when the model was cut."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the weights are not there."""
        run = _RUN.get()
        position = f" {run.position()}" if run else ""
        raise CutRefusedError(
            run.model_class if run else "the model",
            f"{self.stub_name} is called{position}, which the example of cut_model never did",
            "cut the model with example= a small batch that has all arguments of your calls",
            self.stub_name,
        )


class HeldStub(_Stub):
    """Stands, in the tail, for a module whose work the prefix has done.

    Attributes:
        module: the module itself, if the tail needs it too; else ``None``.
    """

    module: nn.Module | None

    def __init__(self, module: nn.Module, name: str, *, keep: bool) -> None:
        super().__init__(module, name)
        self._modules["module"] = module if keep else None

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if name == "module" and name in modules:
            return modules[name]
        module = modules.get("module")
        return getattr(module, name) if module is not None else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stand-in for the output, or run the module itself."""
        run = _RUN.get()
        done, output = run.held(self.stub_name, args, kwargs) if run else (False, None)
        if done:
            return output
        if self.module is None:
            _refuse(
                f"{self.stub_name} is called more often than when the model was cut", self.stub_name
            )
        return self.module(*args, **kwargs)


class Watched(nn.Module):
    """Around a module of the prefix that the tail will not run again: notes its outputs."""

    module: nn.Module

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.watched_name = name
        self.module = module
        self.training = module.training

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name == "module":
            return super().__getattr__(name)
        return getattr(module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and note its output."""
        output = self.module(*args, **kwargs)
        run = _RUN.get()
        if run is not None:
            run.note_held(self.watched_name, output)
        return output
