"""The user's class. A batch's walk starts and ends here; read the stations in order."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .admission import check_parameters
from .arrivals import Entry
from .autograd import Bridge
from .buffer_watch import commit_buffers, on_one_device_with_buffers
from .calls import Call, Chain, LossFunction
from .compat import grad_dtype_is_settable
from .config import ResolvedRunConfig, RoundPipeRunConfig, resolve
from .context import CallerContext
from .costs import PlanBook
from .devices import DevicePool, open_pool
from .dispatch import Engine, Run, backward_stages, forward_stages, schedule
from .errors import (
    InvalidTypeError,
    InvalidValueError,
    RoundPipeError,
    StateError,
    Where,
    add_where,
)
from .facade import name_of_caller
from .in_flight import DROPPED, Airborne, InFlightCall, PackedOutputs, fed_by
from .layerwise import submit_step
from .measuring import MeasuredModel
from .microbatch import Batch, packed_count, packed_leaves, split_batch
from .parameters import ParameterStore
from .pinning import pin_parameters
from .random_state import LayerRandomness, draw_call_seed
from .results import (
    give_input_gradients,
    merged,
    outputs_of,
    summed_losses,
    wait_homecoming,
)
from .stepping import Stepper
from .trace import EventLog
from .transfer import Border

Self = TypeVar("Self", bound="RoundPipe")


def _identity_loss(outputs: Any, _label: Any) -> Any:
    return outputs


class RoundPipe(MeasuredModel):
    """Trains ``model`` through a pool of devices, its weights staying in host memory.

    The model stays the user's: it is not rebuilt, and after :meth:`synchronize` it holds the
    trained weights. Reading an attribute that RoundPipe lacks reads it from the original model (see
    :meth:`set_original_model`) or else from ``model``; writing and deleting go to the same place.

    All methods are called from one thread at a time.

    Args:
        model: an ``nn.Sequential`` (each child is a layer) or any module (one layer).
        optim_dtype: dtype of the master parameters; by default each parameter's own.
        name: shown in logs, errors and traces; by default ``file.py:line`` of the caller.
        model_run_config: defaults for the model's calls.
        pin_model: ``"alloc"`` moves the parameters into page-locked memory, ``"register"``
            page-locks the memory that is there, ``"off"`` leaves them. Nothing on CPU devices.
        devices: ``None`` for what ``ROUNDPIPE_DEVICES`` says (else ``"auto"``), ``"auto"``,
            ``"accelerator"``, ``"cpu:4"``, a list of ``torch.device``, or a pool.
        accumulate_dtype: dtype in which gradients accumulate on a device over a call's
            microbatches; by default the parameter's own.

    Raises:
        InvalidTypeError: ``model`` is no module, or has parameters that are not in host memory.
        InvalidValueError: an empty model, an unknown ``pin_model`` or ``devices``, or an
            ``accumulate_dtype`` that this torch cannot accumulate in.
    """

    _OWN = ("model_run_config", "name")

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        pin_model: str = "alloc",
        *,
        devices: Any = None,
        accumulate_dtype: torch.dtype | None = None,
    ) -> None:
        layers = _layers_of(model)
        check_parameters(model)
        if not isinstance(model_run_config, RoundPipeRunConfig):
            raise InvalidTypeError(
                f"model_run_config is a {type(model_run_config).__name__}; give a "
                "RoundPipeRunConfig"
            )
        if accumulate_dtype is not None and not grad_dtype_is_settable():
            raise InvalidValueError(
                f"accumulate_dtype={accumulate_dtype} needs Tensor.grad_dtype, which torch "
                f"{torch.__version__} lacks; leave it out or install a newer torch"
            )
        name = name or name_of_caller(sys._getframe(1))
        pool = open_pool(devices)
        owned = None if pool is devices else pool
        try:
            pin_parameters(model.parameters(), pin_model, pool.devices)
        except BaseException:
            if owned is not None:
                owned.close()
            raise
        names = {id(p): key for key, p in model.named_parameters()}
        store = ParameterStore(layers, names, optim_dtype)
        shared = [frozenset(record.layers) for record in store.records()]
        book = PlanBook(layers, pool.devices, name, shared)
        log = EventLog()
        engine = Engine(
            name, pool, store, LayerRandomness(), log, accumulate_dtype, meter=book.meter
        )
        stepper = Stepper(store, name, log)
        super().__init__(model, engine, stepper, book)
        airborne = Airborne()
        self.__dict__.update(
            _airborne=airborne,
            model_run_config=model_run_config,
            _options={"optim_dtype": optim_dtype, "pin_model": pin_model, "devices": devices,
                      "accumulate_dtype": accumulate_dtype},
            _busy=threading.Lock(),
            _calls=0,
            _close=weakref.finalize(self, _close_parts, airborne, stepper, owned),
        )  # fmt: skip

    # --- calls -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same as :meth:`forward`. Hooks of the model's layers run; its own do not."""
        return self.forward(*args, **kwargs)

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """Split, run, merge, return.

        With gradients enabled the output can be used in any further torch code and ``backward()``
        works, also into inputs that require grad; the parameters' gradients accumulate until a step
        takes them. Inputs are copied: what a layer does to its input in place is not seen by the
        caller.

        Args:
            *args: arguments of the first layer; tensors are cut along dim 0.
            roundpipe_run_config: options of this call.
            **kwargs: likewise.

        Returns:
            The merged output, on ``output_device``. With ``merge_output=False`` the output's leaves
            are :class:`RoundPipePackedData`, and the call may still be on the devices: its inputs
            and the model must not be changed before it is over. The next use of this model waits
            for that, and so does any look at the packed data.
        """
        config = self._resolve(roundpipe_run_config)
        with self._one_call(), torch.set_grad_enabled(config.requires_grad):
            run_type = (
                "train" if config.requires_grad and self._wants_grad(args, kwargs) else "infer"
            )
            batch = self._split(config, args, kwargs, None)
            call = self._new_call(run_type, config, batch)
            stages = forward_stages(call.plan, run_type, self._first_trainable(call))
            num_layers = len(self._engine.store.layers)
            bridge = (
                Bridge(call, num_layers, self._run_backward, self.model.parameters())
                if call.keeps_grad
                else None
            )
            if config.merge_output is False:
                return self._launch(call, stages, bridge, [m.rows for m in batch.microbatches])
            with self._effects(call):
                self._run(call, stages)
                output = self._merge(call, outputs_of(call, num_layers, bridge))
                commit_buffers(call, self._engine.store.layers)
            return output

    def forward_backward(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFunction = _identity_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    ) -> Any:
        """Forward, loss and backward of a batch, fused.

        For each microbatch m: ``out = model(args_m, kwargs_m)``, ``loss = loss_fn(out, label_m)``,
        backward. Gradients are the sum over microbatches and accumulate over calls until a step
        takes them. Inputs that require grad receive their gradients.

        Args:
            input_args: positional arguments of the first layer.
            input_kwargs: keyword arguments of the first layer.
            label: split like the inputs and given to ``loss_fn``.
            loss_fn: ``loss_fn(output, label)`` returns a scalar or a sequence of scalars (whose sum
                is differentiated). Runs on the device of the last stage. By default the model's
                output is the loss.
            return_outputs: also return the merged outputs, without gradients.
            run_config: options of this call.

        Returns:
            The sum over microbatches of the losses, a detached CPU tensor (a list of sums if
            ``loss_fn`` returns a sequence), or ``(loss, outputs)``.

        Raises:
            StateError: gradients are disabled, or nothing requires grad.
        """
        config = self._resolve(run_config)
        args, kwargs = _check_inputs(input_args, input_kwargs, loss_fn)
        if not config.requires_grad:
            raise StateError(
                "forward_backward was called with gradients disabled (torch.no_grad, or "
                "requires_grad=False in the run config); use forward for evaluation"
            )
        with self._one_call(), torch.enable_grad():
            if not self._wants_grad(args, kwargs):
                raise StateError(
                    f"nothing in {self.name} requires grad: all parameters are frozen and no input "
                    "requires grad; unfreeze a parameter or use forward"
                )
            batch = self._split(config, args, kwargs, label)
            call = self._new_call("fused", config, batch)
            call.loss_fn, call.return_outputs = loss_fn, return_outputs
            stages = forward_stages(call.plan, "fused", self._first_trainable(call))
            output = None
            with self._effects(call):
                self._run(call, stages)
                losses = summed_losses(call)
                if return_outputs:
                    outputs = [c.output.home() for c in call.chains if c.output is not None]
                    output = self._merge(call, outputs)
                give_input_gradients(call)
                commit_buffers(call, self._engine.store.layers)
            return (losses, output) if return_outputs else losses

    # --- stations of a call ------------------------------------------------------------------

    def _resolve(self, config: RoundPipeRunConfig) -> ResolvedRunConfig:
        return resolve(config, self.model_run_config, len(self._engine.pool.devices))

    def _one_call(self) -> threading.Lock:
        """What to hold during a call, step or synchronize: refuses a second one.

        A lock and not a context manager of ours: between its code and the block's, Ctrl-C would
        leave the model taken for ever.

        Raises:
            StateError: another one is running.
        """
        busy: threading.Lock = self._busy
        if self._stepper.on_own_thread():
            raise StateError(
                f"{self.name} was called from its own step function, which it would wait for"
            )
        own_devices = any(worker.is_current() for worker in self._engine.pool.workers)
        if own_devices or busy.locked():
            raise StateError(
                f"{self.name} was called while another call of it is running: from a layer, a "
                "loss function, or a second thread"
            )
        self._airborne.settle()
        return busy

    def _wants_grad(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if any(layer.trainable for layer in self._engine.store.layers):
            return True
        if any(packed.requires_grad for packed in packed_leaves(args, kwargs)):
            return True
        return bool(Border.from_host((args, kwargs), keep_grad=True).sources)

    def _split(
        self, config: ResolvedRunConfig, args: Sequence[Any], kwargs: Mapping[str, Any], label: Any
    ) -> Batch:
        count = config.num_microbatch
        if not config.num_microbatch_given:
            count = packed_count(args, kwargs) or count
        try:
            return split_batch(
                tuple(args), dict(kwargs), label, count, config.split_input, config.split_label,
                warned=self._warned, rows_matter=config.loss_reduction == "mean",
            )  # fmt: skip
        except RoundPipeError:
            raise  # what was given cannot be cut; nothing has run and nothing is lost
        except BaseException as error:
            dropped = config.requires_grad and self._engine.store.drop_gradients()
            add_where(error, Where(model=self.name, phase="split"), DROPPED if dropped else None)
            raise

    def _new_call(self, run_type: str, config: ResolvedRunConfig, batch: Batch) -> Call:
        engine = self._engine
        plan = config.execute_plan or self._book.plan(run_type, len(batch.microbatches))
        plan.check_valid(len(engine.store.layers), run_type)
        plan = on_one_device_with_buffers(plan, engine.store.layers, run_type)
        keep_grad = run_type != "infer"
        chains = []
        for piece in batch.microbatches:
            entry = Border.from_host((piece.args, piece.kwargs), keep_grad)
            label = Border.from_host(piece.label, keep_grad=False)
            chain = Chain(piece.index, {0: entry}, label, sources=entry.sources)
            awaited = Entry([entry, label])
            if awaited.arrivals:
                chain.entry = awaited
            if config.loss_reduction == "mean":
                chain.weight = _share_of_rows(piece.rows, batch.rows)
            chains.append(chain)
        call = Call(
            number=self._calls,
            run_type=run_type,
            config=config,
            plan=plan,
            version=engine.store.entitled_version,
            seed=draw_call_seed() if config.preserve_rng_state else 0,
            context=CallerContext.capture({d.torch_device.type for d in engine.pool.devices}),
            chains=chains,
        )
        call.saved = self._saved_borders(call)
        self.__dict__["_calls"] += 1
        return call

    def _first_trainable(self, call: Call) -> int:
        """The first layer behind which gradients are wanted."""
        for chain in call.chains:
            arrivals = chain.entry.arrivals if chain.entry is not None else []
            if chain.sources or any(arrival.may_require_grad for arrival in arrivals):
                return -1
        layers = self._engine.store.layers
        return next((layer.index for layer in layers if layer.trainable), len(layers))

    def _saved_borders(self, call: Call) -> frozenset[int]:
        """Layers in front of which backward needs the state."""
        if call.run_type == "infer":
            return frozenset()
        stages = backward_stages(call.plan, self._first_trainable(call))
        if call.run_type == "fused":
            stages = stages[1:]
        if call.config.recompute_grain == "layer":
            return frozenset(index for stage in stages for index in stage.layers)
        return frozenset(stage.layers.start for stage in stages)

    @contextlib.contextmanager
    def _effects(self, call: Call) -> Iterator[None]:
        """Around the stations of a call: it takes effect as a whole, or after a failure not."""
        store = self._engine.store
        self._stepper.raise_failure()
        if call.keeps_grad:
            store.adopt_user_gradients()
        # Asked before the run, which takes what was accumulated to the devices.
        accumulated = call.keeps_grad and store.holds_gradients()
        try:
            yield
        except BaseException as error:
            if call.keeps_grad:
                store.drop_gradients()
            if accumulated:
                add_where(error, Where(model=self.name), DROPPED)
            raise

    def _run(self, call: Call, stages: Any) -> None:
        """Dispatch the stages; returns when the devices are done."""
        engine, pool = self._engine, self._engine.pool
        tasks, pool.cursor = schedule(stages, pool.cursor, len(pool.devices), len(call.chains))
        run = Run(engine, call, tasks)
        with engine.randomness.watch_call(self.name), fed_by(call, run.scope):
            run.execute()
        wait_homecoming(call, len(engine.store.layers), self.name)
        self._stepper.raise_failure()

    def _launch(
        self, call: Call, stages: Any, bridge: Bridge | None, rows: Sequence[int | None]
    ) -> Any:
        """Dispatch the stages and leave the outputs packed; the call may still be in flight."""
        engine, pool = self._engine, self._engine.pool
        self._stepper.raise_failure()
        if call.keeps_grad:
            engine.store.adopt_user_gradients()
        tasks, pool.cursor = schedule(stages, pool.cursor, len(pool.devices), len(call.chains))
        flight = InFlightCall(Run(engine, call, tasks), self._airborne)
        with engine.randomness.watch_call(self.name):
            flight.launch()
            if not flight.may_go_on:
                num_layers = len(engine.store.layers)
                return flight.settle(
                    lambda: self._merge(call, outputs_of(call, num_layers, bridge))
                )
        return PackedOutputs(flight, bridge, rows).packed()

    def _run_backward(self, call: Call) -> None:
        with self._one_call():
            if call.version != self._engine.store.entitled_version:
                raise StateError(
                    "the parameters were stepped or synchronized between forward and backward; run "
                    "backward first, or forward again"
                )
            with self._effects(call):
                self._run(call, backward_stages(call.plan, self._first_trainable(call)))

    def _merge(self, call: Call, outputs: list[Any]) -> Any:
        try:
            return merged(call, outputs)
        except BaseException as error:
            add_where(error, Where(model=self.name, phase="merge"))
            raise

    # --- steps -------------------------------------------------------------------------------

    def step(
        self,
        step_fn: Callable[..., Any] | torch.optim.Optimizer,
        is_async: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run ``step_fn(*args, **kwargs)``, or one step of an optimizer, on the optimizer thread.

        **A function**: before it runs, the gradients accumulated so far have been folded into the
        masters' ``.grad``. Inside it ``parameters()`` and ``named_parameters()`` give the masters.
        With ``is_async=True``, the default, this returns at once and the next calls compute with
        the parameters before this step: staleness is exactly one step, whatever the timing. At most
        one step is in flight. With ``is_async=False`` it returns when the step is done and
        published.

        **An optimizer** of masters steps and drops its gradients; ``kwargs`` may hold ``scheduler``
        (one or several of ``torch.optim.lr_scheduler``, stepped afterwards) and ``max_norm`` (of
        all its gradients, as ``clip_grad_norm_``). By default layer by layer, in the order in which
        calls need the layers: this returns at once, the next call computes with the parameters
        after this step, and each of its stages starts when its own layers are updated. With
        ``is_async=True`` staleness is one step, as for a function.

        Args:
            step_fn: any function, typically optimizer, scheduler, ``zero_grad``; or an optimizer.
            is_async: see above.
            *args: for the function.
            **kwargs: for the function, or see above.

        Raises:
            InvalidTypeError, InvalidValueError: not a function, or an optimizer, scheduler or
                ``max_norm`` that cannot be used.
            StateError: parameters were changed in place where the change would be lost.
            BaseException: what an earlier step in flight raised (this step is then not run), or
                what this synchronous one raised. Once, the same object.
        """
        with self._one_call():
            submit_step(self._stepper, self.name, step_fn, is_async, args, kwargs)

    def synchronize(self) -> None:
        """Wait for everything; the model's parameters then hold the latest masters.

        Accumulated, not yet stepped gradients are put into the parameters' ``.grad``; the next call
        adds to them, the next step takes them.

        Raises:
            BaseException: what an asynchronous step function raised.
        """
        with self._one_call():
            try:
                self._stepper.publish_latest()
            finally:
                self._engine.store.expose_gradients()

    def train(self: Self, mode: bool = True) -> Self:
        """Training mode for all layers."""
        self._before_change()
        self._target.train(mode)
        if self._target is not self.model:
            self.model.train(mode)
        self._engine.randomness.forget()
        return self

    def _before_change(self) -> None:
        self._airborne.wait()

    def __repr__(self) -> str:
        names = ", ".join(device.name for device in self._engine.pool.devices)
        layers = len(self._engine.store.layers)
        kind = type(self._target).__name__
        return f"RoundPipe({self.name!r}, {layers} layers of {kind}, on {names})"

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        self.synchronize()
        model, original = copy.deepcopy((self.model, self._original), memo)
        options = dict(self._options)
        twin = type(self)(model, name=self.name, model_run_config=self.model_run_config, **options)
        memo[id(self)] = twin
        if original is not None:
            twin.set_original_model(original)
        self._engine.store.copy_masters_to(twin._engine.store)
        return twin


def _close_parts(airborne: Airborne, stepper: Stepper, owned_pool: DevicePool | None) -> None:
    airborne.abandon(stepper)
    stepper.close()
    if owned_pool is not None:
        owned_pool.close()


def _layers_of(model: Any) -> list[nn.Module]:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is a {type(model).__name__}; give an nn.Module")
    if isinstance(model, RoundPipe):
        raise InvalidTypeError("model is a RoundPipe already; wrap the plain model")
    if not isinstance(model, nn.Sequential):
        return [model]
    if len(model) == 0:
        raise InvalidValueError("the nn.Sequential has no layers; give it at least one")
    return list(model)


def _check_inputs(args: Any, kwargs: Any, loss_fn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(args, torch.Tensor) or not isinstance(args, Sequence):
        raise InvalidTypeError(
            f"input_args is a {type(args).__name__}; give a tuple of positional arguments, as (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidTypeError(
            f"input_kwargs is a {type(kwargs).__name__}; give a dict of keyword arguments"
        )
    if not callable(loss_fn):
        raise InvalidTypeError(
            f"loss_fn is a {type(loss_fn).__name__}; give a function of (output, label)"
        )
    return tuple(args), dict(kwargs or {})


def _share_of_rows(rows: int | None, batch_rows: int | None) -> float:
    if not rows or not batch_rows:
        raise InvalidValueError(
            'loss_reduction="mean" needs to know how many rows each microbatch has, and no input '
            'tensor tells; use "sum" and weight the loss inside loss_fn'
        )
    return rows / batch_rows
