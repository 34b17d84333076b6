"""Merging the outputs of the microbatches into the output of the call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from roundpipe.microbatch.columns import columns_from_trees
from roundpipe.microbatch.custom import is_function
from roundpipe.microbatch.joining import AVERAGE_SCALARS, Manner, join
from roundpipe.microbatch.packed import RoundPipePackedData
from roundpipe.microbatch.specs import Rule, match_spec
from roundpipe.microbatch.tree import Structure, unflatten


def merge_outputs(outputs: Sequence[Any], merge_output: Any = None) -> Any:
    """Merge the outputs of the microbatches.

    Args:
        outputs: one output per microbatch, in order, all of the same structure.
        merge_output: ``None`` or ``True`` for the automatic rule, a spec that mirrors the output,
            a function that gets the list of outputs, or ``False`` to leave the leaves packed.

    Returns:
        The merged output. Gradients flow through it. A single microbatch's tensors are returned as
        they are, without a copy.

    Raises:
        InvalidValueError: the outputs, or the spec, do not fit together.
        InvalidTypeError: ``merge_output`` is none of the above.
    """
    if merge_output is not None and is_function(merge_output):
        return merge_output(list(outputs))
    columns, structure = columns_from_trees(outputs, "output")
    if merge_output is False:
        return unflatten(structure, [RoundPipePackedData(c) for c in columns])
    spec = None if merge_output is True else merge_output
    rules = match_spec(spec, structure, "output", "merge_output")
    return join_columns(columns, rules, structure, "output", AVERAGE_SCALARS)


def join_columns(
    columns: Sequence[Sequence[Any]],
    rules: Sequence[Rule],
    structure: Structure,
    root: str,
    manner: Manner,
) -> Any:
    """Join each leaf's values as its rule says, and put the leaves together."""
    merged = [
        join(column, rule, partial(structure.path, root, i), manner)
        for i, (column, rule) in enumerate(zip(columns, rules, strict=True))
    ]
    return unflatten(structure, merged)
