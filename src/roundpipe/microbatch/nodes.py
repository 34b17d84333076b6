"""How each kind of container is taken apart into children and put together again.

One :class:`NodeKind` per kind of container. A kind holds no data of a particular container: what
is needed besides the children travels as the *context* (the keys of a dict, for example).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from roundpipe import compat

_REGISTRY = compat.pytree_registry()

# Instances of these are leaves; known without asking any table. Whatever is not here is looked up.
LEAF_TYPES: frozenset[Any] = frozenset(
    {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes, type}
    | {torch.dtype, torch.device, torch.Size}
)


class NodeKind:
    """Takes containers of one kind apart and builds them.

    ``take`` returns the children and the context; ``build`` is its inverse; ``keys`` gives for each
    child the text that leads to it (``[0]``, ``['a']``, ``.field``).
    """

    __slots__ = ("cls",)

    def __init__(self, cls: type) -> None:
        self.cls: Any = cls  # which members it has depends on the kind

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        """The children of ``tree`` and what else is needed to rebuild it."""
        raise NotImplementedError

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        """A new container around ``children``."""
        raise NotImplementedError

    def keys(self, context: Any, count: int) -> list[str]:
        """For each child, the text that leads from the container to it."""
        return [f"[{i}]" for i in range(count)]

    def show(self, context: Any, children: Sequence[str]) -> str:
        """The container as text, given its children as text."""
        return f"{self.cls.__name__}({', '.join(children)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.cls is other.cls

    __hash__ = None  # type: ignore[assignment]


class _Tuple(NodeKind):
    __slots__ = ()

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        return tree, None

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        return tuple(children)

    def show(self, context: Any, children: Sequence[str]) -> str:
        return f"({children[0]},)" if len(children) == 1 else f"({', '.join(children)})"


class _List(NodeKind):
    __slots__ = ()

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        return tree, None

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        return list(children)

    def show(self, context: Any, children: Sequence[str]) -> str:
        return f"[{', '.join(children)}]"


class _Dict(NodeKind):
    """``dict`` and ``OrderedDict``; the context is the keys, in order."""

    __slots__ = ()

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        return tuple(tree.values()), tuple(tree)

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        return self.cls(zip(context, children, strict=True))

    def keys(self, context: Any, count: int) -> list[str]:
        return [f"[{key!r}]" for key in context]

    def show(self, context: Any, children: Sequence[str]) -> str:
        items = ", ".join(f"{k!r}: {c}" for k, c in zip(context, children, strict=True))
        return f"{{{items}}}" if self.cls is dict else f"{self.cls.__name__}({{{items}}})"


class _DefaultDict(_Dict):
    """The context is the default factory and the keys."""

    __slots__ = ()

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        return tuple(tree.values()), (tree.default_factory, tuple(tree))

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        return self.cls(context[0], zip(context[1], children, strict=True))

    def keys(self, context: Any, count: int) -> list[str]:
        return super().keys(context[1], count)

    def show(self, context: Any, children: Sequence[str]) -> str:
        return super().show(context[1], children)


class _NamedTuple(NodeKind):
    __slots__ = ()

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        return tuple(tree), None

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        return self.cls._make(children)

    def keys(self, context: Any, count: int) -> list[str]:
        return [f".{name}" for name in self.cls._fields]

    def show(self, context: Any, children: Sequence[str]) -> str:
        names = self.cls._fields
        return super().show(context, [f"{n}={c}" for n, c in zip(names, children, strict=True)])


class _Attributes(NodeKind):
    """Objects whose children are attributes; the context is their names.

    Rebuilding sets the attributes on a bare instance and does not run ``__init__`` or
    ``__post_init__``: the values are those of a finished object already, and an initialiser that
    converts its arguments must not convert them twice. This way frozen classes, slots, fields with
    ``init=False`` and ``InitVar`` need no special case.
    """

    __slots__ = ("name_set", "names")

    def __init__(self, cls: type) -> None:
        super().__init__(cls)
        self.names = tuple(f.name for f in dataclasses.fields(cls))
        self.name_set = frozenset(self.names)

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        names = self.names
        held = getattr(tree, "__dict__", {})
        if len(held) != len(names) or not held.keys() >= self.name_set:
            # Slots, fields that were never set, attributes that are not fields.
            names = tuple(n for n in dict.fromkeys((*names, *held)) if hasattr(tree, n))
        return [getattr(tree, name) for name in names], names

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        new = self.cls.__new__(self.cls)
        for name, value in zip(context, children, strict=True):
            object.__setattr__(new, name, value)
        return new

    def keys(self, context: Any, count: int) -> list[str]:
        return [f".{name}" for name in context]

    def show(self, context: Any, children: Sequence[str]) -> str:
        return super().show(context, [f"{n}={c}" for n, c in zip(context, children, strict=True)])


class _BlockMask(NodeKind):
    """FlexAttention's ``BlockMask``, whose children are its tensors, so that they can be moved.

    It is recognised by its name: whoever made one has imported its module, and roundpipe need not.
    """

    __slots__ = ()

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        names = tuple(n for n, v in vars(tree).items() if isinstance(v, torch.Tensor))
        rest = {n: v for n, v in vars(tree).items() if not isinstance(v, torch.Tensor)}
        return [getattr(tree, name) for name in names], (names, rest)

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        new = self.cls.__new__(self.cls)
        vars(new).update(context[1])
        vars(new).update(zip(context[0], children, strict=True))
        return new

    def keys(self, context: Any, count: int) -> list[str]:
        return [f".{name}" for name in context[0]]


class _DTensor(NodeKind):
    """A ``DTensor``, whose child is this rank's part, so that it can be moved."""

    __slots__ = ()

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        return [tree.to_local()], (tree.device_mesh, tree.placements, tree.shape, tree.stride())

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        mesh, placements, shape, stride = context
        return self.cls.from_local(
            children[0], mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def keys(self, context: Any, count: int) -> list[str]:
        return [".to_local()"]


class _Registered(NodeKind):
    """A class registered with ``torch.utils._pytree.register_pytree_node``."""

    __slots__ = ()

    def take(self, tree: Any) -> tuple[Sequence[Any], Any]:
        children, context = _REGISTRY[self.cls].flatten_fn(tree)
        return tuple(children), context

    def build(self, context: Any, children: Sequence[Any]) -> Any:
        return _REGISTRY[self.cls].unflatten_fn(list(children), context)

    def keys(self, context: Any, count: int) -> list[str]:
        # ModelOutput and other dict-like classes put the keys of the children into the context.
        if isinstance(context, list) and len(context) == count and issubclass(self.cls, dict):
            return [f"[{key!r}]" for key in context]
        return super().keys(context, count)


def is_block_mask_type(cls: type) -> bool:
    """Whether ``cls`` is FlexAttention's ``BlockMask`` or a subclass of it."""
    return _has_block_mask_base(cls)


@lru_cache(maxsize=1024)
def _has_block_mask_base(cls: type) -> bool:
    return any(
        base.__name__ == "BlockMask" and base.__module__ == "torch.nn.attention.flex_attention"
        for base in cls.__mro__
    )


def is_made_of_tensors(cls: type) -> bool:
    """Whether instances are leaves when batches are cut, and tensors in parts when they travel."""
    return cls not in LEAF_TYPES and (_has_block_mask_base(cls) or _has_dtensor_base(cls))


@lru_cache(maxsize=1024)
def _has_dtensor_base(cls: type) -> bool:
    return any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed.tensor")
        for base in cls.__mro__
    )


