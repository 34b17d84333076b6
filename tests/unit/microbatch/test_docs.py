"""The manual is run, and shows every message that this part can give."""

from __future__ import annotations

import ast
import doctest
import warnings
from pathlib import Path
from typing import Any

import pytest

import roundpipe.microbatch

MANUAL = Path(__file__).parents[3] / "docs" / "microbatches.md"
PART = Path(roundpipe.microbatch.__file__).parent
SOURCES = [*sorted(PART.glob("*.py")), PART.parent / "in_flight.py"]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
RAISES = {"InvalidValueError", "InvalidTypeError", "StateError"}


def _print_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    print(f"{category.__name__}: {message}")  # noqa: T201 - into the example's output


@pytest.mark.filterwarnings("default")
def test_the_examples_give_what_the_manual_says() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", roundpipe.microbatch.MicrobatchWarning)
        warnings.showwarning = _print_warning  # type: ignore[assignment]
        result = doctest.testfile(str(MANUAL), module_relative=False, optionflags=FLAGS)
    assert result.attempted > 60
    assert result.failed == 0


def fixed_parts(node: ast.expr) -> list[str]:
    """The parts of a message that are the same each time."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]


def messages() -> list[tuple[str, str]]:
    """Every fixed part, of some length, of every error and warning, with its place."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            texts = node.args[:1] if node.func.id in RAISES else []
            texts = node.args[1:2] if node.func.id == "warn_once" else texts
            for part in (part for text in texts for part in fixed_parts(text)):
                words = " ".join(part.split())
                if len(words) > 8:
                    found.append((f"{path.name}:{node.lineno}", words))
    return found


def test_every_message_is_in_the_manual() -> None:
    manual = " ".join(MANUAL.read_text().split())
    parts = messages()
    assert len(parts) > 50
    assert [(place, part) for place, part in parts if part not in manual] == []
