"""Arguments or labels, taken apart, with what is to be done to each leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from roundpipe.microbatch.columns import Column, trees_from_columns
from roundpipe.microbatch.cutting import dim_to_cut, rows_of
from roundpipe.microbatch.nodes import LEAF_TYPES
from roundpipe.microbatch.packed import RoundPipePackedData
from roundpipe.microbatch.specs import AUTO, Rule, Where, match_spec
from roundpipe.microbatch.tree import flatten


class ArgumentTree:
    """A tree, its leaves, and along which dimension each leaf is to be cut.

    Attributes:
        leaves: the leaves.
        rules: what was said about each leaf.
        dims: the dimension along which each leaf is to be cut, ``None`` if it goes whole.
        rows: how many rows each leaf has along that dimension, ``None`` if it goes whole.
        ways_out: how the caller can say what to do, for messages.
    """

    __slots__ = ("_roots", "_structure", "dims", "leaves", "rows", "rules", "ways_out")

    def __init__(
        self, tree: Any, roots: Sequence[str], specs: Sequence[Any], name: str, ways_out: str
    ) -> None:
        """Take ``tree`` apart.

        Args:
            tree: a tuple with one entry for each of ``roots``.
            roots: how the paths into each entry begin.
            specs: the spec of each entry.
            name: what the specs were given as, for messages.
            ways_out: how the caller can say what to do, for messages.
        """
        self.leaves, self._structure = flatten(tree, block_masks_are_leaves=True)
        self._roots = roots
        self.ways_out = ways_out
        self.rules: list[Rule] = [AUTO] * len(self.leaves)
        if any(spec is not None for spec in specs):
            children = zip(specs, self._structure.children, roots, strict=True)
            self.rules = [
                rule for s, child, root in children for rule in match_spec(s, child, root, name)
            ]
        self.dims = [
            dim_to_cut(leaf, rule, self.where(i))
            for i, (leaf, rule) in enumerate(zip(self.leaves, self.rules, strict=True))
        ]
        self.rows = [
            None if dim is None else rows_of(leaf, dim)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]

    def path(self, index: int) -> str:
        """The path of a leaf, as ``kwargs['mask']``."""
        pairs = zip(self._structure.children, self._roots, strict=True)
        return [path for child, root in pairs for path in child.paths(root)][index]

    def where(self, index: int) -> Where:
        """Gives the path of a leaf when it is needed."""
        return partial(self.path, index)

    def batch_leaf(self) -> int | None:
        """Index of the first leaf with the number of rows that most leaves have.

        BlockMasks have no say where tensors have one; of two numbers that are equally frequent,
        the one that comes first counts.
        """
        voters = [i for i, rows in enumerate(self.rows) if rows is not None]
        tensors = [i for i in voters if isinstance(self.leaves[i], torch.Tensor)]
        voters = tensors or voters
        if not voters:
            return None
        rows, _ = Counter(self.rows[i] for i in voters).most_common(1)[0]
        return next(i for i in voters if self.rows[i] == rows)

    def batch_path(self) -> str:
        """The path of the batch leaf, for messages."""
        leader = self.batch_leaf()
        assert leader is not None
        return self.path(leader)

    def is_packed(self, index: int) -> bool:
        """Whether a leaf is packed data."""
        return isinstance(self.leaves[index], RoundPipePackedData)

    def packed(self) -> list[int]:
        """Indices of the leaves that are packed data."""
        return [i for i in range(len(self.leaves)) if self.is_packed(i)]

    def opaque(self) -> list[int]:
        """Indices of leaves that look like containers with tensors, but are none to roundpipe."""
        return [
            i
            for i, leaf in enumerate(self.leaves)
            if type(leaf) not in LEAF_TYPES and _hides_tensors(leaf)
        ]

    def assemble(self, columns: Sequence[Column], count: int) -> list[Any]:
        """``count`` trees; the m-th has the m-th value of each leaf's column."""
        return trees_from_columns(self._structure, columns, count)


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, RoundPipePackedData):
        return False
    if isinstance(leaf, Mapping):
        return any(isinstance(value, torch.Tensor) for value in leaf.values())
    if isinstance(leaf, list | tuple | set | frozenset):
        return any(isinstance(value, torch.Tensor) for value in leaf)
    return False
