"""Steps of an optimizer that roundpipe knows: layer by layer.

    optimizer thread    layer 0: gradients ─▶ update ─▶ publish │ layer 1: ... │ layer 2: ...
    next call             (waits for layer 0)  layer 0 forward  ▶  layer 1 forward  ▶ ...

Each layer's parameters are updated by a call of the optimizer of its own, in which the others have
no gradient, so the numbers are those of one call for all. Optimizers of :mod:`roundpipe.optim` read
the gradients where they arrived and write the new parameters in the same pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .binding import Binding
from .errors import InvalidTypeError, InvalidValueError
from .gradients import Contribution
from .parameters import ParameterStore, Submission
from .records import LayerRecord, ParameterRecord
from .sharing import Sharing, steps_apart
from .stepping import FunctionStep, Stepper

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grads_with_norm_ adds as much to the norm


class OptimizerStep:
    """One step of an optimizer.

    Args:
        optimizer: an optimizer of the model's masters. Its parameters' ``.grad`` are ``None`` when
            the step is over.
        schedulers: stepped after it.
        max_norm: the gradients of all its parameters are scaled down to this total norm.
        is_async: publish the result with the next step, as a step function's; otherwise layer by
            layer, as soon as there is one.

    Raises:
        InvalidTypeError: ``schedulers`` or ``max_norm`` is something else.
        InvalidValueError: an optimizer, a scheduler or a ``max_norm`` that cannot be used.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Any = None,
        max_norm: float | None = None,
        is_async: bool = False,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InvalidValueError(
                "LBFGS evaluates the model several times in each step, through a closure, which an "
                "optimizer thread beside the model's calls cannot do; use another optimizer"
            )
        self.optimizer = optimizer
        self.schedulers = _checked_schedulers(schedulers, optimizer)
        self.max_norm = _checked_max_norm(max_norm)
        self.lag = 1 if is_async else 0
        self.sharing = Sharing.of(optimizer)
        self.foreign: set[int] = set()  # parameters that are masters of other models

    def check_masters(self, store: ParameterStore, model_name: str) -> None:
        """Refuse an optimizer that trains nothing of the model.

        Raises:
            InvalidValueError: none of the optimizer's parameters is a master of the model.
        """
        masters = {id(master) for master in store.masters()}
        if not any(id(p) in masters for g in self.optimizer.param_groups for p in g["params"]):
            raise InvalidValueError(
                f"none of the optimizer's parameters is a master parameter of {model_name}; build "
                "it on optim_parameters(), or within OptimizerCtx()"
            )

    def join(self, stepper: Stepper, model_name: str) -> None:
        """Come to terms with other models that step the same optimizer; see :class:`Sharing`.

        Raises:
            InvalidValueError: see :meth:`Sharing.foreign`.
        """
        self.foreign = self.sharing.foreign(
            self.optimizer, stepper.store, model_name, self.max_norm is not None
        )
        self.sharing.take_turn(stepper)

    def run(self, store: ParameterStore, submission: Submission) -> None:
        """Update all layers, and publish them unless that is left to the next step."""
        publishes = self.lag == 0
        try:
            if not publishes:
                store.publish(submission.version, submission.declared)
            # Without it a step through another model, on that one's thread, would hide gradients
            # that this one is at, and show those that it has hidden.
            with self.sharing.turn:
                _Update(self, store, submission).run()
                for scheduler in self.schedulers:
                    scheduler.step()
        except BaseException:
            store.mark_all_dirty()  # any master may have changed before
            raise
        finally:
            for _, contributions in submission.gradients:  # what nobody came to
                _release(contributions)
            if publishes:
                # What no layer's turn has published; after a failure runs wait for it, too.
                store.publish(submission.version + 1, submission.declared)


