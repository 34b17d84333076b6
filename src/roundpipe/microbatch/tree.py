"""Taking nested structures apart into a list of leaves, and putting them together again.

The containers are tuple, list, dict, OrderedDict, defaultdict, namedtuples, dataclasses
(registered or not), HuggingFace ``ModelOutput``s, FlexAttention's ``BlockMask``, and every class
registered with ``torch.utils._pytree.register_pytree_node``, before or after roundpipe was
imported. Anything else, ``None`` included, is a leaf. A caller's containers are never modified.

The engine does this for every stage and microbatch, hence the care for speed: what is flat, or only
one tensor, takes a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.nodes import LEAF_TYPES, NodeKind, is_made_of_tensors, kind_of


class Structure:
    """What remains of a tree when its leaves are taken away; made by :func:`flatten`.

    Structures compare equal if they have the same containers, classes, keys and order. ``repr``
    shows the tree with ``*`` in place of the leaves.

    Attributes:
        kind: how the container on top is handled; ``None`` for a leaf.
        context: what that container needs besides its children.
        num_leaves: number of leaves.
    """

    __slots__ = ("_children", "context", "kind", "num_leaves")
    __hash__ = None  # type: ignore[assignment]  # contexts of registered classes may be unhashable

    def __init__(
        self,
        kind: NodeKind | None,
        context: Any,
        children: tuple[Structure, ...] | None,
        num_leaves: int,
    ) -> None:
        self.kind = kind
        self.context = context
        self._children = children  # None if all children are leaves
        self.num_leaves = num_leaves

    @property
    def is_leaf(self) -> bool:
        """Whether the tree is a single leaf."""
        return self.kind is None

    @property
    def children(self) -> tuple[Structure, ...]:
        """The structures of the children; empty for a leaf."""
        if self._children is None:
            return () if self.kind is None else (LEAF,) * self.num_leaves
        return self._children

    def keys(self) -> list[str]:
        """For each child, the text that leads to it: ``[0]``, ``['a']`` or ``.field``."""
        if self.kind is None:
            return []
        return self.kind.keys(self.context, len(self.children))

    def paths(self, root: str = "") -> list[str]:
        """For each leaf, the text that leads to it, starting with ``root``."""
        if self.kind is None:
            return [root]
        pairs = zip(self.keys(), self.children, strict=True)
        return [path for key, child in pairs for path in child.paths(root + key)]

    def path(self, root: str, index: int) -> str:
        """The text that leads to the leaf ``index``, starting with ``root``."""
        return self.paths(root)[index]

    def same_node(self, other: Structure) -> bool:
        """Whether both have the same container on top, whatever its children are."""
        return (
            self.kind == other.kind
            and len(self.children) == len(other.children)
            and same_context(self.context, other.context)
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure):
            return NotImplemented
        return (
            self.num_leaves == other.num_leaves
            and self.kind == other.kind
            and same_context(self.context, other.context)
            and self._children == other._children
        )

    def __repr__(self) -> str:
        return f"Structure({self.describe()})"

    def describe(self) -> str:
        """The tree as text, with ``*`` in place of the leaves."""
        if self.kind is None:
            return "*"
        return self.kind.show(self.context, [child.describe() for child in self.children])


LEAF = Structure(None, None, None, 1)


def flatten(
    tree: Any, block_masks_are_leaves: bool = False, leaf_types: frozenset[type] = LEAF_TYPES
) -> tuple[list[Any], Structure]:
    """Take ``tree`` apart.

    Args:
        tree: any object; what is no container is a leaf.
        block_masks_are_leaves: whether a ``BlockMask`` or ``DTensor`` is a leaf, not a container of
            its tensors.
        leaf_types: types that need not be looked up to know that their instances are leaves.

    Returns:
        The leaves in order, and the structure, from which :func:`unflatten` rebuilds the tree.

    Raises:
        InvalidValueError: the tree contains itself, or nests deeper than Python can recurse.
    """
    leaves: list[Any] = []
    if type(tree) in leaf_types:
        return [tree], LEAF
    try:
        return leaves, _take(tree, leaves, block_masks_are_leaves, leaf_types)
    except RecursionError as error:
        raise InvalidValueError(
            f"a {type(tree).__name__} among the arguments or outputs contains itself, or nests "
            "deeper than Python can recurse; pass a structure without cycles"
        ) from error


def _take(
    tree: Any, leaves: list[Any], block_masks_are_leaves: bool, leaf_types: frozenset[type]
) -> Structure:
    kind = kind_of(type(tree))
    if kind is None or (block_masks_are_leaves and is_made_of_tensors(kind.cls)):
        leaves.append(tree)
        return LEAF
    values, context = kind.take(tree)
    if leaf_types.issuperset(map(type, values)):
        leaves.extend(values)
        return Structure(kind, context, None, len(values))
    before = len(leaves)
    children = []
    for value in values:
        if type(value) in leaf_types:
            leaves.append(value)
            children.append(LEAF)
        else:
            children.append(_take(value, leaves, block_masks_are_leaves, leaf_types))
    flat = all(child is LEAF for child in children)
    return Structure(kind, context, None if flat else tuple(children), len(leaves) - before)


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Build the tree of ``structure`` with ``leaves`` in place; the inverse of :func:`flatten`.

    Every container is a new object.

    Raises:
        InvalidValueError: the number of leaves is not the structure's.
    """
    if len(leaves) != structure.num_leaves:
        raise InvalidValueError(
            f"{len(leaves)} leaves were given for the structure {structure.describe()}, which has "
            f"{structure.num_leaves}; pass one value for each leaf"
        )
    if structure._children is None:
        return structure.kind.build(structure.context, leaves) if structure.kind else leaves[0]
    return _build(structure, iter(leaves))


def _build(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure.kind is None:
        return next(leaves)
    children = [_build(child, leaves) for child in structure.children]
    return structure.kind.build(structure.context, children)


def flatten_with_paths(
    tree: Any, root: str = "", block_masks_are_leaves: bool = False
) -> tuple[list[str], list[Any], Structure]:
    """Like :func:`flatten`, with the text that leads to each leaf in front.

    Args:
        tree: as for :func:`flatten`.
        root: what each path begins with, for example ``kwargs``.
        block_masks_are_leaves: as for :func:`flatten`.

    Returns:
        The paths (``kwargs['batch'][0]``), the leaves and the structure.
    """
    leaves, structure = flatten(tree, block_masks_are_leaves)
    return structure.paths(root), leaves, structure


def same_context(a: Any, b: Any) -> bool:
    """``a == b`` for contexts, which in registered classes may hold tensors or arrays."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # the comparison has no single truth value
        return False
