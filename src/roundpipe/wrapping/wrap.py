"""Wrapping any model: as a sequence of layers where one is known, else by size."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from roundpipe.config import RoundPipeRunConfig
from roundpipe.devices import DevicePool, open_pool
from roundpipe.errors import InvalidTypeError, InvalidValueError, RoundPipeError
from roundpipe.facade import name_of_caller
from roundpipe.pipeline import RoundPipe
from roundpipe.wrapping.choose import (
    Limits,
    PartSpec,
    Wishes,
    choose_parts,
    parameter_bytes,
)
from roundpipe.wrapping.parted import PartedModel, PartOptions, check_for_parts
from roundpipe.wrapping.parts import merged_config

# Of a device's memory the planner gives half to the running stage and half to the next one's
# weights, out of what it leaves for weights at all.
_SHARE_OF_DEVICE_MEMORY = 0.3

ModuleOrName = nn.Module | str


class UnknownModelError(RoundPipeError, NotImplementedError):
    """A model is not known as a sequence of layers."""


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Iterable[ModuleOrName] = (),
    override_config: Mapping[ModuleOrName, RoundPipeRunConfig] | None = None,
    model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    name: str | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe | PartedModel:
    """Wrap a model that is no ``nn.Sequential``.

    A model of transformers, or of PEFT around one, becomes a sequence: what comes before the
    layers, each layer, and norm, head and loss. The result takes the model's arguments, returns its
    own output class, and has its attributes, ``config``, ``save_pretrained`` and ``generate``.

    Any other model is wrapped by size: its own forward runs in host memory, and each part of it
    that is large enough is a RoundPipe of its own, one after the other. ``forward``, gradients and
    ``step`` work; ``forward_backward`` is refused, unless the whole model is one part or one
    ``nn.Sequential``. Each part cuts its inputs along dim 0, so that has to be the batch.

    Args:
        model: the model, in host memory. It is not changed.
        use_sequential_preset: ``True``: as a sequence or not at all. ``None``: as a sequence if the
            model can be one, else by size, with a warning that says why. ``False``: by size.
        lower_threshold: by size: modules with fewer bytes of parameters stay in host memory.
        upper_threshold: by size: modules with more bytes of parameters are wrapped in pieces, as
            far as they have any. By default the model's bytes / (devices + 1), and what a stage may
            take of a device's memory.
        skip_modules: by size: modules, or their names, that stay in host memory.
        override_config: by size: for modules, or their names, options that differ from
            ``model_run_config``; such a module becomes a part of its own.
        model_run_config: options of calls.
        name: shown in logs, errors and traces; by default ``file.py:line`` of the caller.
        example: as a sequence: keyword arguments of a small batch with all arguments that later
            calls will have. With it any module whose layers are in an ``nn.ModuleList`` is tried.
        **roundpipe_kwargs: further arguments of :class:`roundpipe.RoundPipe`.

    Returns:
        A RoundPipe, or a :class:`~roundpipe.wrapping.PartedModel` with the same methods.

    Raises:
        UnknownModelError: ``use_sequential_preset=True`` and nothing is known of the model's
            class. A ``NotImplementedError``.
        CutRefusedError: likewise, and the model cannot be a sequence, or a call cannot. A
            ``NotImplementedError``, too.
        InvalidTypeError: an argument is of the wrong kind.
        InvalidValueError: a threshold or a name of a module is impossible.
    """
    _check_kinds(model, use_sequential_preset, model_run_config)
    limits = _checked_thresholds(lower_threshold, upper_threshold)
    wishes = _wishes(model, skip_modules, override_config or {})
    name = name or name_of_caller(sys._getframe(1))
    roundpipe_kwargs.update(name=name, model_run_config=model_run_config)
    if use_sequential_preset is not False:
        if example is not None or _is_known(model):
            try:
                return _as_sequence(model, example, roundpipe_kwargs)
            except NotImplementedError as error:
                if use_sequential_preset:
                    raise
                warnings.warn(f"{error}. It is wrapped by size", stacklevel=2)
        elif use_sequential_preset:
            raise UnknownModelError(
                f"{type(model).__name__} is not known as a sequence of layers: known are models of "
                "transformers, and PEFT models around them, and any module with an nn.ModuleList "
                "of layers if example= is given; use nn.Sequential with RoundPipe itself, or "
                "use_sequential_preset=False"
            )
    return _by_size(model, limits, wishes, roundpipe_kwargs)


def _check_kinds(model: object, preset: object, config: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is a {type(model).__name__}; give an nn.Module")
    if isinstance(model, RoundPipe | PartedModel):
        raise InvalidTypeError("model is wrapped already; give the plain model")
    if preset is not None and not isinstance(preset, bool):
        raise InvalidTypeError(f"use_sequential_preset is {preset!r}; give True, False or None")
    if not isinstance(config, RoundPipeRunConfig):
        raise InvalidTypeError(
            f"model_run_config is a {type(config).__name__}; give a RoundPipeRunConfig"
        )


def _checked_thresholds(lower: object, upper: object) -> tuple[int, int | None]:
    lower_bytes = _checked_bytes("lower_threshold", lower)
    if upper is None:
        return lower_bytes, None
    upper_bytes = _checked_bytes("upper_threshold", upper)
    if upper_bytes < lower_bytes:
        raise InvalidValueError(
            f"upper_threshold ({upper_bytes}) is below lower_threshold ({lower_bytes}); no "
            "module fits between them"
        )
    return lower_bytes, upper_bytes


def _checked_bytes(label: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{label} is {value!r}; give a number of bytes")
    if value < 0:
        raise InvalidValueError(f"{label} is {value}; it must not be negative")
    return value


def _wishes(
    model: nn.Module,
    skipped: Iterable[ModuleOrName],
    configs: Mapping[ModuleOrName, RoundPipeRunConfig],
) -> Wishes:
    if isinstance(skipped, str | nn.Module):
        raise InvalidTypeError("skip_modules is one module; give a list of modules or names")
    named = dict(model.named_modules())
    known = {id(module) for module in named.values()}

    def find(given: object, argument: str) -> int:
        module = named.get(given) if isinstance(given, str) else given
        if not isinstance(module, nn.Module) or id(module) not in known:
            shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
            raise InvalidValueError(
                f"{argument} has {shown}, which is no module of {type(model).__name__}; give its "
                "modules, or their names as in named_modules()"
            )
        return id(module)

    for config in configs.values():
        if not isinstance(config, RoundPipeRunConfig):
            raise InvalidTypeError(
                f"override_config has a {type(config).__name__}; give a RoundPipeRunConfig each"
            )
    return Wishes(
        frozenset(find(module, "skip_modules") for module in skipped),
        {find(module, "override_config"): config for module, config in configs.items()},
    )


def _is_known(model: nn.Module) -> bool:
    # A model of transformers cannot be there before the library is.
    if "transformers" not in sys.modules:
        return False
    from roundpipe.hf import is_cuttable

    return is_cuttable(model)


def _as_sequence(
    model: nn.Module, example: Mapping[str, Any] | None, roundpipe_kwargs: Mapping[str, Any]
) -> RoundPipe:
    from roundpipe.hf import HuggingFacePipe, cut_model

    cut = cut_model(model, example)
    pipe = HuggingFacePipe(cut.layers, **roundpipe_kwargs)
    pipe.set_original_model(model)
    return pipe


def _by_size(
    model: nn.Module,
    limits: tuple[int, int | None],
    wishes: Wishes,
    roundpipe_kwargs: dict[str, Any],
) -> RoundPipe | PartedModel:
    options = dict(roundpipe_kwargs)
    devices = options.pop("devices", None)
    pool = open_pool(devices)
    try:
        lower, upper = limits
        upper_bytes = _default_upper(model, pool) if upper is None else upper
        choice = choose_parts(model, Limits(lower, max(lower, upper_bytes)), wishes)
    finally:
        if pool is not devices:
            pool.close()
    if not choice:
        if wishes.skipped:
            raise InvalidValueError(
                "nothing is left to wrap: all modules are in skip_modules, share parameters with "
                f"each other, or have fewer bytes of parameters than lower_threshold ({lower})"
            )
        choice = {id(model): PartSpec("", (model,))}
    whole = choice.get(id(model))
    if isinstance(whole, PartSpec):
        return _one_part(model, whole, roundpipe_kwargs)
    config = options.pop("model_run_config")
    check_for_parts(config)
    part_options = PartOptions(
        options.pop("name"), config, devices, options.pop("optim_dtype", None), options
    )
    return PartedModel(model, choice, part_options)


def _one_part(model: nn.Module, spec: PartSpec, roundpipe_kwargs: Mapping[str, Any]) -> RoundPipe:
    """The whole model is one part, and so a sequence."""
    options = dict(roundpipe_kwargs)
    options["model_run_config"] = merged_config(spec.config, options["model_run_config"])
    if spec.layers == (model,):
        return RoundPipe(model, **options)
    pipe = RoundPipe(nn.Sequential(*spec.layers), **options)
    pipe.set_original_model(model)
    return pipe


def _default_upper(model: nn.Module, pool: DevicePool) -> int:
    share = parameter_bytes(model) // (len(pool.devices) + 1)
    limits = [device.memory().total_bytes for device in pool.devices]
    known = [int(_SHARE_OF_DEVICE_MEMORY * limit) for limit in limits if limit]
    return min([share, *known])
