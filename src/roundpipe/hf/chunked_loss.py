"""Cross entropy over a large vocabulary without all logits at a time.

Rows of the hidden state go through projection, elementwise steps and loss a few at a time, and each
chunk's gradients are formed while its logits are there. So a pass costs the three matrix products
of the full head, and memory for one chunk. (The scheme is that of Liger, arXiv 2410.10989.)

``torch.nn.functional.linear_cross_entropy`` with chunks is not used: it has no steps between
projection and loss, and with 16-bit weights it gives the loss in 16 bits where the library forms it
in 32. ``benchmarks/head.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from roundpipe.errors import StateError

# Logits of one chunk in 32 bits; three to five tensors of this size are alive at a time. For each
# chunk weights are read and their gradients read and written, which an accelerator, fast in matrix
# products, must not do too often.
_CHUNK_BYTES = 32 * 2**20
_CHUNK_BYTES_ON_ACCELERATORS = 256 * 2**20

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ChunkedLoss:
    """What happens to a row of the hidden state.

    Attributes:
        steps: elementwise functions between projection and loss, in order.
        ignore_index: the target of rows that do not count.
        chunk_rows: rows that are worked on at a time.
    """

    steps: Sequence[Step]
    ignore_index: int
    chunk_rows: int


def rows_per_chunk(vocabulary: int, device: torch.device) -> int:
    """How many rows to work on at a time."""
    on_host = device.type == "cpu"
    chunk_bytes = _CHUNK_BYTES if on_host else _CHUNK_BYTES_ON_ACCELERATORS
    return max(1, chunk_bytes // (4 * vocabulary))


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: ChunkedLoss
) -> Tensor:
    """The sum over rows of the cross entropy of ``steps(hidden @ weight.T + bias)``.

    Args:
        hidden: (rows, features).
        weight: (vocabulary, features).
        bias: (vocabulary,) or ``None``.
        target: (rows,), class indices.
        loss: how.

    Returns:
        A scalar in the dtype of the last step's result. Its backward can run once.

    Raises:
        StateError: in a second backward.
    """
    # Told here because inside of an autograd function gradients are always off.
    wanted = torch.is_grad_enabled()
    result: Tensor = _Function.apply(hidden, weight, bias, target, loss, wanted)
    return result


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        loss: ChunkedLoss,
        wanted: bool,
    ) -> Tensor:
        needs = [wanted and need for need in ctx.needs_input_grad[:3]]
        sums = _Sums(hidden, weight, bias, needs)
        total = None
        for start in range(0, max(1, len(hidden)), loss.chunk_rows):
            part = slice(start, start + loss.chunk_rows)
            value = sums.add(part, target[part], loss)
            total = value if total is None else total + value
        ctx.sums = sums
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise StateError(
                "backward ran a second time through a loss without logits, whose gradients are "
                "gone; use the output's logits in the loss, so that they are computed in full"
            )
        sums, ctx.sums = ctx.sums, None
        return *sums.scaled(grad), None, None, None


class _Sums:
    """Gradients of the projection's inputs, added up over chunks."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.of_hidden = torch.empty_like(hidden) if needs[0] else None
        self.of_weight = _accumulator(weight) if needs[1] else None
        self.of_bias = _accumulator(bias) if needs[2] and bias is not None else None
        self._wanted = any(needs)

    def add(self, part: slice, target: Tensor, loss: ChunkedLoss) -> Tensor:
        """The loss of some rows; their gradients are added up."""
        rows = self.hidden[part]
        projected = F.linear(rows, self.weight, self.bias)
        if not self._wanted:
            logits = _through(projected, loss.steps)
            return F.cross_entropy(logits, target, ignore_index=loss.ignore_index, reduction="sum")
        with torch.enable_grad():
            projected.requires_grad_()
            logits = _through(projected, loss.steps)
        value, of_logits = _loss_and_gradient(logits.detach(), target, loss.ignore_index)
        if logits is projected:
            of_projected = of_logits
        else:
            (of_projected,) = torch.autograd.grad(logits, projected, of_logits)
        del logits, projected, of_logits
        self._spread(part, rows, of_projected)
        return value

    def _spread(self, part: slice, rows: Tensor, grad: Tensor) -> None:
        if self.of_hidden is not None:
            self.of_hidden[part] = grad @ self.weight.to(grad.dtype)
        if self.of_weight is not None:
            if grad.dtype == rows.dtype == self.of_weight.dtype:
                self.of_weight.addmm_(grad.t(), rows)
            else:
                self.of_weight += grad.t() @ rows.to(grad.dtype)
        if self.of_bias is not None:
            self.of_bias += grad.sum(0, dtype=self.of_bias.dtype)

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients times ``factor``; they are given away."""
        return (
            _scaled(self.of_hidden, factor, self.hidden),
            _scaled(self.of_weight, factor, self.weight),
            _scaled(self.of_bias, factor, self.bias),
        )


def _accumulator(like: Tensor) -> Tensor:
    # In 16 bits a sum over many chunks would lose what a single matrix product keeps.
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _scaled(grad: Tensor | None, factor: Tensor, like: Tensor | None) -> Tensor | None:
    if grad is None or like is None:
        return None
    return grad.mul_(factor).to(like.dtype)


def _through(value: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        value = step(value)
    return value


def _loss_and_gradient(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Sum of the rows' cross entropies, and its gradient, with one buffer besides the logits."""
    counts = (target != ignore_index)[:, None]
    index = target[:, None].masked_fill(~counts, 0)
    # Autocast may take the loss in more bits than the logits have.
    dtype = F.cross_entropy(logits[:1], index[:1, 0]).dtype
    log_probabilities = torch.log_softmax(logits.to(dtype), -1)
    value = -log_probabilities.gather(1, index).masked_fill_(~counts, 0).sum()
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=gradient.dtype))
    # A row that does not count may hold anything, infinities too.
    gradient.masked_fill_(~counts, 0)
    return value, gradient.to(logits.dtype)
