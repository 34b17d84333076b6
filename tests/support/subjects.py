"""The models of the equality matrix."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe.hf import cut_model

from .plain import Batch, Subject

ROWS = 12


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def squared_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).sum()


def _build_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 10), nn.ReLU(inplace=True), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3)
    )


def _mlp_batch(t: int) -> Batch:
    g = _generator(t)
    return Batch((torch.randn(ROWS, 6, generator=g),), {}, torch.randn(ROWS, 3, generator=g))


class ResidualConv(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


def _build_conv() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        ResidualConv(4),
        nn.BatchNorm2d(4),
        ResidualConv(4),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def _conv_batch(t: int) -> Batch:
    g = _generator(t)
    label = torch.randint(0, 3, (ROWS,), generator=g)
    return Batch((torch.randn(ROWS, 2, 5, 5, generator=g),), {}, label)


def _cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), label.flatten(), reduction="sum")


def _build_tied() -> nn.Sequential:
    torch.manual_seed(2)
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), head)


def _token_batch(t: int) -> Batch:
    g = _generator(t)
    tokens = torch.randint(0, 11, (ROWS, 5), generator=g)
    return Batch((tokens,), {}, torch.randint(0, 11, (ROWS, 5), generator=g))


def _build_frozen() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11)
    )
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


class Enter(nn.Module):
    """Takes nested arguments and puts a dictionary on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, pair: tuple[torch.Tensor, dict[str, Any]], *, mask: torch.Tensor, scale: float
    ) -> dict[str, Any]:
        x, more = pair
        hidden = self.linear(x) * scale
        return {"h": (hidden, more["residual"]), "mask": mask, "ids": more["ids"], "tag": "t"}


class Middle(nn.Module):
    """Uses some entries, changes one in place, passes the others on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden, residual = state["h"]
        hidden = self.linear(hidden.masked_fill(state["mask"], 0.0)) + residual
        hidden.mul_(0.5)
        return {**state, "h": (hidden, residual)}


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, state: dict[str, Any]) -> torch.Tensor:
        out: torch.Tensor = self.linear(state["h"][0]) * state["ids"]
        return out


def _build_nested() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(Enter(), Middle(), Middle(), Middle(), Leave())


def _nested_batch(t: int) -> Batch:
    g = _generator(t)
    x, residual = torch.randn(ROWS, 4, generator=g), torch.randn(ROWS, 4, generator=g)
    ids = torch.randint(1, 4, (ROWS, 1), generator=g)
    mask = torch.tensor([[True, False, False, False]])
    pair = (x, {"residual": residual.requires_grad_(), "ids": ids})
    return Batch((pair,), {"mask": mask, "scale": 0.5}, torch.randn(ROWS, 2, generator=g))


def _build_dropout() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Dropout(0.3), nn.Linear(10, 10), nn.Dropout(0.5), nn.Linear(10, 3)
    )


def _build_llama() -> nn.Sequential:
    return copy.deepcopy(_cut_llama())


@functools.cache
def _cut_llama() -> nn.Sequential:
    """Cutting takes longer than a training run of most rows."""
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    layers: nn.Sequential = cut_model(LlamaForCausalLM(config)).layers
    return layers


def _llama_batch(t: int) -> Batch:
    tokens = torch.randint(0, 40, (ROWS, 7), generator=_generator(t))
    mask = torch.ones(ROWS, 7, dtype=torch.long)
    mask[::3, 5:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return Batch((), {"input_ids": tokens, "attention_mask": mask, "labels": labels}, None)


def _own_loss(output: Any, _label: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


SUBJECTS = {
    "mlp": Subject(_build_mlp, _mlp_batch, squared_error),
    "conv": Subject(_build_conv, _conv_batch, _cross_entropy),
    "tied": Subject(_build_tied, _token_batch, _cross_entropy, tolerance=1e-6),
    "frozen": Subject(_build_frozen, _token_batch, _cross_entropy),
    "nested": Subject(_build_nested, _nested_batch, squared_error),
    "llama": Subject(_build_llama, _llama_batch, _own_loss),
}

DROPOUT = Subject(_build_dropout, _mlp_batch, squared_error)
