"""Cutting the arguments and labels of a call into microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch.argtree import ArgumentTree
from roundpipe.microbatch.custom import (
    Arguments,
    call_split_input,
    call_split_label,
    is_function,
)
from roundpipe.microbatch.dealing import Shares, deal, share_as, share_evenly
from roundpipe.microbatch.messages import count_of, shorten, warn_once
from roundpipe.microbatch.packed import RoundPipePackedData

_INPUT_WAYS = (
    "split_input=(args_spec, kwargs_spec) with TensorChunkSpec(dim) or Replicate in its place, or "
    "split_input=f with f(args, kwargs, num_microbatch) -> (args_list, kwargs_list)"
)
_LABEL_WAYS = (
    "split_label=spec with TensorChunkSpec(dim) or Replicate in its place, or split_label=g with "
    "g(label, num_microbatch) -> list"
)


@dataclass(frozen=True)
class Microbatch:
    """What one microbatch's walk through the stages begins with.

    Attributes:
        index: its number, from 0.
        args: positional arguments.
        kwargs: keyword arguments.
        label: its label; ``None`` if the call has none.
        rows: how many rows of the batch it has; ``None`` if that is unknown.
    """

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    rows: int | None


@dataclass(frozen=True)
class Batch:
    """A batch, cut.

    Attributes:
        microbatches: in order.
        rows: rows of the whole batch; ``None`` if unknown.
    """

    microbatches: tuple[Microbatch, ...]
    rows: int | None


def split_batch(
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    label: Any,
    num_microbatch: int,
    split_input: Any = None,
    split_label: Any = None,
    *,
    warned: set[str] | None = None,
    rows_matter: bool = False,
) -> Batch:
    """Cut the arguments and labels of a call into microbatches.

    Tensors are cut as views. Containers are new objects in each microbatch; other leaves are the
    caller's own objects.

    Args:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        label: labels, any structure; ``None`` if there are none.
        num_microbatch: number of pieces. There are fewer if the batch has fewer rows.
        split_input: ``None`` for the automatic rule, a pair ``(args_spec, kwargs_spec)``, or a
            function ``f(args, kwargs, num_microbatch) -> (args_list, kwargs_list)``.
        split_label: ``None``, a spec, or a function ``g(label, num_microbatch) -> list``.
        warned: what was warned about already; owned by the caller, grows. ``None``: nothing was.
        rows_matter: whether the microbatches' rows have to be exact although nothing else is cut.

    Returns:
        The microbatches.

    Raises:
        InvalidValueError: the batch cannot be cut into that many microbatches, or a spec or a
            function's result does not fit.
        InvalidTypeError: an argument of this call, or a function's result, has a wrong type.
    """
    _check_count(num_microbatch)
    warned = set() if warned is None else warned
    args, kwargs = tuple(args), dict(kwargs or {})
    label_function = split_label if is_function(split_label) else None
    labels_in: ArgumentTree | None = None
    if label is not None and label_function is None:
        labels_in = ArgumentTree((label,), ("label",), (split_label,), "split_label", _LABEL_WAYS)
    pairs: list[Arguments]
    if is_function(split_input):
        pairs = call_split_input(split_input, args, kwargs, num_microbatch)
        shares = share_as(pairs)
    else:
        specs = _spec_pair(split_input)
        inputs = ArgumentTree((args, kwargs), ("args", "kwargs"), specs, "split_input", _INPUT_WAYS)
        rows_matter = rows_matter or label is not None
        shares = _share(inputs, labels_in, num_microbatch, warned, rows_matter)
        pairs = deal(inputs, shares, warned)
    if label_function is not None and label is not None:
        labels = call_split_label(label_function, label, shares.count)
    else:
        labels = _labels(labels_in, shares, warned)
    rows: Sequence[int | None] = shares.rows or [None] * shares.count
    return Batch(
        tuple(Microbatch(m, *pair, labels[m], rows[m]) for m, pair in enumerate(pairs)),
        sum(shares.rows) if shares.rows else None,
    )


def _check_count(num_microbatch: Any) -> None:
    if not isinstance(num_microbatch, int) or isinstance(num_microbatch, bool):
        raise InvalidTypeError(f"num_microbatch is {num_microbatch!r}; expected an int, 1 or more")
    if num_microbatch < 1:
        raise InvalidValueError(f"num_microbatch is {num_microbatch}; expected an int, 1 or more")


def _spec_pair(split_input: Any) -> tuple[Any, Any]:
    if split_input is None:
        return None, None
    if not isinstance(split_input, tuple | list) or len(split_input) != 2:
        raise InvalidTypeError(
            f"split_input is {shorten(split_input)}; expected None, a pair (args_spec, "
            "kwargs_spec), either of which may be None, or a function"
        )
    return split_input[0], split_input[1]


def _share(
    inputs: ArgumentTree,
    labels: ArgumentTree | None,
    num_microbatch: int,
    warned: set[str],
    rows_matter: bool,
) -> Shares:
    """How the batch is dealt out; labels have a say only if the inputs have no rows."""
    shares = share_evenly(inputs, num_microbatch)
    packed = inputs.packed()
    if packed:
        return _share_packed(inputs, packed[0], shares, rows_matter)
    source = inputs
    if shares.total is None and labels is not None:
        source = labels
        shares = share_evenly(labels, num_microbatch)
    if shares.total is None or shares.total >= num_microbatch:
        return shares
    warn_once(
        "fewer rows",
        f"the batch has {count_of(shares.total, 'row')} (the leading size of "
        f"{source.batch_path()} and of most tensors), fewer than num_microbatch={num_microbatch}; "
        f"the call runs with {count_of(shares.total, 'microbatch')}",
        warned,
    )
    return share_evenly(source, shares.total)


def _share_packed(inputs: ArgumentTree, index: int, even: Shares, rows_matter: bool) -> Shares:
    """Packed data are cut already: what else has as many rows is cut in the same way."""
    values = inputs.leaves[index]
    if len(values) != even.count:
        return even  # dealing it out will say so
    if even.total is not None and even.total < even.count:
        raise InvalidValueError(
            f"{inputs.path(index)} is packed data of {even.count} microbatches, but the other "
            f"arguments have only {count_of(even.total, 'row')} ({inputs.batch_path()})"
        )
    packed = _packed_shares(values, index, rows_matter or even.total is not None)
    if even.total is None or even.total == packed.total:
        return packed
    return even


def _packed_shares(values: RoundPipePackedData, index: int, rows_matter: bool) -> Shares:
    """Shares as the packed data have them, foretold if these are still in flight."""
    if values.in_flight:
        rows = values.expected_rows()
        if not rows_matter or (rows is not None and len(rows) == 0):
            return Shares(len(values))
        if rows is not None:
            return Shares(len(values), sum(rows), rows, rows, foretold_by=index)
    return share_as(values)


def _labels(labels: ArgumentTree | None, shares: Shares, warned: set[str]) -> list[Any]:
    if labels is None:
        return [None] * shares.count
    if shares.total is None:
        own = share_evenly(labels, shares.count)
        if own.total is not None and own.total < shares.count:
            raise InvalidValueError(
                f"the inputs come in {shares.count} microbatches and the labels have "
                f"{count_of(own.total, 'row')}; inputs and labels must give the same number of "
                "microbatches"
            )
        shares = replace(own, rows=None)
    # What the inputs foretold is checked where they arrive, not where labels do.
    return [label for (label,) in deal(labels, replace(shares, foretold_by=None), warned)]
