"""Outputs left in microbatches, to be handed on to another RoundPipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.tree import flatten


class TransferHandle(Protocol):
    """What is known of a value that may still be on its way."""

    def synchronize(self) -> Any:
        """Wait until the value can be read."""


class RoundPipePackedData(list[Any]):
    """The values of one output leaf, one per microbatch, as ``merge_output=False`` returns them.

    It is a list; its tensors may still be on their way from the device until :meth:`synchronize`
    returns. Given to another RoundPipe as an argument, microbatch m receives element m, without
    waiting and without copying; the number of microbatches has to be the same.

    Args:
        values: one value per microbatch.
        handles: for each microbatch, what to wait for; empty if nothing is on its way.

    Raises:
        InvalidValueError: there are handles, but not one for each value.
    """

    def __init__(self, values: Iterable[Any] = (), handles: Sequence[TransferHandle] = ()) -> None:
        super().__init__(values)
        self.handles = tuple(handles)
        if self.handles and len(self.handles) != len(self):
            raise InvalidValueError(
                f"{len(self.handles)} handles were given for {len(self)} values; give one for each "
                "value, or none"
            )

    def synchronize(self) -> None:
        """Wait until every value can be read."""
        for handle in self.handles:
            handle.synchronize()

    def __reduce__(self) -> Any:
        # A copy has no transfer to wait for: the values are complete when they are copied.
        self.synchronize()
        return type(self), (list(self),)


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
