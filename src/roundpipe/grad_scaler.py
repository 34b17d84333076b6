"""Loss scaling for float16, with steps that run beside the next call.

    caller            scale s_t: call t │ step t ──▶ │ update t: s_t+1 │ call t+1 │ step t+1 │ ...
    device threads    scale(loss), all microbatches with s_t
    optimizer thread                      step t unscales with s_t, whatever the caller is at

The time from one update to the next is a **round**. It has one scale, and notes which of its steps
met an infinity. Which round a step belongs to is decided where it was submitted, so nothing depends
on how fast the optimizer thread is.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from .errors import InvalidTypeError, InvalidValueError, StateError
from .stepping import steps_of_thread

Outputs = TypeVar("Outputs", bound=list[Any] | tuple[Any, ...])
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


class _Stage(enum.Enum):
    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass
class _OptimizerState:
    """What one round has seen of one optimizer.

    Attributes:
        optimizer: the optimizer, kept alive so that its ``id`` stays its own.
        stage: how far it came.
        found_inf: whether a gradient was not finite; ``None`` before anybody looked.
    """

    optimizer: torch.optim.Optimizer
    stage: _Stage = _Stage.READY
    found_inf: bool | None = None


@dataclass
class _Round:
    """The time between two updates.

    Attributes:
        scale: the scale of its calls and steps, 0-dim float32. Never written.
        submitted_before: how many steps the caller's thread had submitted when it began.
        states: by ``id`` of the optimizer.
        is_void: whether the user has set a scale in place of what its steps would make of it.
    """

    scale: Tensor
    submitted_before: int
    states: dict[int, _OptimizerState] = field(default_factory=dict)
    is_void: bool = False

    @property
    def found_inf(self) -> bool | None:
        """Whether any optimizer met an infinity; ``None`` if nobody looked."""
        found = [s.found_inf for s in self.states.values() if s.found_inf is not None]
        return any(found) if found and not self.is_void else None

    @property
    def inverse(self) -> float:
        """One over the scale, rounded as torch rounds it."""
        return float(self.scale.double().reciprocal().float())


class GradScaler:
    """Like :class:`torch.amp.GradScaler`, for calls of a RoundPipe.

    In a loss function, ``scaler.scale(loss)``; in a step function, ``scaler.step(optimizer)``, with
    ``scaler.unscale_(optimizer)`` before it to look at the gradients or clip them; after
    ``model.step(...)``, from the caller's thread, ``scaler.update()``. It may also be used without
    a RoundPipe, as torch's.

    With synchronous steps, scales, growth and skipped steps are torch's exactly. With asynchronous
    ones ``update()`` does not wait for the step just submitted: it takes into account the steps
    submitted before the previous update, so a scale reacts one iteration later. After an infinity
    the step in flight usually meets one, too, and the scale is lowered twice.

    ``scale`` may be called from any thread, ``unscale_`` and ``step`` from any one at a time.

    Args:
        device: as torch's; has no effect, the scale goes where the losses are.
        init_scale: the first scale.
        growth_factor: the scale grows by it after ``growth_interval`` rounds without an infinity.
        backoff_factor: the scale is multiplied by it after a round with one.
        growth_interval: see above.
        enabled: if not, ``scale`` and ``unscale_`` do nothing and ``step`` only steps.

    Raises:
        InvalidValueError: a factor that would not grow, or not lower, the scale.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._device = device
        self._enabled = enabled
        self._growth_factor = self._backoff_factor = 1.0
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        if enabled:
            self.set_growth_factor(growth_factor)
            self.set_backoff_factor(backoff_factor)
        self._lock = threading.Lock()
        self._begin(_as_scale(init_scale))

    def _begin(self, scale: Tensor) -> None:
        self._rounds = [_Round(scale, steps_of_thread.submitted)]
        self._last_stepped: _Round | None = None

    # --- scaling and stepping ----------------------------------------------------------------

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: Outputs) -> Outputs: ...
    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...
    def scale(self, outputs: Any) -> Any:
        """The outputs times the scale: a tensor, or an iterable (also nested) of tensors.

        Raises:
            InvalidTypeError: something else.
        """
        return _scaled(outputs, self._rounds[-1].scale) if self._enabled else outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale that their call used.

        Once for each optimizer and round, before :meth:`step`, to inspect or clip gradients.
        16-bit gradients of float32 masters become float32 ones, so that nothing is rounded twice.

        Raises:
            StateError: called a second time in the round, or after :meth:`step`.
            InvalidValueError: gradients of float16 parameters, which unscaling would flush to zero.
        """
        if not self._enabled:
            return
        state, its_round = self._state_of(optimizer)
        if state.stage is _Stage.UNSCALED:
            raise StateError(
                "unscale_() has already been called on this optimizer since the last update(); "
                "call it once, before everything that looks at gradients"
            )
        if state.stage is _Stage.STEPPED:
            raise StateError("unscale_() is being called after step(); call it before")
        state.found_inf = _unscale(optimizer, its_round.inverse)
        state.stage = _Stage.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` on unscaled gradients, unless one is not finite.

        Optimizers of :mod:`roundpipe.optim` unscale 16-bit gradients while they read them.

        Returns:
            What the optimizer's step returned; ``None`` if it was skipped.

        Raises:
            StateError: a closure; called a second time in the round; no gradients at all.
            InvalidValueError: see :meth:`unscale_`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise StateError(
                "a closure cannot be used while GradScaler is enabled: it would make gradients "
                "that nobody has unscaled"
            )
        state, its_round = self._state_of(optimizer)
        if state.stage is _Stage.STEPPED:
            raise StateError("step() has already been called since the last update()")
        if state.stage is _Stage.READY:
            if _unscales_itself(optimizer):
                state.found_inf = not all(_is_finite(grad) for grad in _gradients(optimizer))
                kwargs = {**kwargs, "grad_scale": its_round.inverse}
            else:
                self.unscale_(optimizer)
        if state.found_inf is None:
            raise StateError(
                "no inf checks were recorded for this optimizer, because none of its parameters "
                "has a gradient; step after a call that gives it gradients"
            )
        result = None if state.found_inf else optimizer.step(*args, **kwargs)
        state.stage = _Stage.STEPPED
        self._last_stepped = its_round
        return result

    @property
    def last_step_skipped(self) -> bool:
        """Whether the round that stepped last has skipped a step, of any optimizer.

        Right after :meth:`step` in a step function: of this round. From elsewhere, call
        ``synchronize()`` before, to ask about the latest step submitted.
        """
        last = self._last_stepped
        if last is None:
            return False
        stepped = (s for s in last.states.values() if s.stage is _Stage.STEPPED)
        return any(bool(state.found_inf) for state in stepped)

    def update(self, new_scale: float | Tensor | None = None, is_async: bool = True) -> None:
        """End the round and set the scale of the next.

        Args:
            new_scale: this one, in place of what the round's steps would make of it.
            is_async: take steps that may still be in flight into account at the next update;
                otherwise wait for them. No difference where all steps were synchronous.

        Raises:
            StateError: nobody has looked for infinities since the last update; or called in an
                asynchronous step, beside which a call may be using the scale.
        """
        if not self._enabled:
            return
        running = steps_of_thread.running
        if running is not None and running.is_async:
            raise StateError(
                "update() was called in an asynchronous step, beside which a call is using the "
                "scale; call it after step(...), from the thread that makes the calls"
            )
        begun = self._rounds[-1].submitted_before
        lags = is_async and steps_of_thread.last_async > begun
        # Not under the lock, which the steps need to find their round.
        self._wait_for_steps(begun if lags else None)
        with self._lock:
            *earlier, current = self._rounds
            due = earlier if lags else [*earlier, current]
            scale = current.scale
            if new_scale is not None:
                scale, current.is_void = _as_scale(new_scale), True
            elif not lags and all(r.found_inf is None for r in due):
                raise StateError(
                    "no inf checks were recorded prior to update(); call step() or unscale_() "
                    "first, or update(new_scale)"
                )
            else:
                for one in due:
                    scale = self._adapted(scale, one.found_inf)
            submitted = steps_of_thread.submitted if running is None else running.number
            self._rounds = [*([current] if lags else []), _Round(scale, submitted)]

    # --- rounds ------------------------------------------------------------------------------

    def _state_of(self, optimizer: torch.optim.Optimizer) -> tuple[_OptimizerState, _Round]:
        """The optimizer's state in the round that the calling thread works for."""
        ticket = steps_of_thread.running
        with self._lock:
            its_round = self._rounds[-1]
            if ticket is not None:
                begun = [r for r in self._rounds if r.submitted_before < ticket.number]
                its_round = begun[-1] if begun else self._rounds[0]
            state = its_round.states.setdefault(id(optimizer), _OptimizerState(optimizer))
        return state, its_round

    @staticmethod
    def _wait_for_steps(up_to: int | None) -> None:
        """Wait for the steps that the calling thread has submitted, all or the first ones."""
        for ticket in steps_of_thread.in_flight:
            if up_to is None or ticket.number <= up_to:
                ticket.wait("GradScaler.update()")

    def _adapted(self, scale: Tensor, found_inf: bool | None) -> Tensor:
        """The scale after a round. Counts the rounds without an infinity."""
        if found_inf is None:
            return scale
        if found_inf:
            self._growth_tracker = 0
            return _as_scale(float(scale) * self._backoff_factor)
        self._growth_tracker += 1
        if self._growth_tracker != self._growth_interval:
            return scale
        self._growth_tracker = 0
        grown = _as_scale(float(scale) * self._growth_factor)
        return grown if bool(torch.isfinite(grown)) else scale

    # --- settings ----------------------------------------------------------------------------

    def get_scale(self) -> float:
        """The scale of calls made now; 1.0 if disabled."""
        return float(self._rounds[-1].scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """By what the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set by what the scale grows.

        Raises:
            InvalidValueError: it would not grow.
        """
        if not new_factor > 1.0:
            raise InvalidValueError(f"growth_factor is {new_factor}; expected more than 1")
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """By what the scale is multiplied after an infinity."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set by what the scale is multiplied after an infinity.

        Raises:
            InvalidValueError: it would not be lowered.
        """
        if not new_factor < 1.0:
            raise InvalidValueError(f"backoff_factor is {new_factor}; expected less than 1")
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """After how many rounds without an infinity the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many rounds without an infinity the scale grows."""
        self._growth_interval = new_interval

    def get_growth_tracker(self) -> int:
        """How many rounds without an infinity there were since the scale changed."""
        return self._growth_tracker

    def is_enabled(self) -> bool:
        """Whether it scales."""
        return self._enabled

    # --- saving ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and interchangeable with it; empty if disabled.

        With asynchronous steps, call ``update(is_async=False)`` before, or what the latest step met
        is not in it.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class or torch's. Nothing if disabled.

        Raises:
            InvalidValueError: the state of a disabled scaler.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise InvalidValueError(
                "the source state dict is empty, possibly because it was saved from a disabled "
                "GradScaler; leave it out"
            )
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]
        self._begin(_as_scale(state_dict["scale"]))

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self._device, "enabled": self._enabled, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        GradScaler.__init__(self, state["device"], enabled=state["enabled"])
        if self._enabled:
            self.load_state_dict(state["state"])


