"""Loading models and tokenizers of transformers from a folder, a GGUF file or the hub."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.hf import private

Source = str | PathLike[str]


def load_model(source: Source, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a causal language model onto the CPU.

    Weights are read tensor by tensor, never a second time as a whole. Where a folder's safetensors
    have the wanted dtype already, the parameters are views of the mapped files: pages are read
    when they are first used, and with ``pin_model="off"`` a RoundPipe leaves them so. GGUF weights
    are dequantised, one tensor at a time.

    Args:
        source: a local folder, a ``.gguf`` file, or the id of a model on the hub.
        dtype: dtype of the parameters; by default as stored, for GGUF ``torch.float32``.

    Returns:
        The model, in eval mode, with gradients on, ready for :func:`roundpipe.hf.cut_model`.

    Raises:
        InvalidValueError: there is no such folder or file, or the file is no GGUF file.
        InvalidTypeError: an argument is of another kind.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidTypeError(
            f"dtype is {dtype!r}; expected a torch.dtype such as torch.bfloat16, or None"
        )
    place = _find(source)
    wanted: Any = dtype if dtype is not None else place.default_dtype
    options = {**place.options, "dtype": wanted}
    if place.gguf_file is not None:
        options.update(private.gguf_options(place.gguf_file))
    with reading_once():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(place.name, **options)
    if place.gguf_file is not None:
        private.forget_quantization(model)
    return model


def reading_once() -> AbstractContextManager[None]:
    """Within it, loading from one GGUF file several times reads it once.

    For a model and its tokenizer. Not to be held for long: other threads wait to load.
    """
    return private.quick_gguf()


def load_tokenizer(source: Source) -> Any:
    """Load the tokenizer that belongs to a model.

    Args:
        source: as for :func:`load_model`.

    Returns:
        A tokenizer of transformers.

    Raises:
        InvalidValueError: there is no such folder or file, or the file is no GGUF file.
        InvalidTypeError: ``source`` is of another kind.
    """
    place = _find(source)
    options = dict(place.options)
    if place.gguf_file is not None:
        options["gguf_file"] = place.gguf_file
    return AutoTokenizer.from_pretrained(place.name, **options)


@dataclass(frozen=True)
class _Place:
    """Where the library finds the files."""

    name: str
    options: dict[str, Any]
    default_dtype: torch.dtype | str = "auto"
    gguf_file: str | None = None


def _find(source: Source) -> _Place:
    if not isinstance(source, (str, PathLike)):
        raise InvalidTypeError(
            f"source is a {type(source).__name__}; expected a folder, a .gguf file or a hub id"
        )
    text = fspath(source)
    path = Path(text).expanduser()
    if path.is_dir():
        return _Place(str(path), {"local_files_only": True})
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise InvalidValueError(
                f"{text} is a file, but no .gguf file; pass the folder that holds config.json"
            )
        return _Place(str(path.parent), {"local_files_only": True}, torch.float32, path.name)
    if (
        isinstance(source, PathLike)
        or path.suffix.lower() == ".gguf"
        or text[:1] in ("/", ".", "~")
    ):
        raise InvalidValueError(
            f"there is no file or folder {text}; pass an existing one, or the id of a model on the "
            "hub such as HuggingFaceTB/SmolLM2-135M"
        )
    return _Place(text, {})
