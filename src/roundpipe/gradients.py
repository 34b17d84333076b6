"""Gradients on their way from the devices to the optimizer.

    device ── download ──▶ slot ── take ──▶ contribution ── fold ──▶ master.grad ── step ──▶ release
                            ▲                                                                 │
                            └──────────────────── the slot's buffer ──────────────────────────┘

A 16-bit gradient may become the ``.grad`` of a float32 master as it is, without a copy. The slot's
buffer is then lent to the master, and comes back when the step is over, unless somebody keeps it.
"""

from __future__ import annotations

import torch

from .compat import storage_is_shared
from .devices.base import Event
from .workers import Counter, Scope

Contributor = tuple[int, int]  # (layer, replica of a wide stage)


class GradientSlot:
    """The accumulated gradient that one (layer, replica) contributes to one parameter."""

    def __init__(self, name: str) -> None:
        self.content: torch.Tensor | None = None
        self.ready: Event | None = None
        self.buffer: torch.Tensor | None = None
        self.taken = 0
        self.folded = Counter(f"folds of the gradient of {name}")

    def put(self, content: torch.Tensor, ready: Event | None) -> None:
        """The gradient of the calls since the last step, complete once ``ready`` has passed."""
        self.content, self.ready = content, ready

    def take(self) -> Contribution | None:
        """Hand the content to a step; the slot is empty afterwards."""
        if self.content is None:
            return None
        taken = Contribution(self, self.content, self.ready)
        self.taken += 1
        self.drop()
        return taken

    def drop(self) -> None:
        """Forget the content."""
        self.content = self.ready = None

    def wait_buffer_free(self, who: str, scope: Scope | None) -> None:
        """Block until steps are done with what they took: the buffer may be written again."""
        self.folded.wait(self.taken, who, scope)


class Contribution:
    """What a step took from one slot.

    Attributes:
        content: the gradient, complete after :meth:`wait`.
        is_released: whether the step is done with it.
    """

    def __init__(self, slot: GradientSlot, content: torch.Tensor, ready: Event | None) -> None:
        self.content = content
        self._slot = slot
        self._ready = ready
        self.is_released = False

    @property
    def is_buffer(self) -> bool:
        """Whether the content lies in the slot's buffer, which later calls will write."""
        return self.content is self._slot.buffer

    def wait(self) -> torch.Tensor:
        """The content, complete. Blocks the calling thread until it is.

        Raises:
            BaseException: what failed on its way home.
        """
        if self._ready is not None:
            # The copy to host memory runs on a stream of its own; read before it is through, the
            # content would be what the buffer held before.
            self._ready.synchronize()
            self._ready = None
        return self.content

    def release(self) -> None:
        """The step is done with it. May be called twice."""
        if self.is_released:
            return
        self.is_released = True
        if self.is_buffer and storage_is_shared(self.content):
            # A step function kept the gradient: it is its own now, as in PyTorch, and the slot's
            # next content goes elsewhere.
            self._slot.buffer = None
        self._slot.folded.advance()
