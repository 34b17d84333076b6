"""Holding a cut against the forward that was watched."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.hf import private
from roundpipe.hf.layer import LayerPiece
from roundpipe.hf.prefix import PrefixPiece
from roundpipe.hf.probe import ModuleCall, quiet_random, snapshot
from roundpipe.hf.refusal import CutRefusedError
from roundpipe.hf.tail import TailPiece
from roundpipe.microbatch.tree import flatten, flatten_with_paths


def check_cut(
    pieces: tuple[PrefixPiece, Sequence[LayerPiece], TailPiece],
    calls: Sequence[ModuleCall],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    output: Any,
) -> None:
    """Run all pieces on the example and compare every value with the probe's, bit by bit.

    The layers themselves are not run again: each must be given the arguments that it was given in
    the probe, and then counts as having returned what it returned there.

    Raises:
        CutRefusedError: something differs.
    """
    prefix, layers, tail = pieces
    with torch.no_grad(), quiet_random():
        state = prefix(*inputs[0], **inputs[1])
        for piece, call in zip(layers, calls, strict=True):
            state = piece.advance(state, _Replayed(prefix.blueprint.model_class, piece, call))
        check_output(prefix.blueprint.model_class, tail(state), output)


class _Replayed:
    """In place of a layer: checks the arguments and returns what the layer returned."""

    def __init__(self, model_class: str, piece: LayerPiece, call: ModuleCall) -> None:
        self._model_class = model_class
        self._piece = piece
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        name = f"call {self._piece.index} of a layer"
        _compare(self._model_class, f"{name} gets", snapshot(args), call.args)
        _compare(self._model_class, f"{name} gets", snapshot(kwargs), dict(call.kwargs))
        _refill(args, call.args_after)
        for key, value in kwargs.items():
            _refill(value, call.kwargs_after[key])
        collector = private.active_collector()
        for key in collector:
            collector[key].extend(call.collected.get(key, ()))
        return call.output


def check_output(model_class: str, got: Any, expected: Any) -> None:
    """Compare the output of the tail with the model's.

    Raises:
        CutRefusedError: they differ.
    """
    _compare(model_class, "its tail returns", got, expected)


def _compare(model_class: str, what: str, got: Any, expected: Any) -> None:
    paths, values, structure = flatten_with_paths(expected)
    others, other_structure = flatten(got)
    if structure != other_structure:
        raise CutRefusedError(
            model_class,
            f"cut at its layers, {what} {other_structure.describe()} instead of "
            f"{structure.describe()}",
        )
    for path, value, other in zip(paths, values, others, strict=True):
        difference = _difference(other, value)
        if difference is not None:
            raise CutRefusedError(
                model_class, f"cut at its layers, {what} another value at {path}: {difference}"
            )


def _difference(got: Any, expected: Any) -> str | None:
    """What is different, in words; ``None`` if nothing is."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = got is expected or (type(got) is type(expected) and got == expected)
        return None if same else f"{got!r} instead of {expected!r}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(got, expected):
        return None
    both_nan = got.isnan() & expected.isnan()
    if bool(((got == expected) | both_nan).all()):
        return None
    wide = torch.promote_types(expected.dtype, torch.float64)
    return f"off by up to {(got.to(wide) - expected.to(wide)).abs().max().item():.3g}"


def _refill(given: Any, after: Any) -> None:
    """Put into the containers among the arguments what the layer had put there."""
    if isinstance(given, list):
        given[:] = after
    elif isinstance(given, (dict, UserDict)):
        given.clear()
        given.update(after)
    elif type(given) is tuple:
        for item, item_after in zip(given, after, strict=True):
            _refill(item, item_after)
