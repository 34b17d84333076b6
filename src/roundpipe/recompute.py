"""What a layer can say to its own recompute.

A layer is run once forward and, where backward needs its activations, once more. What must be the
same both times although it would not be by itself (an expert routing that a rounding error can tip,
numbers of a generator of one's own, the outcome of a search) is kept by the first run::

    class Router(nn.Module):
        def forward(self, x):
            if doing_recompute():
                (experts,) = get_recompute_data()
            else:
                experts = self.gate(x).topk(2).indices
                save_for_recompute(experts)
            ...

In a plain loop, and wherever no recompute follows, ``doing_recompute()`` is false and
``save_for_recompute`` does nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .errors import StateError

Keep = Callable[[tuple[Any, ...]], None]
Load = Callable[[], tuple[Any, ...] | None]


class LayerPass:
    """One run of a layer on one microbatch.

    Args:
        keep: takes what the layer saves; None if no recompute will ask for it.
        load: gives what the layer's forward saved, or None; for a recompute only.
    """

    def __init__(self, keep: Keep | None = None, load: Load | None = None) -> None:
        self.recomputing = load is not None
        self.asked = False  # the layer uses these functions at all
        self._keep = keep
        self._load = load
        self._loaded: tuple[Any, ...] | None = None
        self._saved = False

    def save(self, data: tuple[Any, ...]) -> None:
        """What :func:`save_for_recompute` does within this pass."""
        self.asked = True
        if self.recomputing:
            return
        if self._saved:
            raise StateError(
                "save_for_recompute was called twice in one call of a layer; call it once, with "
                "everything that the recompute shall find"
            )
        self._saved = True
        if self._keep is not None:
            self._keep(data)

    def data(self) -> tuple[Any, ...]:
        """What :func:`get_recompute_data` gives within this pass."""
        if self._load is None:
            raise StateError(
                "get_recompute_data was called in a layer's first forward, where nothing has been "
                "saved yet; ask doing_recompute() first"
            )
        if self._loaded is None:
            self._loaded = self._load()
        if self._loaded is None:
            raise StateError(
                "get_recompute_data found nothing: this layer's forward did not call "
                "save_for_recompute; call it there in every case in which the recompute asks"
            )
        return self._loaded

    def replay(self) -> LayerPass:
        """The pass as a checkpoint inside the layer, which backward runs again, shall see it."""
        again = LayerPass()
        again.recomputing, again._load = self.recomputing, self._load
        again._loaded, again._saved = self._loaded, False
        return again


class _Current(threading.local):
    """The pass that the calling thread is in."""

    layer: LayerPass | None = None


_current = _Current()


@contextlib.contextmanager
def running(layer: LayerPass) -> Iterator[None]:
    """Entered by a worker around a layer."""
    before, _current.layer = _current.layer, layer
    try:
        yield
    finally:
        _current.layer = before


def enter_replay(layer: LayerPass | None) -> None:
    """Backward has reached a layer, or (None) is through, on the calling thread."""
    _current.layer = None if layer is None else layer.replay()


def save_for_recompute(*data: Any) -> None:
    """Keep data for the recompute of the layer that is running.

    Tensors may lie in nested tuples, lists, dicts and dataclasses, beside anything else; they are
    kept as they are now, in host memory, without gradients. Does nothing where no recompute will
    follow: without gradients, in the stage whose forward and backward are one, in a plain loop.

    Args:
        *data: what :func:`get_recompute_data` shall return.

    Raises:
        StateError: a second call within one call of the layer.
    """
    if _current.layer is not None:
        _current.layer.save(data)


def doing_recompute() -> bool:
    """Whether the layer that is running repeats its forward for backward."""
    layer = _current.layer
    if layer is None:
        return False
    layer.asked = True
    return layer.recomputing


def get_recompute_data() -> tuple[Any, ...]:
    """What the layer's forward on this microbatch gave to :func:`save_for_recompute`.

    Returns:
        The tuple, tensors on the device that runs the recompute.

    Raises:
        StateError: no recompute is running, or the forward saved nothing.
    """
    if _current.layer is None:
        raise StateError(
            "get_recompute_data was called outside a layer that roundpipe runs; ask "
            "doing_recompute() first"
        )
    _current.layer.asked = True
    return _current.layer.data()
