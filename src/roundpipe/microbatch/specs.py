"""Specs: what a caller says about how each leaf is split or merged.

A spec mirrors the structure it belongs to; a spec leaf that stands over a subtree applies to all of
it. The spec leaves are those of ``torch.distributed.pipelining.microbatch``:
``TensorChunkSpec(dim)``, ``_Replicate`` (class or instance) and, for merging,
``_CustomReducer(init, fn)``. ``None`` leaves the leaf or subtree to the automatic rule.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from roundpipe import compat
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch.messages import shorten
from roundpipe.microbatch.nodes import LEAF_TYPES, kind_of
from roundpipe.microbatch.tree import Structure, flatten


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
Where = Callable[[], str]  # gives a leaf's path; paths are only made when a message needs one


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
    classes = compat.spec_classes()
    # Anyone's subclass is looked up as ever; `type` is that of the class _Replicate itself.
    known = LEAF_TYPES if classes is None else LEAF_TYPES.union(classes, (type,))
    leaves, spec_structure = flatten(spec, leaf_types=known)
    if spec_structure == structure and all(_is_spec(leaf, classes) for leaf in leaves):
        rules: dict[int, Rule] = {}  # mostly the same few objects stand on all leaves
        for i, leaf in enumerate(leaves):
            if id(leaf) not in rules:
                where = partial(structure.path, root, i)
                rules[id(leaf)] = _read(leaf, True, classes, name, where)
        return [rules[id(leaf)] for leaf in leaves]
    return list(_match(spec, structure, root, name, classes))


def _match(
    spec: Any, structure: Structure, path: str, name: str, classes: compat.SpecClasses | None
) -> Iterator[Rule]:
    if _is_spec(spec, classes):
        rule = _read(spec, structure.is_leaf, classes, name, lambda: path)
        yield from [rule] * structure.num_leaves
        return
    kind = kind_of(type(spec))
    if kind is None:
        raise InvalidTypeError(
            f"{name} has {shorten(spec)} at {path}; expected TensorChunkSpec(dim), Replicate, None "
            "(automatic) or a container that mirrors the value there"
        )
    if structure.is_leaf:
        raise InvalidValueError(
            f"{name} does not fit at {path}: the spec has a {type(spec).__name__} there, the value "
            "is a single leaf; put one spec in place of the container"
        )
    children, context = kind.take(spec)
    by_key = dict(zip(kind.keys(context, len(children)), children, strict=True))
    keys = structure.keys()
    if by_key.keys() != set(keys):
        raise InvalidValueError(
            f"{name} does not fit at {path}: the spec has {_entries(by_key)}, the value has "
            f"{_entries(keys)}; give one spec for each entry, or a single one for all of {path}"
        )
    for key, child in zip(keys, structure.children, strict=True):
        yield from _match(by_key[key], child, path + key, name, classes)


def _is_spec(value: Any, classes: compat.SpecClasses | None) -> bool:
    if value is None:
        return True
    return classes is not None and (value is classes.replicate or isinstance(value, classes))


def _read(
    spec: Any, direct: bool, classes: compat.SpecClasses | None, name: str, where: Where
) -> Rule:
    if spec is None:
        return AUTO
    assert classes is not None  # otherwise nothing can be a spec
    if isinstance(spec, classes.chunk):
        dim = spec.split_dim
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise InvalidTypeError(
                f"{name} has TensorChunkSpec({shorten(dim)}) at {where()}; the dimension must be "
                "an int"
            )
        return Cut(dim, direct)
    if isinstance(spec, classes.reducer):
        return Fold(spec.init_value, spec.reduce_fn)
    return WHOLE


def _entries(keys: Any) -> str:
    keys = list(keys)
    noun = "entry" if len(keys) == 1 else "entries"
    shown = ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "")
    return f"{len(keys)} {noun} ({shown})" if keys else f"0 {noun}"
