"""Many trees of one structure at once, as one column of values for each leaf.

Walking the structure once for all microbatches, rather than once for each, is what makes splitting
and merging cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.nodes import LEAF_TYPES, is_made_of_tensors, kind_of
from roundpipe.microbatch.tree import LEAF, Structure, flatten, same_context

Column = Sequence[Any]


def trees_from_columns(structure: Structure, columns: Sequence[Column], count: int) -> list[Any]:
    """``count`` trees; the m-th has the m-th value of each leaf's column. All are new objects."""
    return list(_nodes(structure, iter(columns), count))


def _nodes(structure: Structure, columns: Iterator[Column], count: int) -> Column:
    if structure.kind is None:
        return next(columns)
    build, context = structure.kind.build, structure.context
    children = [_nodes(child, columns, count) for child in structure.children]
    rows = zip(*children, strict=True) if children else [()] * count
    return [build(context, row) for row in rows]


def columns_from_trees(trees: Sequence[Any], root: str) -> tuple[list[Column], Structure]:
    """For each leaf, its value in every tree; and the structure that all trees share.

    ``BlockMask``s and ``DTensor``s are leaves.

    Raises:
        InvalidValueError: there are no trees, or their structures differ.
    """
    if not trees:
        raise InvalidValueError(f"there is no {root} to merge; expected one per microbatch")
    columns: list[Column] = []
    try:
        structure = _take_all(tuple(trees), columns)
    except RecursionError:
        for tree in trees:
            flatten(tree)  # says what is wrong
        raise
    if structure is None:
        raise _difference(trees, root)
    return columns, structure


def _take_all(nodes: Column, columns: list[Column]) -> Structure | None:
    """The structure that all ``nodes`` share, or ``None`` if they differ."""
    cls = type(nodes[0])
    kind = None if cls in LEAF_TYPES else kind_of(cls)
    if kind is None or is_made_of_tensors(cls):
        columns.append(nodes)
        all_leaves = LEAF_TYPES.issuperset(map(type, nodes)) or all(map(_is_leaf, nodes))
        return LEAF if all_leaves else None
    if len(set(map(type, nodes))) > 1:
        return None
    taken = [kind.take(node) for node in nodes]
    values, context = taken[0]
    for other_values, other_context in taken:
        if len(other_values) != len(values) or not same_context(context, other_context):
            return None
    before = len(columns)
    children = []
    for column in zip(*(values for values, _ in taken), strict=True):
        child = _take_all(column, columns)
        if child is None:
            return None
        children.append(child)
    flat = all(child is LEAF for child in children)
    num_leaves = sum(child.num_leaves for child in children)
    assert num_leaves == len(columns) - before
    return Structure(kind, context, None if flat else tuple(children), num_leaves)


def _is_leaf(value: Any) -> bool:
    cls = type(value)
    return cls in LEAF_TYPES or kind_of(cls) is None or is_made_of_tensors(cls)


def _difference(trees: Sequence[Any], root: str) -> InvalidValueError:
    structures = [flatten(tree, block_masks_are_leaves=True)[1] for tree in trees]
    m = next(m for m, other in enumerate(structures) if other != structures[0])
    path, here, there = _first_difference(structures[0], structures[m], root)
    return InvalidValueError(
        f"the structures differ at {path}: {here} in microbatch 0, {there} in microbatch {m}; "
        "return the same structure for every microbatch, or merge with a function"
    )


def _first_difference(a: Structure, b: Structure, path: str) -> tuple[str, str, str]:
    """Path of the first node that differs, and that node in ``a`` and in ``b`` as text."""
    if a.same_node(b):
        for key, child_a, child_b in zip(a.keys(), a.children, b.children, strict=True):
            if child_a != child_b:
                return _first_difference(child_a, child_b, path + key)
    return path, _text(a), _text(b)


def _text(structure: Structure) -> str:
    return "a single leaf" if structure.is_leaf else structure.describe()
