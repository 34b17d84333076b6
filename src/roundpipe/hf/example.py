"""A small batch to watch a model on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.hf.skeleton import first_device

# Different from each other and from the usual numbers of heads, so that dimensions can be told
# apart by their size.
_ROWS, _LENGTH, _PADDING = 2, 7, 2


def default_example(model: nn.Module) -> dict[str, Any]:
    """Token ids with one padded row, and labels, as far as the model's forward takes them."""
    names = forward_parameters(model)
    device = first_device((), model)
    high = max(2, min(_vocabulary(model), 100))
    ids = (torch.arange(_ROWS * _LENGTH).reshape(_ROWS, _LENGTH) * 7 + 3) % high
    mask = torch.ones_like(ids)
    mask[-1, -_PADDING:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: value.to(device) for name, value in batch.items() if name in names}


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The named arguments of the forward that does the work; wrappers take just anything."""
    base = getattr(model, "get_base_model", None)
    inner = base() if callable(base) else model
    return inspect.signature(inner.forward).parameters


def takes_use_cache(model: nn.Module) -> bool:
    """Whether the model keeps a cache unless told otherwise."""
    return "use_cache" in forward_parameters(model) or (
        any(p.kind is p.VAR_KEYWORD for p in forward_parameters(model).values())
        and hasattr(text_config(model), "use_cache")
    )


def text_config(model: nn.Module) -> Any:
    """The config of the language model in it, where there is one."""
    config = getattr(model, "config", None)
    try:
        return config.gettext_config()  # type: ignore[union-attr]
    except (AttributeError, ValueError):  # musicgen has two
        return config


def _vocabulary(model: nn.Module) -> int:
    size = getattr(text_config(model), "vocab_size", None)
    return size if isinstance(size, int) else 2
