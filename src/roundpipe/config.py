"""Run configuration: what the user gave, and the one frozen record the engine works with."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from .errors import InvalidTypeError, InvalidValueError
from .plan import ModelExecutePlan

RECOMPUTE_GRAINS = ("stage", "layer")
LOSS_REDUCTIONS = ("sum", "mean")


@dataclass(frozen=True)
class RoundPipeRunConfig:
    """Options of one call, or the defaults of a model. ``None`` means "not given".

    A value given in the call wins over the model's, which wins over the built-in default.

    Attributes:
        requires_grad: keep what backward needs. Default: ``torch.is_grad_enabled()``.
        output_device: where merged outputs go. Default: CPU.
        preserve_rng_state: recompute repeats the forward's random numbers, and these depend on
            (call, microbatch, layer) only. Default: True.
        recompute_grain: ``"stage"`` recomputes a whole stage, then runs its backward; ``"layer"``
            goes layer by layer: lower peak memory, more transfers. Default: ``"stage"``.
        num_microbatch: pieces the batch is cut into. Default: number of devices + 1.
        split_input: ``(args_spec, kwargs_spec)`` or a function. Default: automatic.
        split_label: a spec or a function. Default: automatic.
        merge_output: a spec, a function, or False for packed data. Default: automatic.
        execute_plan: the plan. Default: planned from layer sizes.
        loss_reduction: ``"sum"`` over microbatches, or ``"mean"`` over rows. Default: ``"sum"``.
    """

    requires_grad: bool | None = None
    output_device: torch.device | str | None = None
    preserve_rng_state: bool | None = None
    recompute_grain: str | None = None
    num_microbatch: int | None = None
    split_input: Any = None
    split_label: Any = None
    merge_output: Any = None
    execute_plan: ModelExecutePlan | None = None
    loss_reduction: str | None = None

    def __post_init__(self) -> None:
        _check_choice("recompute_grain", self.recompute_grain, RECOMPUTE_GRAINS)
        _check_choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        count = self.num_microbatch
        if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
            raise InvalidTypeError(
                f"num_microbatch is {count!r} ({type(count).__name__}); give a whole number >= 1"
            )
        if count is not None and count < 1:
            raise InvalidValueError(f"num_microbatch is {count}; it must be at least 1")
        plan = self.execute_plan
        if plan is not None and not isinstance(plan, ModelExecutePlan):
            raise InvalidTypeError(
                f"execute_plan is a {type(plan).__name__}; give a ModelExecutePlan"
            )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise InvalidValueError(
            f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}"
        )


@dataclass(frozen=True)
class ResolvedRunConfig:
    """A run configuration with every choice made; only automatic choices are still ``None``.

    Attributes:
        num_microbatch_given: whether the user chose the number, or it is the built-in one.
    """

    requires_grad: bool
    output_device: torch.device
    preserve_rng_state: bool
    recompute_grain: str
    num_microbatch: int
    split_input: Any
    split_label: Any
    merge_output: Any
    execute_plan: ModelExecutePlan | None
    loss_reduction: str
    num_microbatch_given: bool


def resolve(
    call: RoundPipeRunConfig, model: RoundPipeRunConfig, num_devices: int
) -> ResolvedRunConfig:
    """Merge the call's options over the model's over the built-in defaults.

    Raises:
        InvalidTypeError: ``call`` is no :class:`RoundPipeRunConfig`.
    """
    if not isinstance(call, RoundPipeRunConfig):
        raise InvalidTypeError(
            f"the run config is a {type(call).__name__}; give a RoundPipeRunConfig(...)"
        )
    chosen: dict[str, Any] = {
        "requires_grad": torch.is_grad_enabled(),
        "output_device": "cpu",
        "preserve_rng_state": True,
        "recompute_grain": "stage",
        "num_microbatch": num_devices + 1,
        "loss_reduction": "sum",
    }
    for source in (model, call):
        for option in fields(source):
            value = getattr(source, option.name)
            if value is not None:
                chosen[option.name] = value
    given = call.num_microbatch is not None or model.num_microbatch is not None
    chosen["num_microbatch_given"] = given
    for option in fields(ResolvedRunConfig):
        chosen.setdefault(option.name, None)
    chosen["output_device"] = torch.device(chosen["output_device"])
    return ResolvedRunConfig(**chosen)
