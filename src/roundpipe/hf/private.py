"""The only module that touches private or version-dependent names of transformers.

Each name has a test in ``tests/hf/test_private.py``, so that an upgrade fails there first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

try:  # since transformers 5.2
    from transformers.utils import output_capturing as _capturing
except ImportError:  # pragma: no cover - transformers 5.0 and 5.1
    _capturing = None

try:  # since transformers 5.20 or so; before that GGUF weights were always unpacked
    from transformers import GgufConfig
except ImportError:  # pragma: no cover
    GgufConfig = None

_GGUF_LOCK = threading.RLock()  # names in a module of another library are exchanged for a while
_HOOKED = "_output_capturing_hooks_installed"
# Outputs that have one entry per layer *and* depend on the layers' neighbours; they are refused.
_NOT_COLLECTED = frozenset({"hidden_states", "attentions", "cross_attentions"})


def is_pretrained(module: object) -> bool:
    """Whether ``module`` is a model of transformers."""
    return isinstance(module, PreTrainedModel)


def is_cache(value: object) -> bool:
    """Whether ``value`` keeps keys and values of earlier tokens."""
    return isinstance(value, Cache)


def active_collector() -> dict[str, list[Any]]:
    """What the innermost running model collects from its layers, by output name."""
    if _capturing is None:
        return {}
    # Besides the lists the library keeps settings in it.
    collector = _capturing._active_collector.get() or {}
    return {key: values for key, values in collector.items() if isinstance(values, list)}


def per_layer_outputs(names: Iterable[str]) -> list[str]:
    """Those of the output names that have one entry per layer and cannot be cut."""
    return sorted(_NOT_COLLECTED.intersection(names))


@contextmanager
def collecting(keys: tuple[str, ...]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collect the outputs named ``keys`` from the modules that run inside the block.

    The library does the same around a whole model; the hooks that fill the lists sit on the
    modules already. Lists are local to the thread.
    """
    caught: dict[str, list[torch.Tensor]] = {key: [] for key in keys}
    if not keys or _capturing is None:
        yield caught
        return
    token = _capturing._active_collector.set(caught)
    try:
        yield caught
    finally:
        _capturing._active_collector.reset(token)


def collectable_outputs(model: nn.Module) -> list[str]:
    """Names of the outputs that the model, or a model inside it, collects from its layers.

    Hidden states and attentions are left out.
    """
    if _capturing is None:
        return []
    names: dict[str, None] = {}
    for module in model.modules():
        if is_pretrained(module):
            names.update(dict.fromkeys(_capturing._CAN_RECORD_REGISTRY.get(module)))
    return [name for name in names if name not in _NOT_COLLECTED]


def has_collecting_hooks(module: nn.Module) -> bool:
    """Whether the library has put its collecting hooks on the parts of ``module``."""
    return bool(module.__dict__.get(_HOOKED, False))


def initialise(model: PreTrainedModel) -> None:
    """Give all parameters and buffers the values that a new model has."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.__dict__.pop("_is_hf_initialized", None)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.init_weights()


def gguf_options(file_name: str) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that load a GGUF file with all weights unpacked."""
    options: dict[str, Any] = {"gguf_file": file_name}
    if GgufConfig is not None:
        options["quantization_config"] = GgufConfig(dequantize=True)
    return options


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Within it a GGUF file is read once, and its table of tensor names is made once.

    The library makes the table for each of the model's modules and reads the file's header, which
    holds the vocabulary as single strings, for config, tokenizer and weights each: without this
    that is most of the loading time. One thread at a time is in it; the others wait.
    """
    try:
        import gguf
    except ImportError:  # the library says what is missing when it is asked to load
        yield
        return
    readers: dict[str, Any] = {}

    def reader(path: Any, *args: Any, **kwargs: Any) -> Any:
        key = f"{path} {args} {kwargs}"
        if key not in readers:
            readers[key] = original_reader(path, *args, **kwargs)
        return readers[key]

    with _GGUF_LOCK:
        original_reader, original_map = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader = reader
        gguf.get_tensor_name_map = functools.cache(original_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = original_reader, original_map


def forget_quantization(model: nn.Module) -> None:
    """Let an unpacked model be trained and saved like any other."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
