"""What a wrapped model shows of the model in it: attributes, parameters or their masters."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

from torch import nn

from .errors import InvalidTypeError, InvalidValueError, StateError
from .parameters import ParameterStore
from .stepping import masters_visible

Self = TypeVar("Self", bound="WrappedModel")

# Methods of models of transformers and PEFT that write the parameters to files.
_SAVING = ("save_pretrained", "push_to_hub")


class WrappedModel(nn.Module):
    """Stands in for ``model``, or for the original that ``model`` was made from.

    Args:
        model: the model whose layers run.
        name: shown in warnings.
        store: the model's parameters and their masters.
    """

    _OWN: tuple[str, ...] = ("name",)  # attributes that may be written and are not the model's

    def __init__(self, model: nn.Module, name: str, store: ParameterStore) -> None:
        # Own attributes go around __setattr__, which forwards to the model.
        self.__dict__.update(model=model, name=name, _store=store, _original=None, _warned=set())

    # --- the wrapped model -------------------------------------------------------------------

    def set_original_model(self, original: nn.Module) -> None:
        """The module whose attributes and key names are shown; ``model`` was made from it."""
        if not isinstance(original, nn.Module):
            raise InvalidTypeError(
                f"the original model is a {type(original).__name__}, no nn.Module"
            )
        self.__dict__["_original"] = original

    @property
    def _target(self) -> nn.Module:
        original: nn.Module | None = self.__dict__["_original"]
        return original if original is not None else self.__dict__["model"]

    def __getattr__(self, name: str) -> Any:
        if "model" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._target, name)
        return self._after_synchronize(value) if name in _SAVING else value

    def _after_synchronize(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.synchronize()
            return method(*args, **kwargs)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            self.__dict__[name] = value
        else:
            self._before_change()
            setattr(self._target, name, value)

    def __delattr__(self, name: str) -> None:
        self._before_change()
        delattr(self._target, name)

    def _before_change(self) -> None:
        """Wait until nothing is running that would notice a change of the model."""

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._target)})

    # --- parameters --------------------------------------------------------------------------

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and masters of the parameters that require grad, or already have a master."""
        store = self._store
        pairs = self._target.named_parameters(prefix=prefix, remove_duplicate=remove_duplicate)
        for name, parameter in pairs:
            if parameter.requires_grad or store.has_master(parameter):
                yield name, store.master_of(parameter)

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The masters of the parameters that require grad, or already have a master."""
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own parameters; the masters within a step function or ``OptimizerCtx``."""
        if masters_visible.depth:
            yield from self.optim_named_parameters(prefix, remove_duplicate)
            return
        if "parameters" not in self._warned:
            self._warned.add("parameters")
            warnings.warn(
                f"parameters() of {self.name} gives the model's own parameters, which an optimizer "
                "must not be built on: use optim_parameters(), or call it within OptimizerCtx()",
                stacklevel=3,
            )
        yield from self._target.named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As :meth:`named_parameters`, without the names."""
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated so far; within a step function, the masters' gradients."""
        if masters_visible.depth:
            for master in self.optim_parameters():
                if master.grad is not None:
                    master.grad = None if set_to_none else master.grad.zero_()
            return
        self._store.drop_gradients()
        self._target.zero_grad(set_to_none)

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze all parameters."""
        self._before_change()
        self._target.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's state under its own key names; call :meth:`synchronize` before.

        After a step layer by layer it synchronizes by itself: calls compute with that step's
        result anyway, and layers of two versions would be nothing to save.
        """
        store = self._store
        is_unpublished = store.synchronized_version != store.submitted_version
        if is_unpublished and store.entitled_version == store.submitted_version:
            self.synchronize()
        elif is_unpublished:
            warnings.warn(
                f"state_dict() of {self.name} while a step is not published yet: the weights are "
                "those before it. Call synchronize() first",
                stacklevel=2,
            )
        return self._target.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into the original model's parameters and refresh the masters.

        Raises:
            InvalidValueError: ``assign=True``, which would replace the parameters.
        """
        if assign:
            raise InvalidValueError(
                "load_state_dict(assign=True) would replace the parameters that masters and "
                "optimizer belong to; use assign=False, which copies the values"
            )
        self.synchronize()
        result = self._target.load_state_dict(state_dict, strict=strict)
        self._store.refresh_masters()
        return result

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        raise StateError(
            f"{self.name}: the parameters of a RoundPipe stay where they are, in host memory, and "
            "keep their dtype; convert or move the model before wrapping it"
        )

    # --- end of life -------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidTypeError(
            f"{self.name} cannot be pickled: it owns threads. Save model.state_dict() after "
            "synchronize() instead, or copy the plain model and wrap the copy"
        )

    def close(self) -> None:
        """End the model's threads (a pool that was passed in stays open). May be called twice.

        Leaving a ``with`` block without an error synchronizes before, and raises what that raises.
        """
        self._close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.synchronize()
        finally:
            self.close()


def name_of_caller(frame: FrameType) -> str:
    """``file.py:line``: the default name of a model that was wrapped there."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class OptimizerCtx:
    """Within it, ``parameters()`` and ``named_parameters()`` of every RoundPipe give the masters.

    For the calling thread only, and may be nested.
    """

    def __enter__(self) -> None:
        masters_visible.__enter__()

    def __exit__(self, *exc: object) -> None:
        masters_visible.__exit__(*exc)