class _Update:
    """One step being done."""

    def __init__(self, step: OptimizerStep, store: ParameterStore, submission: Submission) -> None:
        self._step = step
        self._optimizer = step.optimizer
        self._store = store
        self._publishes = step.lag == 0
        self._is_apart = store.steps_by_layer and steps_apart(step.optimizer)
        self._version = submission.version + 1
        self._declared = submission.declared
        self._arrived = {record: group for record, group in submission.gradients if group}
        self._folded: dict[ParameterRecord, list[Contribution]] = {}
        submission.gradients.clear()  # a layer's gradients are freed when it was updated
        self._params = [p for g in self._optimizer.param_groups for p in g["params"]]
        self._own = {id(param) for param in self._params}
        self._hidden: dict[torch.Tensor, torch.Tensor] = {}
        self._seen: set[ParameterRecord] = set()
        self._factor = 1.0
        self._has_stepped = False

    def run(self) -> None:
        try:
            if self._is_apart:
                self._step_layers()
            else:
                self._step_all()
        finally:
            for param in list(self._hidden):
                self._show(param)
            for groups in (self._arrived, self._folded):
                for group in groups.values():
                    _release(group)

    def _step_layers(self) -> None:
        for param in self._params:
            self._hide(param)
        self._factor = self._clip_factor()
        # The order in which the next call needs the layers; or the one in which the call beside
        # this step brings new gradients, into buffers that the old ones are still in.
        layers = self._store.layers
        for layer in layers if self._publishes else reversed(layers):
            self._step_layer(layer)
        self._step_shown([p for p in self._params if p in self._hidden and not self._is_foreign(p)])
        if not self._has_stepped:
            self._optimizer.step()  # for those who count steps, as schedulers do

    def _step_all(self) -> None:
        """One call for everything, for optimizers that look at more than one parameter."""
        for param in filter(self._is_foreign, self._params):
            self._hide(param)
        records = list(self._arrived)
        for record in records:
            self._fold(record)
        self._factor = self._clip_factor()
        self._step_shown([param for param in self._params if param.grad is not None])
        for record in records:
            self._finish(record)
        self._store.mark_all_dirty()

    # --- one layer ---------------------------------------------------------------------------

    def _step_layer(self, layer: LayerRecord) -> None:
        due = [record for record in layer.parameters if record not in self._seen]
        self._seen.update(due)
        bound: dict[ParameterRecord, Binding] = {}
        for record in due:
            content = self._bindable(record)
            if content is not None:
                bound[record] = Binding(content, self._target(record))
            else:
                self._fold(record)
        if bound:
            self._step_bound(bound)
        others = [record for record in due if record not in bound and record.master is not None]
        self._step_shown([r.master for r in others if r.master is not None])
        for record in others:
            self._finish(record)
        if self._publishes:
            self._store.publish_layer(layer, self._version, self._declared)

    def _bindable(self, record: ParameterRecord) -> torch.Tensor | None:
        """The gradient, if the optimizer can read it where it arrived."""
        group, master = self._arrived.get(record, []), record.master
        if master is None or len(group) != 1 or id(master) not in self._own:
            return None
        if master in self._hidden or not hasattr(self._optimizer, "step_fused"):
            return None
        plain = master.dtype is torch.float32 and _is_plain(group[0].content)
        return group[0].wait() if plain else None

    def _target(self, record: ParameterRecord) -> torch.Tensor | None:
        """Where the optimizer can write the new value besides the master."""
        return record.parameter if self._publishes and _is_plain(record.parameter) else None

    def _step_bound(self, bound: dict[ParameterRecord, Binding]) -> None:
        for record, binding in bound.items():
            if binding.published is not None:
                self._store.wait_unread(record, self._declared)
                record.note_overwriting()
        bindings = {r.master: b for r, b in bound.items() if r.master is not None}
        self._has_stepped = True
        self._optimizer.step_fused(bindings, grad_scale=self._factor)  # type: ignore[attr-defined]
        for record, binding in bound.items():
            _release(self._arrived.pop(record))
            if binding.published is None:
                self._store.mark_dirty(record)
            else:
                self._store.mark_published(record)

    def _step_shown(self, params: Sequence[torch.Tensor]) -> None:
        """A call of the optimizer in which these have gradients, if any has."""
        for param in params:
            self._show(param)
        stepped = [p for p in params if p.grad is not None and id(p) in self._own]
        if not stepped:
            return
        if self._step.max_norm is not None:
            for param in stepped:
                if param.grad is not None:
                    param.grad = param.grad.to(param.dtype).mul_(self._factor)
        self._has_stepped = True
        self._optimizer.step()
        for param in stepped:
            param.grad = None

    # --- gradients ---------------------------------------------------------------------------

    def _is_foreign(self, param: torch.Tensor) -> bool:
        """Whether its own model's step updates it; its gradient stays until then."""
        return id(param) in self._step.foreign

    def _hide(self, param: torch.Tensor) -> None:
        """Put its gradient out of the optimizer's sight."""
        if param.grad is not None:
            self._hidden[param], param.grad = param.grad, None

    def _show(self, param: torch.Tensor) -> None:
        grad = self._hidden.pop(param, None)
        if grad is not None:
            param.grad = grad

    def _fold(self, record: ParameterRecord) -> None:
        """Add what arrived to the master's ``.grad``."""
        group = self._arrived.pop(record, None)
        if group is None:
            return
        self._folded[record] = group
        if record.master is not None:
            self._show(record.master)
        self._store.fold(record, group)

    def _finish(self, record: ParameterRecord) -> None:
        _release(self._folded.pop(record, ()))
        self._store.mark_dirty(record)

    def _clip_factor(self) -> float:
        """By what to multiply the gradients: as ``torch.nn.utils.clip_grad_norm_``, in float32."""
        if self._step.max_norm is None:
            return 1.0
        records = {id(record.master): record for record in self._store.records()}
        norms = []
        for param in self._params:
            grad = self._whole_gradient(param, records.get(id(param)))
            if grad is not None:
                norms.append(_norm(grad))
        if not norms:
            return 1.0
        total = torch.linalg.vector_norm(torch.stack(norms))
        factor = self._step.max_norm / (total + CLIP_EPSILON)
        return float(torch.clamp(factor, max=1.0))

    def _whole_gradient(
        self, param: torch.Tensor, record: ParameterRecord | None
    ) -> torch.Tensor | None:
        if record is not None:
            content = self._bindable(record)
            if content is not None:
                return content
            self._fold(record)
        if self._is_apart:
            self._hide(param)
            return self._hidden.get(param)
        return param.grad


