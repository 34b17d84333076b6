"""Outputs left in microbatches, to be handed on to another RoundPipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.tree import flatten


class PendingPiece:
    """Stands among a microbatch's arguments for a value that another call is still making.

    Whoever runs the microbatch waits for it and puts the value in its place.
    """


class PendingOutputs(Protocol):
    """The outputs of a call that may still be on the devices."""

    @property
    def settled(self) -> bool:
        """Whether the call is over and has taken effect."""

    def column(self, leaf: int) -> Sequence[Any]:
        """A leaf's values, one per microbatch; waits for the call.

        Raises:
            BaseException: what the call failed with, the same object.
        """

    def piece(self, leaf: int, microbatch: int, rows: int | None) -> PendingPiece:
        """What stands for one value; ``rows`` is what other arguments were cut for, if at all."""

    def requires_grad(self, leaf: int) -> bool:
        """Whether the leaf may require grad."""

    def expected_rows(self, leaf: int) -> Sequence[int] | None:
        """The values' leading sizes, as far as can be foretold; empty if the leaf has no rows."""


class NotSynchronized:
    """What C code that does not ask the list finds in packed data that are not synchronized."""

    def __repr__(self) -> str:
        return "<in flight: call synchronize() on the packed data>"


class RoundPipePackedData(list[Any]):
    """The values of one output leaf, one per microbatch, as ``merge_output=False`` returns them.

    It is a list. Its call may still be on the devices: everything but ``len`` waits for that call,
    as :meth:`synchronize` does. (``torch.cat`` and a few other functions read lists behind their
    back: call :meth:`synchronize` before.) Given to another RoundPipe as an argument, microbatch m
    receives element m, without waiting and without copying; the number of microbatches has to be
    the same. If the call fails, whatever looks at the data raises its exception.

    Args:
        values: one value per microbatch.
    """

    _outputs: PendingOutputs | None = None
    _leaf = 0

    def __init__(self, values: Iterable[Any] = ()) -> None:
        super().__init__(values)

    @classmethod
    def pending(cls, outputs: PendingOutputs, leaf: int, count: int) -> RoundPipePackedData:
        """Packed data of a call that may still be on the devices.

        Args:
            outputs: the call's outputs.
            leaf: which of their leaves this is.
            count: number of microbatches.
        """
        packed = cls([NotSynchronized()] * count)
        packed._outputs, packed._leaf = outputs, leaf
        return packed

    @property
    def in_flight(self) -> bool:
        """Whether the values are still to be waited for."""
        return self._outputs is not None

    def synchronize(self) -> None:
        """Wait until every value can be read.

        Raises:
            BaseException: what the call that makes them failed with, the same object.
            StateError: that call was interrupted.
        """
        outputs = self._outputs
        if outputs is not None:
            values = outputs.column(self._leaf)
            self._outputs = None
            list.__setitem__(self, slice(None), values)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients may flow back through any of the values."""
        if self._outputs is not None:
            return self._outputs.requires_grad(self._leaf)
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in self)

    def expected_rows(self) -> Sequence[int] | None:
        """The leading sizes of values in flight; ``None`` if they cannot be foretold."""
        return None if self._outputs is None else self._outputs.expected_rows(self._leaf)

    def pieces(self, rows: Sequence[int] | None = None) -> list[Any]:
        """What each microbatch's arguments get: the value, or what stands for it.

        Args:
            rows: leading sizes that other arguments were cut for, if they follow this one.
        """
        outputs = self._outputs
        if outputs is None or outputs.settled:
            return list(self)
        sizes: Sequence[int | None] = rows or [None] * len(self)
        return [outputs.piece(self._leaf, m, size) for m, size in enumerate(sizes)]

    def __reduce__(self) -> Any:
        # A copy has nothing to wait for: the values are complete when they are copied.
        self.synchronize()
        return type(self), (list(self),)


def _waiting(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def wait_first(self: RoundPipePackedData, *args: Any, **kwargs: Any) -> Any:
        self.synchronize()
        return method(self, *args, **kwargs)

    wait_first.__name__, wait_first.__doc__ = name, method.__doc__
    return wait_first


# What reads or changes a list's elements. Written out once here and not fourteen lines each.
for _name in (
    "__add__", "__contains__", "__delitem__", "__eq__", "__ge__", "__getitem__", "__gt__",
    "__iadd__", "__imul__", "__iter__", "__le__", "__lt__", "__mul__", "__ne__", "__repr__",
    "__reversed__", "__rmul__", "__setitem__", "append", "clear", "copy", "count", "extend",
    "index", "insert", "pop", "remove", "reverse", "sort",
):  # fmt: skip
    setattr(RoundPipePackedData, _name, _waiting(_name))


def packed_leaves(*trees: Any) -> list[RoundPipePackedData]:
    """The packed data among the leaves of ``trees``, in order."""
    return [x for tree in trees for x in flatten(tree)[0] if isinstance(x, RoundPipePackedData)]


def packed_count(args: Any, kwargs: Any) -> int | None:
    """The number of microbatches of the packed data among the arguments; ``None`` without any.

    Raises:
        InvalidValueError: two of them have different numbers of microbatches.
    """
    counts = {len(packed) for packed in packed_leaves(args, kwargs)}
    if len(counts) > 1:
        raise InvalidValueError(
            "the packed data among the arguments have different numbers of microbatches: "
            f"{', '.join(map(str, sorted(counts)))}; pack them with the same num_microbatch"
        )
    return counts.pop() if counts else None
