"""Steps by torch's own optimizers, for what the compiled kernels do not take."""

from __future__ import annotations

import inspect
from collections import defaultdict

import torch
from torch import Tensor

from roundpipe.optim.layout import is_dense, like, same_layout
from roundpipe.optim.moments import round_moment, rounding_seed
from roundpipe.optim.updates import Group, State, Update, split


def torch_step(
    optimizer: torch.optim.Optimizer,
    torch_class: type[torch.optim.Optimizer],
    updates: list[Update],
    grad_scale: float,
    prefer_fused: bool,
) -> None:
    """Step the parameters as ``torch_class`` does, with the state and the options of ``optimizer``.

    A gradient that is not the parameter's own ``.grad``, or has to be scaled or converted, is
    carried by a stand-in that shares the parameter's memory. Stand-ins step one by one, so that at
    most one converted gradient exists.

    Args:
        optimizer: an instance of a subclass of ``torch_class``.
        torch_class: whose ``step`` runs.
        updates: the parameters.
        grad_scale: multiplies every gradient.
        prefer_fused: use torch's fused kernels where the user did not choose.
    """
    together, singly = split(updates, lambda u: grad_scale == 1 and _is_as_torch_has_it(u))
    if together:
        _step_shadow(optimizer, torch_class, [(u, u.param) for u in together], prefer_fused)
    for update in singly:
        stand_in = update.param.detach()
        grad = like(stand_in, update.grad, update.param.dtype)
        stand_in.grad = grad * grad_scale if grad_scale != 1 else grad
        _step_shadow(optimizer, torch_class, [(update, stand_in)], prefer_fused)
        if update.published is not None:
            update.published.copy_(stand_in)


def torch_step_rounded(
    optimizer: torch.optim.Optimizer,
    torch_class: type[torch.optim.Optimizer],
    update: Update,
    moments: tuple[str, ...],
    grad_scale: float,
    prefer_fused: bool,
) -> None:
    """The same for one float32 parameter whose moments are kept in bfloat16, as the kernels do it.

    Args:
        optimizer: see :func:`torch_step`.
        torch_class: see :func:`torch_step`.
        update: the parameter.
        moments: the names of the states to keep in bfloat16, in the kernels' order.
        grad_scale: see :func:`torch_step`.
        prefer_fused: see :func:`torch_step`.
    """
    state = optimizer.state.get(update.param, {})
    state.update({name: state[name].float() for name in moments if name in state})
    torch_step(optimizer, torch_class, [update], grad_scale, prefer_fused)
    state = optimizer.state[update.param]
    seed = rounding_seed(update.ordinal, int(state["step"]) - 1)
    for index, name in enumerate(moments):
        state[name] = round_moment(state[name], seed, index)


def _is_as_torch_has_it(update: Update) -> bool:
    own = update.grad is update.param.grad and update.published is None
    return own and update.grad.dtype is update.param.dtype


def _step_shadow(
    optimizer: torch.optim.Optimizer,
    torch_class: type[torch.optim.Optimizer],
    stepped: list[tuple[Update, Tensor]],
    prefer_fused: bool,
) -> None:
    """Run ``torch_class.step`` on an instance with these parameters only, and their states."""
    groups: dict[int, Group] = {}
    for update, param in stepped:
        group = groups.setdefault(id(update.group), {**update.group, "params": []})
        group["params"].append(param)
    shadow = object.__new__(torch_class)
    shadow.__dict__.update(optimizer.__dict__)
    shadow.param_groups = list(groups.values())
    shadow.state = defaultdict(dict)
    for update, param in stepped:
        if update.param in optimizer.state:
            shadow.state[param] = optimizer.state[update.param]
    if prefer_fused:
        for group in groups.values():
            if all(_fits_fused(param, shadow.state.get(param, {})) for param in group["params"]):
                _choose_fused(group)
    # Without torch's wrapper around it: hooks and the profiler's span belong to the outer step.
    inspect.unwrap(torch_class.step)(shadow)
    for update, param in stepped:
        if param in shadow.state:
            optimizer.state[update.param] = shadow.state[param]


def _choose_fused(group: Group) -> None:
    """Torch's fused kernels, if it has them for this optimizer and the user did not choose."""
    unset = "fused" in group and group["fused"] is None and group.get("foreach") is None
    if unset and not group["differentiable"]:
        group["fused"] = True


def _fits_fused(param: Tensor, state: State) -> bool:
    """Whether torch's fused CPU kernels compute this parameter right.

    They walk all tensors in memory order, and do not check that it is the same order for all.
    """
    if param.device.type != "cpu" or not param.is_floating_point() or not is_dense(param):
        return False
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.ndim]
    if param.grad is not None:
        tensors.append(param.grad)
    return all(t.layout is torch.strided and same_layout(t, param) for t in tensors)
