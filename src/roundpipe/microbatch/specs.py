"""Specs: what a caller says about how each leaf is split or merged.

A spec mirrors the structure it belongs to; a spec leaf that stands over a subtree applies to all of
it. The spec leaves are those of ``torch.distributed.pipelining.microbatch``:
``TensorChunkSpec(dim)``, ``_Replicate`` (class or instance) and, for merging,
``_CustomReducer(init, fn)``. ``None`` leaves the leaf or subtree to the automatic rule.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundpipe import compat
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch.nodes import kind_of
from roundpipe.microbatch.tree import Structure


class Simple(enum.Enum):
    """Rules without parameters."""

    AUTO = enum.auto()  # nothing was said about this leaf
    WHOLE = enum.auto()  # every microbatch has the same value


AUTO = Simple.AUTO
WHOLE = Simple.WHOLE


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut, or concatenate, along ``dim``.

    Attributes:
        dim: the dimension; negative ones count from the end.
        direct: the spec stands on the leaf itself, not on a subtree that contains it. Only then is
            it a mistake that the leaf is something without dimensions.
    """

    dim: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold the microbatches' values in order: ``fn(fn(init, first), second)`` and so on."""

    init: Any
    fn: Callable[[Any, Any], Any]


Rule = Simple | Cut | Fold


def is_spec_leaf(value: Any) -> bool:
    """Whether ``value`` is one of the spec classes' instances, or the class ``_Replicate``."""
    classes = compat.spec_classes()
    if classes is None:
        return False
    return value is classes.replicate or isinstance(value, classes)


def match_spec(spec: Any, structure: Structure, root: str, name: str) -> list[Rule]:
    """The rule of each leaf.

    Args:
        spec: the caller's spec.
        structure: what it belongs to.
        root: path of the structure, for messages (``kwargs``).
        name: what the spec was given as, for messages (``split_input``).

    Returns:
        One rule for each leaf of ``structure``, in order.

    Raises:
        InvalidValueError: the spec has other entries than the structure.
        InvalidTypeError: something in the spec is neither a spec nor a container.
    """
    if spec is None:
        return [AUTO] * structure.num_leaves
    if is_spec_leaf(spec):
        return [_read_leaf(spec, structure.is_leaf, root, name)] * structure.num_leaves
    kind = kind_of(type(spec))
    if kind is None:
        raise InvalidTypeError(
            f"{name} has {_short(spec)} at {root}; expected TensorChunkSpec(dim), Replicate, None "
            "(automatic) or a container that mirrors the value there"
        )
    if structure.is_leaf:
        raise InvalidValueError(
            f"{name} does not fit at {root}: the spec has a {type(spec).__name__} there, the value "
            "is a single leaf; put one spec in place of the container"
        )
    children, context = kind.take(spec)
    by_key = dict(zip(kind.keys(context, len(children)), children, strict=True))
    keys = structure.keys()
    if by_key.keys() != set(keys):
        raise InvalidValueError(
            f"{name} does not fit at {root}: the spec has {_entries(by_key)}, the value has "
            f"{_entries(keys)}; give one spec for each entry, or a single one for all of {root}"
        )
    return [
        rule
        for key, child in zip(keys, structure.children, strict=True)
        for rule in match_spec(by_key[key], child, root + key, name)
    ]


def _read_leaf(spec: Any, direct: bool, path: str, name: str) -> Rule:
    classes = compat.spec_classes()
    assert classes is not None  # otherwise this would not have been taken for a spec
    if isinstance(spec, classes.chunk):
        dim = spec.split_dim
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise InvalidTypeError(
                f"{name} has TensorChunkSpec({_short(dim)}) at {path}; the dimension must be an int"
            )
        return Cut(dim, direct)
    if isinstance(spec, classes.reducer):
        return Fold(spec.init_value, spec.reduce_fn)
    return WHOLE


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _entries(keys: Any) -> str:
    keys = list(keys)
    noun = "entry" if len(keys) == 1 else "entries"
    shown = ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "")
    return f"{len(keys)} {noun} ({shown})" if keys else f"0 {noun}"
