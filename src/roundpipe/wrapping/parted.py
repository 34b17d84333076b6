"""A model of which parts run on the devices, and the rest in host memory."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from roundpipe.config import RoundPipeRunConfig
from roundpipe.devices import DevicePool, open_pool
from roundpipe.errors import InvalidTypeError, InvalidValueError, StateError, Where, add_where
from roundpipe.facade import WrappedModel
from roundpipe.grafting import Graft, graft
from roundpipe.in_flight import DROPPED
from roundpipe.layerwise import submit_step
from roundpipe.stepping import Stepper
from roundpipe.wrapping.choose import ChainSpec, Choice, PartSpec
from roundpipe.wrapping.group_store import GroupStore
from roundpipe.wrapping.parts import Chain, Current, Part, PartCall, StandIn, merged_config

Self = TypeVar("Self", bound="PartedModel")
_OF_ONE_PART = ("split_input", "split_label", "merge_output", "execute_plan", "output_device")


class NoSequenceError(StateError, NotImplementedError):
    """Something was asked of a model that only a sequence of layers can do."""


@dataclass(frozen=True)
class PartOptions:
    """What all parts are made with.

    Attributes:
        name: name of the whole.
        model_run_config: options of calls.
        devices: as for :class:`roundpipe.RoundPipe`.
        optim_dtype: likewise.
        more: further arguments of :class:`roundpipe.RoundPipe`.
    """

    name: str
    model_run_config: RoundPipeRunConfig
    devices: Any
    optim_dtype: torch.dtype | None
    more: dict[str, Any]


class PartedModel(WrappedModel):
    """A model whose large parts run through the devices, one after the other.

    Made by :func:`roundpipe.wrap_model_to_roundpipe`. The model's own forward runs in host memory
    and calls the parts, each of which is a RoundPipe: its inputs are cut into microbatches along
    dim 0, and its outputs are merged. ``forward``, gradients and ``step`` are those of the whole;
    there is one pool of devices, one optimizer thread, one version of all parameters.

    Args:
        model: the model.
        choice: what is wrapped.
        options: how.
    """

    _OWN = ("name", "model_run_config")

    def __init__(self, model: nn.Module, choice: Choice, options: PartOptions) -> None:
        pool = open_pool(options.devices)
        owned = None if pool is options.devices else pool
        try:
            builder = _Builder(model, choice, options, pool)
            grafted = builder.build()
        except BaseException:
            if owned is not None:
                owned.close()
            raise
        names = {id(p): name for name, p in model.named_parameters()}
        stores = [part._store for part in builder.parts]
        host = _host_parameters(model, builder.parts)
        store = GroupStore(host, stores, names, options.optim_dtype)
        stepper = Stepper(store, options.name)
        for part in builder.parts:
            part.follow(stepper, store)
        builder.current.wait = functools.partial(store.wait_all_readable, options.name)
        super().__init__(model, options.name, store)
        self.__dict__.update(
            model_run_config=options.model_run_config,
            _parts=tuple(builder.parts),
            _part_names=tuple(builder.part_names),
            _root=grafted.root,
            _grafts=tuple(builder.grafts),
            _stand_ins=tuple(builder.stand_ins),
            _current=builder.current,
            _stepper=stepper,
            _group=store,
            _busy=threading.Lock(),
            _modes=None,
            _close=weakref.finalize(self, _close_all, stepper, owned),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same as :meth:`forward`."""
        return self.forward(*args, **kwargs)

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """Run the model's own forward; its parts run on the devices.

        Args:
            *args: arguments of the model.
            roundpipe_run_config: options of this call, for all parts.
            **kwargs: likewise.

        Raises:
            InvalidValueError: an option that only makes sense for one part.
        """
        check_for_parts(roundpipe_run_config)
        wants_grad = roundpipe_run_config.requires_grad
        if wants_grad is None:
            wants_grad = self.model_run_config.requires_grad
        wants_grad = torch.is_grad_enabled() if wants_grad is None else wants_grad
        with self._one_call(), torch.set_grad_enabled(wants_grad):
            self._stepper.raise_failure()
            self._follow_modes()
            self._group.adopt_user_gradients()
            self._group.wait_host_readable(f"the caller of {self.name}")
            with self._undone_if_failing():
                self._current.config = roundpipe_run_config
                for grafted in self._grafts:
                    grafted.pull()
                try:
                    return self._root(*args, **kwargs)
                finally:
                    for grafted in self._grafts:
                        grafted.push()

    def forward_backward(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused.

        Raises:
            NoSequenceError: always.
        """
        names = ", ".join(self._part_names[:3])
        more = ", ..." if len(self._parts) > 3 else ""
        raise NoSequenceError(
            f"forward_backward needs a sequence of layers; {type(self.model).__name__} was wrapped "
            f"by size, in {len(self._parts)} parts ({names}{more}) with code of its own between "
            "them: call forward and then backward() on the loss, or pass the layers as "
            "nn.Sequential"
        )

    def step(
        self,
        step_fn: Callable[..., Any] | torch.optim.Optimizer,
        is_async: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As :meth:`RoundPipe.step`, for all parameters of the model.

        A step of an optimizer updates all parameters before it publishes any.

        Args:
            step_fn: any function, typically optimizer, scheduler, ``zero_grad``; or an optimizer.
            is_async: as for :meth:`RoundPipe.step`.
            *args: likewise.
            **kwargs: likewise.

        Raises:
            InvalidTypeError: ``step_fn`` is neither.
        """
        with self._one_call():
            submit_step(self._stepper, self.name, step_fn, is_async, args, kwargs)

    def synchronize(self) -> None:
        """As :meth:`RoundPipe.synchronize`, for all parameters of the model."""
        with self._one_call():
            try:
                self._stepper.publish_latest()
            finally:
                self._group.expose_gradients()

    @property
    def wrapped_parts(self) -> tuple[Part, ...]:
        """The parts, each of them a RoundPipe, in order of the model's modules."""
        parts: tuple[Part, ...] = self._parts
        return parts

    def _one_call(self) -> threading.Lock:
        """As that of :class:`RoundPipe`."""
        busy: threading.Lock = self._busy
        if self._stepper.on_own_thread():
            raise StateError(
                f"{self.name} was called from its own step function, which it would wait for"
            )
        if busy.locked():
            raise StateError(f"{self.name} was called while another call of it is running")
        return busy

    @contextlib.contextmanager
    def _undone_if_failing(self) -> Iterator[None]:
        """After a failure buffers are as before, and accumulated gradients are dropped."""
        buffers = [(b, b.clone()) for b in self.model.buffers()] if self.model.training else []
        try:
            yield
        except BaseException as error:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            if torch.is_grad_enabled() and self._group.drop_gradients():
                add_where(error, Where(model=self.name), DROPPED)
            raise

    def _follow_modes(self) -> None:
        """After ``train()`` or ``eval()`` other layers may draw random numbers than before."""
        modes = tuple(module.training for module in self.model.modules())
        if modes == self._modes:
            return
        for stand_in in self._stand_ins:
            stand_in.follow_mode()
        for part in self._parts:
            part.watch_anew()
        self.__dict__["_modes"] = modes

    def train(self: Self, mode: bool = True) -> Self:
        """Training mode for the whole model."""
        self.model.train(mode)
        return self

    def __repr__(self) -> str:
        names = ", ".join(self._part_names)
        return f"PartedModel({self.name!r}, {type(self.model).__name__} in parts: {names})"

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> NoReturn:
        raise InvalidTypeError(
            f"{self.name} cannot be copied, because it has several parts: copy the plain model "
            "after synchronize() and wrap the copy"
        )


def check_for_parts(config: RoundPipeRunConfig) -> None:
    """Refuse options that have no meaning for several parts at once.

    Raises:
        InvalidValueError: there is one.
    """
    for name in _OF_ONE_PART:
        if getattr(config, name) is not None:
            raise InvalidValueError(
                f"{name} was given for a model that is wrapped in several parts; give it to one of "
                "them, in override_config of wrap_model_to_roundpipe"
            )


class _Builder:
    """Makes the parts and puts them into a copy of the model's containers."""

    def __init__(
        self, model: nn.Module, choice: Choice, options: PartOptions, pool: DevicePool
    ) -> None:
        self.parts: list[Part] = []
        self.part_names: list[str] = []
        self.grafts: list[Graft] = []
        self.stand_ins: list[StandIn] = []
        self.current = Current()
        self._model = model
        self._choice = choice
        self._options = options
        self._pool = pool

    def build(self) -> Graft:
        """Make everything; returns the copy of the whole model."""
        modules = {id(module): module for module in self._model.modules()}
        replacements: dict[int, nn.Module] = {}
        # Inner ones come first, so that what is around them can be copied with them replaced.
        for key, spec in self._choice.items():
            stand_in: StandIn
            if isinstance(spec, PartSpec):
                stand_in = self._part_call(modules[key], spec)
            else:
                stand_in = self._chain(modules[key], spec, replacements)
            replacements[key] = stand_in
        return self._graft(self._model, replacements)

    def _chain(
        self, original: nn.Module, spec: ChainSpec, replacements: dict[int, nn.Module]
    ) -> Chain:
        items: list[nn.Module] = [
            self._part_call(item.layers[0], item)
            if isinstance(item, PartSpec)
            else self._graft(item, replacements).root
            for item in spec.items
        ]
        chain = Chain(original, self.current, items)
        self.stand_ins.append(chain)
        return chain

    def _part_call(self, original: nn.Module, spec: PartSpec) -> PartCall:
        options = self._options
        part = Part(
            nn.Sequential(*spec.layers),
            optim_dtype=options.optim_dtype,
            name=f"{options.name} {spec.name}",
            model_run_config=merged_config(spec.config, options.model_run_config),
            devices=self._pool,
            **options.more,
        )
        self.parts.append(part)
        self.part_names.append(spec.name)
        call = PartCall(original, self.current, part)
        self.stand_ins.append(call)
        return call

    def _graft(self, module: nn.Module, replacements: dict[int, nn.Module]) -> Graft:
        grafted = graft(module, replacements)
        self.grafts.append(grafted)
        return grafted


def _host_parameters(model: nn.Module, parts: list[Part]) -> nn.Module:
    on_devices = {id(p) for part in parts for p in part.model.parameters()}
    return nn.ParameterList(p for p in model.parameters() if id(p) not in on_devices)


def _close_all(stepper: Stepper, owned_pool: DevicePool | None) -> None:
    stepper.close()
    if owned_pool is not None:
        owned_pool.close()