def submit_step(
    stepper: Stepper,
    model_name: str,
    step_fn: Callable[..., Any] | torch.optim.Optimizer,
    is_async: bool | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """What ``step(step_fn, is_async, *args, **kwargs)`` of a wrapped model does.

    Raises:
        InvalidTypeError: ``step_fn`` is neither a function nor an optimizer, or there are arguments
            that only a function could take.
        InvalidValueError: see :class:`OptimizerStep`.
        BaseException: what :meth:`Stepper.submit` raises.
    """
    if isinstance(step_fn, torch.optim.Optimizer):
        step = _optimizer_step(step_fn, bool(is_async), args, kwargs)
        step.check_masters(stepper.store, model_name)
        step.join(stepper, model_name)
        stepper.guard_state(step_fn)
        stepper.submit(step, bool(is_async) or step.lag == 0)
    elif callable(step_fn):
        job = FunctionStep(functools.partial(step_fn, *args, **kwargs))
        stepper.submit(job, is_async is None or is_async)
    else:
        raise InvalidTypeError(
            f"step_fn is a {type(step_fn).__name__}; give a function that steps the optimizer, "
            "or the optimizer"
        )


def _optimizer_step(
    optimizer: torch.optim.Optimizer,
    is_async: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> OptimizerStep:
    unknown = sorted(kwargs.keys() - {"scheduler", "max_norm"})
    if args or unknown:
        given = [*(repr(arg) for arg in args), *unknown]
        raise InvalidTypeError(
            f"step(optimizer) got {', '.join(given)}; it takes is_async, scheduler and max_norm: "
            "for anything else give a step function"
        )
    return OptimizerStep(optimizer, kwargs.get("scheduler"), kwargs.get("max_norm"), is_async)


def _release(contributions: Iterable[Contribution]) -> None:
    for contribution in contributions:
        contribution.release()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether compiled kernels can read or write the tensor's memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in FUSED_DTYPES
        and not tensor.is_neg()
    )


def _norm(grad: torch.Tensor) -> torch.Tensor:
    """The gradient's norm; that of a 16-bit one in float32."""
    if grad.layout is not torch.strided:
        grad = grad.coalesce().values()
    is_16_bit = grad.dtype in (torch.bfloat16, torch.float16)
    norm: torch.Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32 if is_16_bit else None)
    return norm


def _checked_schedulers(schedulers: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    given = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    given = [scheduler for scheduler in given if scheduler is not None]
    for scheduler in given:
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise InvalidTypeError(
                f"scheduler is a {type(scheduler).__name__}; give a learning rate scheduler of "
                "torch.optim.lr_scheduler, or a list of them"
            )
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise InvalidValueError(
                "ReduceLROnPlateau needs a metric at each step; call its step(metric) yourself, "
                "after synchronize() or inside a step function"
            )
        if scheduler.optimizer is not optimizer:
            raise InvalidValueError(
                f"scheduler, a {type(scheduler).__name__}, was made for another optimizer than the "
                "one that is stepped; give this optimizer's"
            )
    return tuple(given)


def _checked_max_norm(max_norm: float | None) -> float | None:
    if max_norm is None:
        return None
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
        raise InvalidTypeError(f"max_norm is a {type(max_norm).__name__}; give a positive number")
    if not max_norm > 0:
        raise InvalidValueError(f"max_norm is {max_norm}; give a positive number, or None")
    return float(max_norm)
