"""What all optimizers of this package share: one step over the parameters, by kernels or torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from roundpipe.binding import Binding
from roundpipe.compat import allow_any_grad_dtype
from roundpipe.errors import InvalidValueError
from roundpipe.optim.fallback import torch_step, torch_step_rounded
from roundpipe.optim.layout import like, same_layout
from roundpipe.optim.moments import rounding_seed
from roundpipe.optim.native import Algorithm, Kernels, Task, load_kernels
from roundpipe.optim.updates import Group, State, Update, kernels_take, split, updates_of

LARGE_TENSOR_BYTES = 4 << 20


@dataclass(frozen=True)
class Plan:
    """What one step does to one parameter, and what its state holds afterwards.

    Attributes:
        moments: the state tensors that the kernel updates, in the functor's order.
        scalars: the functor's constants.
        variant: the functor's form.
        coupled_decay: L2 decay.
        after: new values of scalar states, once the step is done.
    """

    moments: dict[str, Tensor]
    scalars: tuple[float, ...]
    variant: int = 0
    coupled_decay: float = 0.0
    after: dict[str, float] = field(default_factory=dict)


class KernelOptimizer(torch.optim.Optimizer):
    """Mixed into one of torch's optimizers, replaces its step by one pass of a compiled kernel.

    Constructor, parameter groups, states and ``state_dict`` are the torch class's, so a run can
    move between the two. The kernels take dense float32 parameters on the CPU, with float32,
    bfloat16 or float16 gradients. Everything else (other dtypes and devices, complex and sparse
    tensors, views with gaps, tensor subclasses, ``capturable``, ``differentiable``) goes through
    the torch class, parameter by parameter; ``foreach`` and ``fused`` choose how torch does those
    and change nothing for the others. An optimizer that ``torch.amp.GradScaler`` drives with
    ``fused=True`` is left to torch, which unscales and skips in its kernels.

    Rounding: the kernels compute in float32 with the operations of torch's CPU kernels in their
    order, fused multiply-adds included. Adam, AdamW and Adagrad equal torch's ``fused=True``, and
    SGD, Adamax, ASGD, Rprop and Lion torch's default, bit for bit where torch's build uses AVX2,
    but for the last elements of a tensor that fill no vector of torch's: those, and the other
    optimizers (``torch.sqrt`` is not always correctly rounded, the kernels' is), differ in the
    last place of an update. The result does not depend on the number of threads.
    """

    algorithm: ClassVar[Algorithm]
    torch_class: ClassVar[type[torch.optim.Optimizer]]
    moment_dtype: torch.dtype = torch.float32  # of the states of float32 parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. From here on the ``.grad`` of its float32 parameters may be 16-bit, too."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype is torch.float32 and param.device.type == "cpu" and param.is_leaf:
                allow_any_grad_dtype(param)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moment_dtype": self.moment_dtype}

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        """A parameter's state tensors under this group's flags, in the functor's order."""
        raise NotImplementedError

    def _plan(self, group: Group, param: Tensor, state: State) -> Plan:
        """One step of one parameter. Must not change ``state``, which is initialised."""
        raise NotImplementedError

    def _moments(self, group: Group, state: State) -> dict[str, Tensor]:
        return {name: state[name] for name in self._moment_names(group)}

    def _init_state(self, group: Group, param: Tensor, state: State) -> None:
        """Fill the empty ``state`` of a parameter that steps for the first time."""
        state["step"] = torch.zeros((), dtype=scalar_dtype(group))
        for name in self._moment_names(group):
            state[name] = self._new_moment(param)

    def _new_moment(self, param: Tensor, value: complex = 0.0) -> Tensor:
        """A state tensor of the parameter's shape and layout, on large pages if it is large."""
        moment = torch.empty_like(param, dtype=self._moment_dtype(param), requires_grad=False)
        kernels = load_kernels()
        if kernels is not None and moment.nbytes >= LARGE_TENSOR_BYTES:
            kernels.advise_large_pages(moment)
        return moment.fill_(value)

    @overload
    def step(
        self,
        closure: None = None,
        *,
        bindings: Mapping[Tensor, Binding] | None = None,
        grad_scale: float = 1.0,
    ) -> None: ...
    @overload
    def step(
        self,
        closure: Callable[[], float],
        *,
        bindings: Mapping[Tensor, Binding] | None = None,
        grad_scale: float = 1.0,
    ) -> float: ...
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        bindings: Mapping[Tensor, Binding] | None = None,
        grad_scale: float = 1.0,
    ) -> float | None:
        """One step, as in torch; see :meth:`step_fused` for ``bindings`` and ``grad_scale``.

        Args:
            closure: reevaluates the model and returns the loss.
            bindings: gradients that do not lie in ``.grad``; excludes a closure.
            grad_scale: multiplies every gradient.

        Returns:
            The closure's loss, or ``None``.

        Raises:
            InvalidValueError: a closure together with bindings.
        """
        loss = None
        if closure is not None:
            if bindings is not None:
                raise InvalidValueError(
                    "step got a closure and bindings; expected one of them, because a closure "
                    "computes the parameters' own .grad"
                )
            with torch.enable_grad():
                loss = closure()
        updates = list(updates_of(self.param_groups, bindings))
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable", False))):
            self._run(updates, float(grad_scale))
        return loss

    def step_fused(self, bindings: Mapping[Tensor, Binding], grad_scale: float = 1.0) -> None:
        """Step the bound parameters in one pass over memory.

        For a float32 parameter, the gradient (usually 16-bit) is read, scaled, and used in float32;
        the parameter and its states are updated; and the new value is rounded (to nearest, ties to
        even) into ``published``. No float32 gradient exists at any time. The numbers are those of
        converting the gradient, multiplying it by ``grad_scale``, a step, and converting back.

        Only the parameters in ``bindings`` are stepped, so a model can be stepped layer by layer.
        Their ``.grad`` is neither read nor changed. Step hooks run, and schedulers count the call,
        as with :meth:`step`. May be called from any thread, by one at a time.

        Args:
            bindings: for each parameter to step, its tensors.
            grad_scale: multiplies every gradient: one over the loss scale, times the clip factor.

        Raises:
            InvalidTypeError: a bound tensor has an impossible dtype, device or layout.
            InvalidValueError: a bound tensor has another shape than its parameter, or a key is no
                parameter of this optimizer. Nothing has been changed then.
        """
        self.step(bindings=bindings, grad_scale=grad_scale)

    def _run(self, updates: list[Update], grad_scale: float) -> None:
        kernels = load_kernels()
        # Set by torch.amp.GradScaler on optimizers made with fused=True.
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        ours, others = split(
            updates, lambda u: kernels is not None and not scaled and kernels_take(u)
        )
        if kernels is not None and ours:
            self._kernel_step(kernels, ours, grad_scale)
        if others:
            self._torch_step(others, grad_scale, prefer_fused=kernels is None)
        # The kernels, torch's fused ones too, write behind autograd's back: a backward that needs
        # an overwritten value must still notice.
        written = [update.param for update in updates]
        written += [update.published for update in updates if update.published is not None]
        torch.autograd.graph.increment_version(written)

    def _torch_step(self, updates: list[Update], grad_scale: float, prefer_fused: bool) -> None:
        rounded, usual = split(updates, lambda u: self._moment_dtype(u.param) != u.param.dtype)
        if usual:
            torch_step(self, self.torch_class, usual, grad_scale, prefer_fused)
        for update in rounded:
            names = self._moment_names(update.group)
            torch_step_rounded(self, self.torch_class, update, names, grad_scale, prefer_fused)

    def _moment_dtype(self, param: Tensor) -> torch.dtype:
        return self.moment_dtype if param.dtype is torch.float32 else param.dtype

    def _kernel_step(self, kernels: Kernels, updates: list[Update], grad_scale: float) -> None:
        planned: list[tuple[State, Plan]] = []
        tasks: list[Task] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for update in updates:
            state, plan = self._planned(update)
            planned.append((state, plan))
            published = update.published
            if published is not None and not same_layout(published, update.param):
                copies.append((published, update.param.detach()))
                published = None
            tasks.append(
                Task(
                    param=update.param,
                    grad=like(update.param, update.grad, update.grad.dtype),
                    published=published,
                    states=tuple(plan.moments.values()),
                    scalars=plan.scalars,
                    variant=plan.variant,
                    grad_scale=-grad_scale if update.group["maximize"] else grad_scale,
                    coupled_decay=plan.coupled_decay,
                    seed=rounding_seed(update.ordinal, int(state.get("step", 0))),
                )
            )
        kernels.step(self.algorithm, tasks)
        for published, param in copies:
            published.copy_(param)  # rounds as the kernels do
        for state, plan in planned:
            state.update(plan.moments)
            for name, value in plan.after.items():
                state[name].fill_(value)

    def _planned(self, update: Update) -> tuple[State, Plan]:
        group, param = update.group, update.param
        names = self._moment_names(group)
        # Without moments there is no state either, not even an empty one: state_dict() shows it.
        state = self.state[param] if names else {}
        if not state:
            self._init_state(group, param, state)
        for name in names:
            # Another layout or dtype comes from the state_dict of a run that had others.
            if state.get(name) is not None:
                state[name] = like(param, state[name], self.moment_dtype)
        return state, self._plan(group, param, state)


def scalar_dtype(group: Group) -> torch.dtype:
    """The dtype of ``state["step"]``, torch's rule: float64 if the process computes in it."""
    float64 = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.float64 if float64 else torch.float32


def next_step(state: State) -> float:
    """The number of the step that is about to be done, from one."""
    return float(state["step"]) + 1
