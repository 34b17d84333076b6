"""Small models in the manner of transformers, each with one habit that a cut has to deal with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH = 6
VOCABULARY = 11


@dataclass
class Output:
    """As the library's outputs are."""

    logits: Any
    loss: Any = None


class Layer(nn.Module):
    """Keeps the shape of its input."""

    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, extra: Any = None) -> Any:
        return hidden + torch.tanh(self.linear(hidden))

    def describe(self) -> str:
        """A method that is no part of the forward."""
        return self.kind


class Toy(nn.Module):
    """Embedding, layers, norm and head; subclasses change one step."""

    layer_class: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([self.layer_class() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any
    ) -> Any:
        hidden = self.before(self.embed(input_ids), options)
        for index, layer in enumerate(self.layers):
            hidden = self.call(layer, hidden, index, options)
            hidden = self.between(hidden, index, options)
        logits = self.head(self.norm(self.after(hidden, options)))
        if labels is None:
            return Output(logits)
        return Output(logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    def before(self, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Between the embedding and the first layer."""
        return hidden

    def call(
        self, layer: nn.Module, hidden: torch.Tensor, index: int, options: dict[str, Any]
    ) -> Any:
        """Call one layer."""
        return layer(hidden)

    def between(self, hidden: Any, index: int, options: dict[str, Any]) -> torch.Tensor:
        """After each layer."""
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def after(self, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Between the last layer and the norm."""
        return hidden


def toy_batch(rows: int = 2, length: int = 5) -> dict[str, torch.Tensor]:
    """Tokens and labels."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": (ids + 1) % VOCABULARY}
