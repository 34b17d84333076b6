"""Warnings that are given once, and text for messages."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

_PACKAGE = str(Path(__file__).parent.parent)


class MicrobatchWarning(UserWarning):
    """Something about the split is legal and perhaps not what was meant."""


def count_of(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shorten(value: Any) -> str:
    """``value`` as text that fits into a sentence."""
    if isinstance(value, torch.Tensor) and value.numel() > 4:
        return f"a tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def warn_once(key: str, message: str, warned: set[str] | None = None) -> None:
    """Warn, at the line of the caller's code that called roundpipe.

    Args:
        key: what the warning is about.
        message: its text.
        warned: keys that were warned about already, owned by whoever may warn again; the key is
            added. ``None`` warns every time.
    """
    if warned is not None:
        if key in warned:
            return
        warned.add(key)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, MicrobatchWarning, stacklevel=level)
