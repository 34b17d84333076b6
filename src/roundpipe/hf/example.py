"""A small batch to watch a model on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from roundpipe.hf.skeleton import first_device

# Different from each other and from the usual numbers of heads, so that dimensions can be told
# apart by their size.
_ROWS, _LENGTH, _PADDING = 2, 7, 2


def default_examples(model: nn.Module) -> list[dict[str, Any]]:
    """Small batches that the model's forward may take; the likeliest first.

    Token ids with one padded row, or images where it takes only those; labels of a language model,
    else of a classifier, else none.
    """
    names = forward_parameters(model)
    device = first_device((), model)
    inputs = _tokens(model)
    image = _image(model) if "pixel_values" in names else None
    if image is not None and getattr(model, "main_input_name", "") == "pixel_values":
        inputs = {"pixel_values": image}
    labels: list[torch.Tensor | None] = [_row_labels(model), None]
    if "input_ids" in inputs and not _labels_rows(model):
        ids = inputs["input_ids"]
        per_token = [ids.masked_fill(inputs["attention_mask"] == 0, -100), torch.zeros_like(ids)]
        labels = [*per_token, *labels]
    if "labels" not in names:
        labels = [None]
    batches = [{**inputs, "labels": value} for value in labels]
    return [
        {k: v.to(device) for k, v in batch.items() if k in names and v is not None}
        for batch in batches
    ]


def _labels_rows(model: nn.Module) -> bool:
    """Whether labels belong to whole rows: token-shaped ones might be broadcast, with a warning."""
    name = type(_inner(model)).__name__
    return name.endswith(("ForSequenceClassification", "ForImageClassification"))


def _row_labels(model: nn.Module) -> torch.Tensor:
    config = getattr(_inner(model), "config", None)
    kind, number = getattr(config, "problem_type", None), getattr(config, "num_labels", None)
    if not _labels_rows(model) or not isinstance(number, int):
        return torch.zeros(_ROWS, dtype=torch.long)
    if kind == "multi_label_classification" or (kind == "regression" and number > 1):
        return torch.zeros(_ROWS, number)
    real = number == 1 and kind in (None, "regression")
    return torch.zeros(_ROWS, dtype=torch.float32 if real else torch.long)


@contextmanager
def problem_type_kept(model: nn.Module) -> Iterator[None]:
    """The library notes in the config what the labels of the first call look like; undo that."""
    config = getattr(_inner(model), "config", None)
    kind = getattr(config, "problem_type", None)
    try:
        yield
    finally:
        if getattr(config, "problem_type", None) != kind:
            config.problem_type = kind  # type: ignore[union-attr]


def _tokens(model: nn.Module) -> dict[str, torch.Tensor]:
    high = max(2, min(_vocabulary(model), 100))
    ids = (torch.arange(_ROWS * _LENGTH).reshape(_ROWS, _LENGTH) * 7 + 3) % high
    mask = torch.ones_like(ids)
    mask[-1, -_PADDING:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _image(model: nn.Module) -> torch.Tensor | None:
    """Images of the size that the config names, if it names one."""
    config: Any = getattr(model, "config", None)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(sides) != 2:
        return None
    return torch.linspace(-1, 1, _ROWS * channels * sides[0] * sides[1]).view(
        _ROWS, channels, *sides
    )


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The named arguments of the forward that does the work; wrappers take just anything."""
    return inspect.signature(_inner(model).forward).parameters


def _inner(model: nn.Module) -> Any:
    """The model, without PEFT around it."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


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
        return config.get_text_config()  # type: ignore[union-attr]
    except (AttributeError, ValueError):  # musicgen has two
        return config


def _vocabulary(model: nn.Module) -> int:
    size = getattr(text_config(model), "vocab_size", None)
    return size if isinstance(size, int) else 2
