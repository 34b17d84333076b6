"""Lion, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.optim.base import KernelOptimizer, Plan
from roundpipe.optim.native import Algorithm
from roundpipe.optim.updates import Group, State


class TorchLion(torch.optim.Optimizer):
    """Lion in torch operations, for parameters that the kernels do not take.

    Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, program 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise InvalidValueError(
                f"lr has {lr.numel()} elements; expected a number or a tensor with one element"
            )
        if not float(lr) >= 0:
            raise InvalidValueError(f"lr is {float(lr)}; expected a number that is at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidValueError(
                f"betas are {betas}; expected two numbers that are at least 0 and below 1"
            )
        if not weight_decay >= 0:
            raise InvalidValueError(
                f"weight_decay is {weight_decay}; expected a number that is at least 0"
            )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            InvalidTypeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(group, param)
        return loss

    def _step_param(self, group: Group, param: Tensor) -> None:
        grad = param.grad
        if grad is None or grad.layout is not torch.strided:
            raise InvalidTypeError(
                "Lion got a sparse gradient, expected a dense one: make the layer with "
                "sparse=False, or use SGD or Adagrad for it"
            )
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        average = state["exp_avg"]
        if param.is_complex():
            param, grad, average = map(torch.view_as_real, (param, grad, average))
        if group["maximize"]:
            grad = -grad
        lr = float(group["lr"])
        beta1, beta2 = group["betas"]
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(average.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
        average.lerp_(grad, 1 - beta2)


class Lion(KernelOptimizer, TorchLion):
    """Lion: steps of one size in the direction of an interpolated momentum.

    Args:
        params: parameters, or parameter groups, as for torch's optimizers.
        lr: learning rate, a number or a tensor with one element; three to ten times below Adam's.
        betas: of the interpolation that gives the direction, and of the momentum.
        weight_decay: decoupled decay, multiplied by ``lr`` as in AdamW.
        maximize: ascend.

    Raises:
        InvalidValueError: a number outside its range.
    """

    algorithm = Algorithm.LION
    torch_class = TorchLion

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def _init_state(self, group: Group, param: Tensor, state: State) -> None:
        state["exp_avg"] = self._new_moment(param)

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        beta1, beta2 = group["betas"]
        return Plan(
            moments=self._moments(group, state),
            scalars=(float(group["lr"]), beta1, beta2, group["weight_decay"]),
        )
