"""Large random models for benchmarks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.hf import private

_RANGE = 0.02  # the usual standard deviation of new weights


def init_random(
    config: PreTrainedConfig,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    model_class: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Make a model with random weights, each of which is written once, in its final dtype.

    The model is built without memory for its weights; then one module after the other gets its own
    and is initialised by the library's rule. So the peak is the model's size, and nothing is spent
    on the initialisation that torch's modules do when they are made.

    Args:
        config: a config of transformers.
        dtype: dtype of the parameters; by default the config's, else ``torch.float32``.
        seed: of the weights; the caller's generator is left alone.
        model_class: the class, or an auto class of transformers.

    Returns:
        The model, in training mode.

    Raises:
        InvalidTypeError: ``config`` is no config, or ``dtype`` no dtype.
        InvalidValueError: the model computes something in its constructor that no rule repeats.
    """
    if not isinstance(config, PreTrainedConfig):
        raise InvalidTypeError(
            f"config is a {type(config).__name__}; give a config of transformers, as "
            "AutoConfig.from_pretrained or LlamaConfig(...) makes one"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidTypeError(
            f"dtype is {dtype!r}; expected a torch.dtype such as torch.bfloat16, or None"
        )
    build = getattr(model_class, "from_config", None) or model_class._from_config
    config = copy.deepcopy(config)  # the library notes the dtype in it
    with torch.device("meta"):
        model: PreTrainedModel = build(config, dtype=dtype or config.dtype or torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        empty = _give_memory(model)
        private.initialise(model)
        _fill_the_rest(model, [tensor for tensor in empty if tensor._version == 0])
    return model.train()


def _give_memory(model: nn.Module) -> list[torch.Tensor]:
    """Replace tensors without memory by empty ones, which are returned; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}

    def of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    table[name] = of(tensor)  # type: ignore[assignment]
    return list(made.values())


def _fill_the_rest(model: nn.Module, untouched: list[torch.Tensor]) -> None:
    """What only a constructor initialises, and the library's rule leaves out."""
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    for tensor in untouched:
        name = names.get(id(tensor))
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            tensor.normal_(0.0, getattr(model.config, "initializer_range", _RANGE))
        elif name is not None and tensor.numel() > 0:
            raise InvalidValueError(
                f"{name} of {type(model).__name__} is computed in the constructor only, so the "
                "model cannot be made without it: use from_config of the class"
            )
