"""Models that are no sequence, and training them with and without roundpipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH, VOCABULARY, LENGTH = 64, 80, 6


class Block(nn.Module):
    """A residual block of 130 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        return result


class Net(nn.Module):
    """Embedding, positions of its own, two towers that are added, a head; counts its calls."""

    calls: int

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.left = nn.ModuleList([Block(), Block()])
        self.right = nn.Sequential(Block(), nn.GELU(), Block())
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.embed(ids) + self.positions
        left = hidden
        for block in self.left:
            left = block(left)
        mixed = left + torch.sigmoid(self.gate(hidden)) * self.right(hidden)
        logits: torch.Tensor = self.head(mixed)
        return logits


def token_ids(rows: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed)
    )


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    loss: torch.Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    return loss


def train(pipe: Any, steps: int, *, is_async: bool) -> list[float]:
    """The losses of ``steps`` steps of momentum SGD through a wrapped model."""
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.5, momentum=0.9)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = []
    for seed in range(steps):
        loss = loss_of(pipe, token_ids(seed=seed))
        loss.backward()
        losses.append(loss.item())
        pipe.step(update, is_async=is_async)
    pipe.synchronize()
    return losses


def train_plain(model: nn.Module, steps: int, *, stale: bool) -> list[float]:
    """The same with PyTorch alone; with ``stale`` each call sees the weights of one step before."""
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.5, momentum=0.9)
    losses = []
    for seed in range(steps):
        loss = loss_of(model, token_ids(seed=seed))
        loss.backward()
        losses.append(loss.item())
        before = [master.detach().clone() for master in masters]
        _step(model, masters, optimizer.step)
        _publish(model, before if stale else masters)
    _publish(model, masters)
    return losses


def _step(model: nn.Module, masters: list[nn.Parameter], step: Callable[[], Any]) -> None:
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad, parameter.grad = parameter.grad, None
    step()


def _publish(model: nn.Module, values: Any) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
