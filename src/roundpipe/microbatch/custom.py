"""Calling a caller's own split functions, and checking what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch.specs import is_spec_leaf

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_INPUT_FORM = "split_input=f must return (args_list, kwargs_list)"
_LABEL_FORM = "split_label=g must return a list"


def is_function(value: Any) -> bool:
    """Whether ``value`` is a function to call; the class ``_Replicate`` is a spec, not one."""
    return callable(value) and not is_spec_leaf(value)


def call_split_input(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> list[Arguments]:
    """The arguments of each microbatch, as ``function(args, kwargs, count)`` gives them.

    Exceptions of ``function`` come out unchanged.

    Raises:
        InvalidTypeError: what it returned is not a pair of lists of tuples and dicts.
        InvalidValueError: the lists do not have ``count`` entries.
    """
    result = function(args, kwargs, count)
    if not isinstance(result, tuple | list):
        raise InvalidTypeError(f"{_INPUT_FORM}, it returned a {type(result).__name__}")
    if len(result) != 2:
        raise InvalidValueError(f"{_INPUT_FORM}, it returned {len(result)} values")
    for what, pieces in zip(("args_list", "kwargs_list"), result, strict=True):
        _check_list(pieces, count, f"{_INPUT_FORM}; {what}")
    pairs = []
    for m, (piece_args, piece_kwargs) in enumerate(zip(*result, strict=True)):
        if not isinstance(piece_args, tuple | list):
            raise InvalidTypeError(
                f"{_INPUT_FORM}; args_list[{m}] is a {type(piece_args).__name__}, expected a tuple "
                "of positional arguments"
            )
        if not isinstance(piece_kwargs, Mapping):
            raise InvalidTypeError(
                f"{_INPUT_FORM}; kwargs_list[{m}] is a {type(piece_kwargs).__name__}, expected a "
                "dict of keyword arguments"
            )
        pairs.append((tuple(piece_args), dict(piece_kwargs)))
    return pairs


def call_split_label(function: Callable[..., Any], label: Any, count: int) -> list[Any]:
    """The label of each microbatch, as ``function(label, count)`` gives them.

    Exceptions of ``function`` come out unchanged.

    Raises:
        InvalidTypeError: what it returned is not a list.
        InvalidValueError: the list does not have ``count`` entries.
    """
    result = function(label, count)
    _check_list(result, count, f"{_LABEL_FORM}; the result")
    return list(result)


def _check_list(value: Any, count: int, what: str) -> None:
    if not isinstance(value, list | tuple):
        raise InvalidTypeError(f"{what} is a {type(value).__name__}, expected a list")
    if len(value) != count:
        raise InvalidValueError(
            f"{what} has {len(value)} entries, expected {count}, one for each microbatch; set "
            f"num_microbatch={len(value)} or return {count}"
        )
