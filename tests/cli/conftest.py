"""A tiny language model on disk, and a recipe that trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import make_model, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe_file(tmp_path: Path, model_folder: Path) -> Path:
    """A recipe that trains the tiny model for a second, into ``tmp_path / "run"``."""
    words = ["while", "for", "if", "try", "with", "class", "def", "return", "yield"]
    lines = [json.dumps({"text": f"{word} is a keyword of Python"}) for word in words]
    data = model_folder.parent / "keywords.jsonl"
    data.write_text("\n".join(lines), encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""\
model:
  source: {model_folder}
data:
  source: {data}
  sequence_length: 16
  eval_sequences: 4
training:
  steps: 4
  eval_every: 2
  async_step: false
optimizer:
  lr: 1.0e-2
sample:
  prompt: while
  max_new_tokens: 4
output:
  folder: {tmp_path / "run"}
devices: cpu:2
""",
        encoding="utf-8",
    )
    return path
