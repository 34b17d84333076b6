"""Joining the values that one leaf has in the microbatches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.block_mask import is_block_mask, join_masks, same_mask
from roundpipe.microbatch.dtensor import is_dtensor, join_dtensors
from roundpipe.microbatch.equality import same_value
from roundpipe.microbatch.messages import shorten, warn_once
from roundpipe.microbatch.specs import WHOLE, Cut, Fold, Rule, Where
from roundpipe.microbatch.tree import flatten, unflatten


@dataclass(frozen=True)
class Manner:
    """What the engine and the plain functions do differently.

    Attributes:
        average_scalars: 0-dim tensors that nothing was said about become their mean; otherwise
            they have to be equal.
        warn_non_tensors: warn about a non-tensor that a spec wants concatenated.
        align: see :func:`~roundpipe.microbatch.dtensor.join_dtensors`.
    """

    average_scalars: bool = False
    warn_non_tensors: bool = False
    align: bool = False


# What most leaves are; for these no further questions have to be asked.
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_SIMPLE_VALUES = frozenset({type(None), bool, int, float, str})

AVERAGE_SCALARS = Manner(average_scalars=True)


def join(values: Sequence[Any], rule: Rule, where: Where, manner: Manner) -> Any:
    """The merged value of one leaf.

    Args:
        values: its value in each microbatch, in order.
        rule: what was said about it.
        where: gives its path.
        manner: what to do where nothing was said.

    Raises:
        InvalidValueError: the values cannot be joined as ``rule`` says.
    """
    if isinstance(rule, Fold):
        result = _fresh(rule.init)
        for value in values:
            result = rule.fn(result, value)
        return result
    if rule is WHOLE:
        return _the_same(values, where)
    types = set(map(type, values))
    if not types <= _PLAIN_TENSORS:
        if types <= _SIMPLE_VALUES or not any(isinstance(v, torch.Tensor) for v in values):
            return _join_others(values, rule, where, manner)
        _check_all_tensors(values, where)
    dim = rule.dim if isinstance(rule, Cut) else 0
    if values[0].ndim > 0:
        return concatenate(values, dim, where, manner.align)
    if isinstance(rule, Cut) and rule.direct:
        raise InvalidValueError(
            f"{where()} is a 0-dim tensor, which TensorChunkSpec({dim}) cannot concatenate; give "
            "Replicate if it is always equal, or _CustomReducer(init, fn) to combine the values"
        )
    if manner.average_scalars and not isinstance(rule, Cut):
        return _mean(values)
    return _the_same(values, where)


def concatenate(values: Sequence[Any], dim: int, where: Where, align: bool) -> Any:
    """``torch.cat``, and its like for DTensors; a single tensor is returned as it is.

    Raises:
        InvalidValueError: ``dim`` does not exist, or the tensors differ elsewhere than along it.
    """
    if not _PLAIN_TENSORS.issuperset(map(type, values)) and any(map(is_dtensor, values)):
        _check_shapes(values, dim, where)
        return join_dtensors(values, dim, align, where())
    if len(values) == 1:
        _check_shapes(values, dim, where)
        return values[0]
    try:
        return torch.cat(tuple(values), dim)
    except (RuntimeError, IndexError):
        _check_shapes(values, dim, where)  # says what is wrong; running out of memory is not
        raise


def _check_shapes(values: Sequence[torch.Tensor], dim: int, where: Where) -> None:
    first = values[0]
    for m, value in enumerate(values):
        facts = (
            f"{where()} has shape {tuple(first.shape)} in microbatch 0 and {tuple(value.shape)} "
            f"in microbatch {m}"
        )
        if value.ndim != first.ndim or not -value.ndim <= dim < value.ndim:
            raise InvalidValueError(
                f"{facts}, which cannot be concatenated along dimension {dim}; give another spec, "
                "or merge with a function"
            )
        if _other_sizes(value, dim) != _other_sizes(first, dim):
            raise InvalidValueError(
                f"{facts}; they may only differ in dimension {dim}, along which they are "
                "concatenated; pad them, or merge with a function"
            )
        if (value.device, value.layout) != (first.device, first.layout):
            raise InvalidValueError(
                f"{where()} is on {first.device} with {first.layout} in microbatch 0 and on "
                f"{value.device} with {value.layout} in microbatch {m}; return the same kind of "
                "tensor for every microbatch"
            )


def _other_sizes(tensor: torch.Tensor, dim: int) -> list[int]:
    return [size for d, size in enumerate(tensor.shape) if d != dim % tensor.ndim]


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    if not (first.is_floating_point() or first.is_complex()):
        values = [value.to(torch.get_default_dtype()) for value in values]
    return values[0] if len(values) == 1 else torch.stack(tuple(values)).mean()


def _join_others(values: Sequence[Any], rule: Rule, where: Where, manner: Manner) -> Any:
    if all(map(is_block_mask, values)):
        same = all(same_mask(values[0], value) for value in values)
        joined = values[0] if same else join_masks(values)
        if joined is not None:
            return joined
    if isinstance(rule, Cut) and manner.warn_non_tensors:
        warn_once(
            where(),
            f"{where()} is a {type(values[0]).__name__}, which TensorChunkSpec({rule.dim}) cannot "
            "concatenate; it is merged by equality; give Replicate to say so",
        )
    return _the_same(values, where)


def _the_same(values: Sequence[Any], where: Where) -> Any:
    first = values[0]
    if _SIMPLE_VALUES.issuperset(map(type, values)) and values.count(first) == len(values):
        return first
    for m, value in enumerate(values):
        if not same_value(first, value):
            raise InvalidValueError(
                f"{where()} is {shorten(first)} in microbatch 0 and {shorten(value)} in microbatch "
                f"{m}; values that are not concatenated must be equal; give _CustomReducer(init, "
                "fn) to combine them, or merge with a function"
            )
    return first


def _check_all_tensors(values: Sequence[Any], where: Where) -> None:
    kinds = [isinstance(value, torch.Tensor) for value in values]
    if not all(kinds):
        odd = kinds.index(not kinds[0])
        raise InvalidValueError(
            f"{where()} is a {type(values[0]).__name__} in microbatch 0 and a "
            f"{type(values[odd]).__name__} in microbatch {odd}; return the same kind of value for "
            "every microbatch"
        )


def _fresh(init: Any) -> Any:
    """A copy, because a reducer may collect into its first argument, and the spec is used again."""
    leaves, structure = flatten(init)
    copies = [x.clone() if isinstance(x, torch.Tensor) else copy.copy(x) for x in leaves]
    return unflatten(structure, copies)
