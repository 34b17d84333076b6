"""Adam and its relatives."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from roundpipe.errors import InvalidValueError
from roundpipe.optim.base import KernelOptimizer, Plan, next_step
from roundpipe.optim.native import Algorithm
from roundpipe.optim.updates import Group, State


def _decay(group: Group) -> tuple[float, float]:
    """Weight decay as (coupled, decoupled)."""
    decay = float(group["weight_decay"])
    return (0.0, decay) if group["decoupled_weight_decay"] else (decay, 0.0)


def _betas(group: Group) -> tuple[float, float]:
    return float(group["betas"][0]), float(group["betas"][1])


def _checked_moment_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.bfloat16):
        raise InvalidValueError(
            f"moment_dtype is {dtype}; expected torch.float32, or torch.bfloat16 to halve the "
            "moments' memory"
        )
    return dtype


class Adam(KernelOptimizer, torch.optim.Adam):
    """Like :class:`torch.optim.Adam`, fast on the CPU (see :class:`KernelOptimizer`).

    Args:
        params: as in torch, like all arguments but the last.
        lr: learning rate.
        betas: factors of the moving averages.
        eps: added to the divisor.
        weight_decay: L2 decay.
        amsgrad: divide by the largest average so far.
        foreach: as in torch, for parameters that the kernels do not take.
        maximize: ascend.
        capturable: left to torch.
        differentiable: left to torch.
        fused: as in torch, for parameters that the kernels do not take.
        decoupled_weight_decay: decay the parameter itself, as AdamW does.
        moment_dtype: ``torch.bfloat16`` keeps the moments of float32 parameters in 4 bytes in
            place of 8, with stochastic rounding (see :mod:`roundpipe.optim.moments`). A float32
            ``state_dict`` can be loaded, and the other way round.

    Raises:
        InvalidValueError: ``moment_dtype`` is neither float32 nor bfloat16.
    """

    algorithm = Algorithm.ADAM
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.moment_dtype = _checked_moment_dtype(moment_dtype)
        torch.optim.Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        coupled, decoupled = _decay(group)
        return Plan(
            moments=self._moments(group, state),
            scalars=(float(group["lr"]), *_betas(group), group["eps"], step, decoupled),
            variant=int(group["amsgrad"]),
            coupled_decay=coupled,
            after={"step": step},
        )


class AdamW(Adam, torch.optim.AdamW):
    """Like :class:`torch.optim.AdamW`, fast on the CPU (see :class:`KernelOptimizer`).

    Args:
        params: as in torch, like all arguments but the last.
        lr: learning rate.
        betas: factors of the moving averages.
        eps: added to the divisor.
        weight_decay: decoupled decay.
        amsgrad: divide by the largest average so far.
        maximize: ascend.
        foreach: as in torch, for parameters that the kernels do not take.
        capturable: left to torch.
        differentiable: left to torch.
        fused: as in torch, for parameters that the kernels do not take.
        moment_dtype: as in :class:`Adam`.

    Raises:
        InvalidValueError: ``moment_dtype`` is neither float32 nor bfloat16.
    """

    torch_class = torch.optim.AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.moment_dtype = _checked_moment_dtype(moment_dtype)
        torch.optim.AdamW.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )


class Adamax(KernelOptimizer, torch.optim.Adamax):
    """Like :class:`torch.optim.Adamax`, fast on the CPU (see :class:`KernelOptimizer`)."""

    algorithm = Algorithm.ADAMAX
    torch_class = torch.optim.Adamax

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        return Plan(
            moments=self._moments(group, state),
            scalars=(float(group["lr"]), *_betas(group), group["eps"], step),
            coupled_decay=float(group["weight_decay"]),
            after={"step": step},
        )


class NAdam(KernelOptimizer, torch.optim.NAdam):
    """Like :class:`torch.optim.NAdam`, fast on the CPU (see :class:`KernelOptimizer`)."""

    algorithm = Algorithm.NADAM
    torch_class = torch.optim.NAdam

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _init_state(self, group: Group, param: Tensor, state: State) -> None:
        super()._init_state(group, param, state)
        state["mu_product"] = torch.ones_like(state["step"])

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        lr = float(group["lr"])
        coupled, decoupled = _decay(group)
        beta1, beta2 = _betas(group)
        mu, mu_next = (
            beta1 * (1 - 0.5 * 0.96 ** (n * group["momentum_decay"])) for n in (step, step + 1)
        )
        mu_product = float(
            state["mu_product"] * mu
        )  # rounded to the state's dtype, as torch keeps it
        grad_step = lr * (1 - mu) / (1 - mu_product)
        average_step = lr * mu_next / (1 - mu_product * mu_next)
        return Plan(
            moments=self._moments(group, state),
            scalars=(
                beta1,
                beta2,
                group["eps"],
                step,
                grad_step,
                average_step,
                lr * decoupled,
            ),
            coupled_decay=coupled,
            after={"step": step, "mu_product": mu_product},
        )


class RAdam(KernelOptimizer, torch.optim.RAdam):
    """Like :class:`torch.optim.RAdam`, fast on the CPU (see :class:`KernelOptimizer`)."""

    algorithm = Algorithm.RADAM
    torch_class = torch.optim.RAdam

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        coupled, decoupled = _decay(group)
        return Plan(
            moments=self._moments(group, state),
            scalars=(float(group["lr"]), *_betas(group), group["eps"], step, decoupled),
            coupled_decay=coupled,
            after={"step": step},
        )
