"""Stochastic gradient descent, and the optimizers that scale or average its steps."""

from __future__ import annotations

import torch
from torch import Tensor

from roundpipe.optim.base import KernelOptimizer, Plan, next_step, scalar_dtype
from roundpipe.optim.native import Algorithm
from roundpipe.optim.updates import Group, State, Update


class SGD(KernelOptimizer, torch.optim.SGD):
    """Like :class:`torch.optim.SGD`, fast on the CPU (see :class:`KernelOptimizer`)."""

    algorithm = Algorithm.SGD
    torch_class = torch.optim.SGD

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _init_state(self, group: Group, param: Tensor, state: State) -> None:
        """Nothing: torch has no momentum before the first step."""

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        moments = {}
        weight = 1 - float(group["dampening"])
        if group["momentum"] != 0:
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = self._new_moment(param)
                weight = 1.0  # the first step's momentum is its gradient, undampened
            moments["momentum_buffer"] = buffer
        return Plan(
            moments=moments,
            scalars=(float(group["lr"]), float(group["momentum"]), weight),
            variant=1 + int(group["nesterov"]) if moments else 0,
            coupled_decay=float(group["weight_decay"]),
        )


class ASGD(KernelOptimizer, torch.optim.ASGD):
    """Like :class:`torch.optim.ASGD`, fast on the CPU (see :class:`KernelOptimizer`)."""

    algorithm = Algorithm.ASGD
    torch_class = torch.optim.ASGD

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("ax",)

    def _init_state(self, group: Group, param: Tensor, state: State) -> None:
        super()._init_state(group, param, state)
        state["eta"] = torch.tensor(float(group["lr"]), dtype=scalar_dtype(group))
        state["mu"] = torch.ones_like(state["eta"])

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        lr, lambd = float(group["lr"]), float(group["lambd"])
        eta = float(state["eta"])
        return Plan(
            moments=self._moments(group, state),
            scalars=(eta, lambd * eta, float(state["mu"])),
            coupled_decay=float(group["weight_decay"]),
            after={
                "step": step,
                "eta": lr / (1 + lambd * lr * step) ** float(group["alpha"]),
                "mu": 1 / max(1.0, step - float(group["t0"])),
            },
        )


class Adagrad(KernelOptimizer, torch.optim.Adagrad):
    """Like :class:`torch.optim.Adagrad`, fast on the CPU (see :class:`KernelOptimizer`).

    As in torch, the state of every parameter exists from the start. Parameters added later get
    theirs at their first step.
    """

    algorithm = Algorithm.ADAGRAD
    torch_class = torch.optim.Adagrad

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def _init_state(self, group: Group, param: Tensor, state: State) -> None:
        state["step"] = torch.zeros((), dtype=scalar_dtype(group))
        value = float(group["initial_accumulator_value"])
        filling = complex(value, value) if param.is_complex() else value
        state["sum"] = self._new_moment(param, filling)

    def _torch_step(self, updates: list[Update], grad_scale: float, prefer_fused: bool) -> None:
        # Not every torch has a state for parameters that were added later.
        for update in updates:
            state = self.state[update.param]
            if not state:
                self._init_state(update.group, update.param, state)
        super()._torch_step(updates, grad_scale, prefer_fused)

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        return Plan(
            moments=self._moments(group, state),
            scalars=(float(group["lr"]), float(group["lr_decay"]), float(group["eps"]), step),
            coupled_decay=float(group["weight_decay"]),
            after={"step": step},
        )


class RMSprop(KernelOptimizer, torch.optim.RMSprop):
    """Like :class:`torch.optim.RMSprop`, fast on the CPU (see :class:`KernelOptimizer`)."""

    algorithm = Algorithm.RMSPROP
    torch_class = torch.optim.RMSprop

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        centered = ("grad_avg",) if group["centered"] else ()
        momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
        return ("square_avg", *centered, *momentum)

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        return Plan(
            moments=self._moments(group, state),
            scalars=(
                float(group["lr"]),
                float(group["alpha"]),
                float(group["eps"]),
                float(group["momentum"]),
            ),
            variant=int(group["centered"]) + 2 * int(group["momentum"] > 0),
            coupled_decay=float(group["weight_decay"]),
            after={"step": step},
        )


class Adadelta(KernelOptimizer, torch.optim.Adadelta):
    """Like :class:`torch.optim.Adadelta`, fast on the CPU (see :class:`KernelOptimizer`)."""

    algorithm = Algorithm.ADADELTA
    torch_class = torch.optim.Adadelta

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        return Plan(
            moments=self._moments(group, state),
            scalars=(float(group["lr"]), float(group["rho"]), float(group["eps"])),
            coupled_decay=float(group["weight_decay"]),
            after={"step": step},
        )


class Rprop(KernelOptimizer, torch.optim.Rprop):
    """Like :class:`torch.optim.Rprop`, fast on the CPU (see :class:`KernelOptimizer`)."""

    algorithm = Algorithm.RPROP
    torch_class = torch.optim.Rprop

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("prev", "step_size")

    def _init_state(self, group: Group, param: Tensor, state: State) -> None:
        super()._init_state(group, param, state)
        state["step_size"].fill_(float(group["lr"]))

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        step = next_step(state)
        return Plan(
            moments=self._moments(group, state),
            scalars=(*map(float, group["etas"]), *map(float, group["step_sizes"])),
            after={"step": step},
        )