def _as_scale(value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.requires_grad:
            raise InvalidValueError(
                f"new_scale has {value.numel()} elements, requires_grad={value.requires_grad}; "
                "expected a number, or a tensor of one element without grad"
            )
        value = float(value)
    return torch.tensor(float(value), dtype=torch.float32)


def _scaled(outputs: Any, scale: Tensor) -> Any:
    if isinstance(outputs, Tensor):
        return outputs * scale.to(outputs.device, non_blocking=True)
    if isinstance(outputs, Iterable):
        scaled = (_scaled(output, scale) for output in outputs)
        if isinstance(outputs, list | tuple):
            return type(outputs)(scaled)
        return scaled
    raise InvalidTypeError(
        f"outputs is a {type(outputs).__name__}; give a tensor or an iterable of tensors"
    )


def _unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer unscales while it reads; asked for where a copy would be needed."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    return hasattr(optimizer, "step_fused") and any(
        p.grad is not None and p.grad.dtype != p.dtype for p in params
    )


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return [p.grad for p in params if p.grad is not None]


@torch.no_grad()
def _unscale(optimizer: torch.optim.Optimizer, inverse: float) -> bool | None:
    """Unscale all gradients. Returns whether any is not finite; ``None`` if there are none."""
    found: bool | None = None
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.dtype is torch.float16 and param.dtype is torch.float16:
                raise InvalidValueError(
                    "attempting to unscale float16 gradients of float16 parameters, most of which "
                    "would become zero; give RoundPipe optim_dtype=torch.float32"
                )
            if param.grad.dtype in SIXTEEN_BIT and param.dtype not in SIXTEEN_BIT:
                param.grad = param.grad.to(param.dtype)
            if param.grad.is_sparse:
                param.grad = param.grad.coalesce()
            found = bool(found) or not _is_finite(param.grad)
            param.grad.mul_(inverse)
    return found


def _is_finite(grad: Tensor) -> bool:
    """Whether all elements are, without a temporary of the gradient's size."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel() == 0:
        return True
    return bool(torch.isfinite(torch.linalg.vector_norm(values, float("inf"))))
