"""Moving rows between ranks, from one distribution of the rows to another.

A distribution is given as, for each rank, the numbers of the rows that it holds, in its order. All
ranks know both distributions, so each knows what to send to whom without asking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from roundpipe.microbatch.sizes import chunk_sizes, spans


def rows_of_whole(shards: Sequence[int]) -> list[torch.Tensor]:
    """Per rank, which rows of the whole tensor it holds when the tensor is sharded."""
    return [torch.arange(start, start + size) for start, size in spans(shards)]


def rows_of_pieces(totals: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Per rank, which rows it holds when the pieces, each sharded, lie one after the other."""
    held: list[list[torch.Tensor]] = [[torch.arange(0)] for _ in range(ranks)]
    for first_row, total in spans(totals):
        for rank, (start, size) in enumerate(spans(chunk_sizes(total, ranks))):
            held[rank].append(torch.arange(size) + (first_row + start))
    return [torch.cat(rows) for rows in held]


def move_rows(
    rows: torch.Tensor,
    source: list[torch.Tensor],
    target: list[torch.Tensor],
    rank: int,
    group: Any,
) -> torch.Tensor:
    """Exchange rows, so that this rank holds what ``target`` says. All ranks call it together.

    Args:
        rows: what this rank holds, rows along dimension 0.
        source: the present distribution.
        target: the wanted one.
        rank: of this process in ``group``.
        group: the process group.

    Returns:
        The rows ``target[rank]``, in that order. Gradients go back the same way.
    """
    owner = torch.empty(sum(map(len, source)), dtype=torch.long)
    position = torch.empty_like(owner)
    for holder, numbers in enumerate(source):
        owner[numbers] = holder
        position[numbers] = torch.arange(len(numbers))
    to_send = [position[numbers[owner[numbers] == rank]] for numbers in target]
    senders = owner[target[rank]]
    place = senders.argsort(stable=True).argsort()  # rows arrive by sender, then in my order
    incoming: torch.Tensor = _Exchange.apply(
        rows.index_select(0, torch.cat(to_send).to(rows.device)),
        [len(numbers) for numbers in to_send],
        torch.bincount(senders, minlength=len(source)).tolist(),
        group,
    )
    return incoming.index_select(0, place.to(rows.device))


class _Exchange(torch.autograd.Function):
    """``all_to_all`` of rows; its backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any
    ) -> torch.Tensor:
        ctx.splits = (sent, received, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.splits
        return _exchange(grads[0], received, sent, group), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    result: torch.Tensor = rows.new_empty([sum(received), *rows.shape[1:]])
    width = math.prod(rows.shape[1:])
    if width:
        # As bytes, because not every back end moves every dtype.
        outgoing = rows.contiguous().view(len(rows), width).view(torch.uint8)
        incoming = result.view(len(result), width).view(torch.uint8)
        dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    return result
