"""One optimizer that several models step: one step of it at a time, each with its own parameters.

A step looks at all of the optimizer's groups and hides the gradients that it is not at, so two
steps at once, on the optimizer threads of two models, would see each other's halves.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from .compat import has_step_hooks
from .errors import InvalidValueError
from .parameters import ParameterStore
from .stepping import Stepper


class Sharing:
    """What the models that step one optimizer know of each other.

    It lives on the optimizer, the only thing that they have in common; copies and pickles of the
    optimizer begin anew.

    Attributes:
        turn: held by the step that is being done.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._stores: weakref.WeakSet[ParameterStore] = weakref.WeakSet()
        self._latest: weakref.ref[Stepper] | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Sharing:
        """That of an optimizer, made when first asked for."""
        found: Sharing = optimizer.__dict__.setdefault("_roundpipe_sharing", cls())
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def foreign(
        self,
        optimizer: torch.optim.Optimizer,
        store: ParameterStore,
        model_name: str,
        clips: bool,
    ) -> set[int]:
        """The ids of the optimizer's parameters that are masters of other models that step it.

        Args:
            optimizer: this object's.
            store: that of the model that steps it now.
            model_name: for the error.
            clips: whether the step needs the norm of all gradients.

        Raises:
            InvalidValueError: there are such parameters, and the step needs their gradients, too.
        """
        self._stores.add(store)
        others = [other for other in list(self._stores) if other is not store]
        masters = {id(master) for other in others for master in other.masters()}
        found = masters.intersection(id(p) for g in optimizer.param_groups for p in g["params"])
        reason = None
        if clips:
            reason = "max_norm is about the gradients of all"
        elif not steps_apart(optimizer):
            reason = f"this {type(optimizer).__name__} may look at the gradients of all at once"
        if found and reason is not None:
            raise InvalidValueError(
                f"{model_name}: the optimizer is stepped through another model, too, one model at "
                f"a time, but {reason}; give each model an optimizer of its own"
            )
        return found

    def take_turn(self, stepper: Stepper) -> None:
        """Wait until a step of the optimizer by another model is over, however it ends.

        So steps happen in the order in which they are submitted: a scheduler that one of them steps
        is seen by those after it, and by no other.
        """
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest is not stepper and not latest.on_own_thread():
            latest.settle()
        self._latest = weakref.ref(stepper)


def steps_apart(optimizer: torch.optim.Optimizer) -> bool:
    """Whether calls of the optimizer for a layer at a time do what one call for all does.

    True for the optimizers of torch and of :mod:`roundpipe.optim`, which treat each parameter by
    itself. Others may keep a state for all parameters, or count their calls, as hooks may do.
    """
    home = type(optimizer).__module__.split(".")[:2]
    return home in (["torch", "optim"], ["roundpipe", "optim"]) and not has_step_hooks(optimizer)
