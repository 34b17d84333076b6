"""What ``roundpipe verify`` runs: model, small batch and loss, from a file or transformers."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roundpipe import verify
from roundpipe.cli.problems import UsageError

BUILD = "build"
_ROWS, _TOKENS = 6, 16


@dataclass(frozen=True)
class Subject:
    """The arguments of :func:`roundpipe.verify`."""

    model: Any
    inputs: Any = ()
    label: Any = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def subject_of(source: str, function: str) -> Subject:
    """The subject in a Python file, or around a model of ``transformers``.

    Args:
        source: a ``.py`` file, a model's folder or ``.gguf`` file, or a name on the hub.
        function: the function in the Python file.

    Raises:
        UsageError: there is no such thing, or it is unusable.
    """
    if source.endswith(".py"):
        return _from_file(Path(source), function)
    return _from_transformers(source)


def _from_file(path: Path, function: str) -> Subject:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: this is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import would; classes look for their module there
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(_failure(error, path)) from error
    finally:
        sys.path.pop(0)
    build = getattr(module, function, None)
    if not callable(build):
        raise UsageError(
            f"{path} has no function {function}(); write one that returns a dict with model, "
            "inputs, label and loss_fn, or name another with --function"
        )
    try:
        result = build()
    except Exception as error:
        raise UsageError(_failure(error, path)) from error
    return _from_result(result, f"{path}: {function}()")


def _failure(error: Exception, path: Path) -> str:
    """What the user's file did, and in which of its lines."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).name == path.name
    ]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        lines = [error.lineno]
    where = f"{path}, line {lines[-1]}" if lines else str(path)
    return f"{where}: {type(error).__name__}: {error}"


def _from_result(result: Any, where: str) -> Subject:
    names = ("model", "inputs", "label", "loss_fn")
    if isinstance(result, tuple):
        result = dict(zip(names, result, strict=False))
    if not isinstance(result, Mapping) or "model" not in result:
        raise UsageError(
            f"{where} returned a {type(result).__name__}; return a dict with model, inputs, label "
            "and loss_fn (further entries are keyword arguments of roundpipe.verify), or a tuple "
            "in that order"
        )
    options = {name: value for name, value in result.items() if name not in names}
    known = [*names, *inspect.signature(verify).parameters]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known[4:])}"
            raise UsageError(f"{where} returned a dict with {name!r}, which is unknown; {hint}")
    given = {name: result[name] for name in names if result.get(name) is not None}
    return Subject(options=options, **given)


def _from_transformers(source: str) -> Subject:
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            "a model of transformers needs transformers; run: pip install 'roundpipe[hf]'"
        )
    from roundpipe.cli.model_source import find_model, load_model
    from roundpipe.hf import cut_model

    try:
        model = load_model(find_model(source), torch.float32, with_tokenizer=False).model
    except UsageError as error:
        # Those functions speak of the recipe that names the model; here is none.
        problems = [problem.removeprefix("model.source: ") for problem in error.problems]
        raise UsageError(problems) from error
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(0, vocabulary, (_ROWS, _TOKENS), generator=generator)
    return Subject(
        cut_model(model).layers,
        (),
        tokens.roll(-1, 1),
        _next_token_loss,
        {"input_kwargs": {"input_ids": tokens}},
    )


def _next_token_loss(output: Any, label: torch.Tensor) -> torch.Tensor:
    logits = output.logits.flatten(0, 1).float()
    # A sum: the mean over a microbatch is no part of the mean over the batch.
    return torch.nn.functional.cross_entropy(logits, label.flatten(), reduction="sum")
