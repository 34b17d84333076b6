"""Splitting argument trees into microbatches and merging outputs.

``TensorChunkSpec``, ``Replicate`` and ``CustomReducer`` are the classes of
``torch.distributed.pipelining.microbatch``, imported when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe import compat
from roundpipe.microbatch.chunks import merge_chunks, split_args_kwargs_into_chunks
from roundpipe.microbatch.merge import merge_outputs
from roundpipe.microbatch.messages import MicrobatchWarning
from roundpipe.microbatch.packed import RoundPipePackedData, packed_count, packed_leaves
from roundpipe.microbatch.split import Batch, Microbatch, split_batch
from roundpipe.microbatch.tree import Structure, flatten, flatten_with_paths, unflatten

if TYPE_CHECKING:
    TensorChunkSpec: Any
    Replicate: Any
    CustomReducer: Any

__all__ = [
    "Batch",
    "CustomReducer",
    "Microbatch",
    "MicrobatchWarning",
    "Replicate",
    "RoundPipePackedData",
    "Structure",
    "TensorChunkSpec",
    "flatten",
    "flatten_with_paths",
    "merge_chunks",
    "merge_outputs",
    "packed_count",
    "packed_leaves",
    "split_args_kwargs_into_chunks",
    "split_batch",
    "unflatten",
]

_SPECS = {"TensorChunkSpec": "chunk", "Replicate": "replicate", "CustomReducer": "reducer"}


def __getattr__(name: str) -> Any:
    if name in _SPECS:
        return getattr(compat.spec_classes(load=True), _SPECS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
