"""The caller's thread-local torch state, carried to the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """Autocast of one device type that was on."""

    device_type: str
    dtype: torch.dtype
    cache_enabled: bool


@dataclass(frozen=True)
class CallerContext:
    """What layers can see of the thread that made the call.

    Attributes:
        autocast: the device types for which autocast was on.
        inference: whether inference mode was on.
        default_device: type of the device on which the caller makes tensors, if it is not the host.
    """

    autocast: tuple[AutocastState, ...]
    inference: bool
    default_device: str | None = None

    @classmethod
    def capture(cls, device_types: set[str]) -> CallerContext:
        """The calling thread's state."""
        states = tuple(
            AutocastState(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in sorted(device_types | {"cpu"})
            if torch.is_autocast_enabled(kind)
        )
        default = torch.get_default_device().type
        return cls(states, torch.is_inference_mode_enabled(), None if default == "cpu" else default)

    def enter(self, requires_grad: bool) -> AbstractContextManager[None]:
        """Make the state the current thread's, with gradients on or off; to be entered at once."""
        if self.autocast or self.inference or self.default_device is not None:
            return self._enter_all(requires_grad)
        return torch.set_grad_enabled(requires_grad)

    @contextlib.contextmanager
    def _enter_all(self, requires_grad: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(requires_grad))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.default_device is not None:
                # Without a number: the worker's own one of the kind.
                stack.enter_context(torch.device(self.default_device))
            for state in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        state.device_type, dtype=state.dtype, cache_enabled=state.cache_enabled
                    )
                )
            yield