BUILTIN_KINDS: dict[type, NodeKind] = {
    tuple: _Tuple(tuple),
    list: _List(list),
    dict: _Dict(dict),
    OrderedDict: _Dict(OrderedDict),
    defaultdict: _DefaultDict(defaultdict),
}


def kind_of(cls: type) -> NodeKind | None:
    """How containers of class ``cls`` are handled; ``None`` if its instances are leaves.

    The registry is asked every time, since a class may be registered at any moment.
    """
    kind = BUILTIN_KINDS.get(cls)
    if kind is not None:
        return kind
    return _registered(cls) if cls in _REGISTRY else _unregistered(cls)


@lru_cache(maxsize=1024)
def _registered(cls: type) -> NodeKind:
    return _Registered(cls)


@lru_cache(maxsize=1024)
def _unregistered(cls: type) -> NodeKind | None:
    if _has_dtensor_base(cls):
        return _DTensor(cls)
    if issubclass(cls, torch.Tensor | torch.nn.Module):
        return None
    if is_block_mask_type(cls):
        return _BlockMask(cls)
    if dataclasses.is_dataclass(cls):
        return _Attributes(cls)
    fields = getattr(cls, "_fields", None)
    if issubclass(cls, tuple) and isinstance(fields, tuple) and hasattr(cls, "_make"):
        return _NamedTuple(cls)
    return None
