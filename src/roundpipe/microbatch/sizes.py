"""How a dimension is divided: into microbatches, and by DTensor into shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def even_sizes(total: int, count: int) -> list[int]:
    """Sizes of ``torch.tensor_split(x, count)``: at most one apart, larger ones first."""
    size, larger = divmod(total, count)
    return [size + 1] * larger + [size] * (count - larger)


def chunk_sizes(total: int, count: int) -> list[int]:
    """Sizes of the shards of a dimension: equal ones, perhaps a smaller one, then zeros."""
    size = -(-total // count)
    return [min(size, max(0, total - i * size)) for i in range(count)]


def nested_chunk_sizes(total: int, counts: Sequence[int]) -> list[int]:
    """Sizes of the shards if several mesh dimensions shard a dimension, one after the other."""
    sizes = [total]
    for count in counts:
        sizes = [part for size in sizes for part in chunk_sizes(size, count)]
    return sizes


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and length of consecutive pieces."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))
