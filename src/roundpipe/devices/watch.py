"""What compute on a checked CPU device does: each operator, what it reads, writes and makes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from roundpipe.compat import OperatorTraits, operator_traits, watch_operators

from .clocks import Operation, StreamKey
from .tracking import Tracker


class _Own(threading.local):
    """A thread's own switch."""

    is_off = False


class ComputeWatch:
    """Counts what operators allocate and orders what they touch.

    Args:
        compute: the device's compute stream.
        tracker: the pool's bookkeeping.
        count: called with each new tensor, to count it as a temporary.
    """

    def __init__(
        self, compute: StreamKey, tracker: Tracker, count: Callable[[torch.Tensor, str], None]
    ) -> None:
        self._compute = compute
        self._tracker = tracker
        self._count = count
        self._own = _Own()
        self._traits: dict[Any, tuple[OperatorTraits, str]] = {}  # and the operator's name
        self.scope = watch_operators(self._run)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Let the calling thread run operators of our own, unseen, and outside autograd."""
        own = self._own
        before, own.is_off = own.is_off, True
        try:
            # Tensors made in inference mode could not be copied into by other threads.
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            own.is_off = before

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._own.is_off:
            return operator(*args, **kwargs)
        if operator not in self._traits:
            self._traits[operator] = operator_traits(operator), str(operator)
        traits, name = self._traits[operator]
        if traits.is_view:
            return operator(*args, **kwargs)
        given: set[int] = set()
        # Without tensors to work on, an operator makes new ones, on the device.
        is_on_device, is_on_host = False, False
        with self._tracker.locked():
            position = self._tracker.clocks.advance(self._compute)
            operation = Operation(self._compute, position, name)
            for place, argument in [*enumerate(args), *kwargs.items()]:
                for tensor in _tensors(argument):
                    given.add(id(tensor.untyped_storage()))
                    owner = self._use(tensor, operation, place in traits.written)
                    is_on_device = is_on_device or owner is not None
                    is_on_host = is_on_host or owner is None
        result = operator(*args, **kwargs)
        if is_on_device or not is_on_host:
            for tensor in _tensors(result):
                if id(tensor.untyped_storage()) not in given:
                    self._count(tensor, name)
        return result

    def _use(self, tensor: torch.Tensor, operation: Operation, is_write: bool) -> StreamKey | None:
        """Note a use. Returns who owns the memory: nobody, if it is the host's."""
        buffer = self._tracker.find(tensor)
        if buffer is None:
            return None
        if buffer.owner is not None and buffer.owner.device != self._compute.device:
            self._tracker.report(
                f"{operation} uses a tensor that lies on cpu:{buffer.owner.device}"
            )
        self._tracker.use(buffer, tensor, operation, is_write=is_write)
        return buffer.owner


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with storage in an operator's argument or result."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
