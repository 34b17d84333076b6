"""Checking that roundpipe trains a model as plain PyTorch does, and saying why not."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.devices import DevicePool, open_pool
from roundpipe.devices.cpu import CpuDevice
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.microbatch.tree import flatten
from roundpipe.pipeline import RoundPipe

from .compare import GRAINS, compare
from .plain import (
    Task,
    intraop_threads,
    label_of,
    layers_of,
    losses_of,
    run_plain,
    untouched_generators,
)
from .probes import Prober, explain
from .report import Finding, Report

__all__ = ["Finding", "Report", "verify"]

NUM_MICROBATCHES = (1, 2, 3)


class NoLossError(InvalidTypeError):
    """There is no ``loss_fn``, and what the model returns is no loss."""


def _own_loss(output: Any, _label: Any) -> Any:
    losses = losses_of(output)
    if losses and all(isinstance(loss, torch.Tensor) and loss.numel() == 1 for loss in losses):
        return output
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    raise NoLossError(
        f"the model returns a {type(output).__name__}{shape}, which is no loss; give a loss_fn of "
        "(output, label) that returns a sum over rows, as lambda output, label: "
        'F.cross_entropy(output.logits.flatten(0, 1), label.flatten(), reduction="sum") for a '
        "language model of transformers, with roundpipe.hf.cut_model(model).layers as the model "
        "to see it layer by layer; a saved one is checked so by the command roundpipe verify FOLDER"
    )


def verify(
    model: nn.Module,
    inputs: Sequence[Any] | torch.Tensor = (),
    label: Any = None,
    loss_fn: Callable[[Any, Any], Any] = _own_loss,
    *,
    input_kwargs: Mapping[str, Any] | None = None,
    loss_reduction: str = "sum",
    num_microbatches: Sequence[int] = NUM_MICROBATCHES,
    devices: Any = "cpu:2",
    seed: int = 0,
) -> Report:
    """Run a small batch through plain PyTorch and through roundpipe, and say what differs.

    The first thing to run on a new model. Each layer is looked at by itself: whether it writes to
    attributes or globals, is tied to one device, repeats itself when it is run again, computes over
    the rows of a batch. Then outputs of every layer, losses, gradients and buffers, under several
    plans, numbers of microbatches and both recompute grains, are compared with those of a plain
    loop over the same microbatches, bitwise on CPU devices.

    Only copies of the model are run, three at a time at most: the model, its gradients and buffers
    and the generators of torch, Python and NumPy are afterwards as before.

    Args:
        model: an ``nn.Sequential`` (each child is a layer) or any module (one layer).
        inputs: positional arguments of the model, a small batch; a tensor stands for ``(tensor,)``.
        label: for ``loss_fn``.
        loss_fn: as in :meth:`RoundPipe.forward_backward`. Without it the model has to return the
            loss.
        input_kwargs: keyword arguments of the model.
        loss_reduction: as in the run config.
        num_microbatches: numbers of pieces to cut the batch into.
        devices: as in :class:`RoundPipe`; CPU devices need no accelerator and compare bitwise.
        seed: of torch's generator at the beginning of each run.

    Returns:
        The report: ``print`` it, or ask ``report.ok``.

    Raises:
        InvalidTypeError: ``model`` is no module, is wrapped already, or cannot be copied; inputs or
            ``loss_fn`` are of the wrong kind; or the output is no loss, without a ``loss_fn``.
        InvalidValueError: nothing requires a gradient, or ``num_microbatches`` are no numbers of
            pieces.
    """
    _check_model(model)
    args, kwargs = _checked_inputs(inputs, input_kwargs)
    _check_trainable(model, (args, kwargs))
    counts = _checked_counts(num_microbatches)
    if not callable(loss_fn):
        raise InvalidTypeError(
            f"loss_fn is a {type(loss_fn).__name__}; give a function of (output, label)"
        )
    task = Task(args, kwargs, label, loss_fn, loss_reduction, seed)
    report = Report()
    pool = open_pool(devices)
    try:
        # What the model warns of it warns of in plain PyTorch, too.
        with untouched_generators(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _verify(_copy_of(model), task, counts, pool, report)
    finally:
        if pool is not devices:
            pool.close()
    return report


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is a {type(model).__name__}; give an nn.Module")
    if any(isinstance(module, RoundPipe) for module in model.modules()):
        raise InvalidTypeError(
            f"model is a {type(model).__name__}, which is wrapped already; give the plain model"
        )


def _checked_inputs(inputs: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise InvalidTypeError(
            f"inputs is a {type(inputs).__name__}; give a tuple of positional arguments, as (x,); "
            "keyword arguments are input_kwargs"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidTypeError(
            f"input_kwargs is a {type(kwargs).__name__}; give a dict of keyword arguments"
        )
    return tuple(inputs), dict(kwargs or {})


def _check_trainable(model: nn.Module, given: Any) -> None:
    tensors = [leaf for leaf in flatten(given)[0] if isinstance(leaf, torch.Tensor)]
    if not any(tensor.requires_grad for tensor in (*model.parameters(), *tensors)):
        raise InvalidValueError(
            "nothing requires a gradient, neither a parameter of the model nor an input, so there "
            "is no training to compare; call requires_grad_() on what is to be trained"
        )


def _checked_counts(counts: object) -> tuple[int, ...]:
    numbers = tuple(counts) if isinstance(counts, Sequence) else ()
    if not numbers or not all(isinstance(n, int) and n >= 1 for n in numbers):
        raise InvalidValueError(
            f"num_microbatches is {counts!r}; give numbers of pieces of at least 1, as (1, 2, 3)"
        )
    return numbers


def _copy_of(model: nn.Module) -> nn.Module:
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise InvalidTypeError(
            f"the model cannot be copied ({explain(error)}); verify runs copies only: give it a "
            "model that copy.deepcopy can copy"
        ) from error
    twin.zero_grad()
    return twin


def _verify(
    model: nn.Module, task: Task, counts: Sequence[int], pool: DevicePool, report: Report
) -> None:
    device = pool.devices[0]
    threads = device.intraop_threads if isinstance(device, CpuDevice) else torch.get_num_threads()
    grains = itertools.cycle(GRAINS)
    with intraop_threads(threads):
        try:
            Prober(model, task, report).run()
        except NoLossError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code failed, which is the finding
            _report_plain_failure(model, error, report)
            return
    for count in counts:
        try:
            with intraop_threads(threads):
                want = run_plain(copy.deepcopy(model), task, count)
        except Exception as error:  # noqa: BLE001 - as above, for a smaller microbatch
            report.add("plain", "the model", f"{explain(error)} (with {count} microbatches)")
            continue
        # A model with three plans meets both grains in each of them over two numbers of pieces.
        compare(model, want, task, count, pool, report, grains)


def _report_plain_failure(model: nn.Module, error: BaseException, report: Report) -> None:
    layer = "the model"
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_probe_layer":
            layer = label_of(model, trace.tb_frame.f_locals["index"])
        elif trace.tb_frame.f_code.co_name == "_probe_loss":
            layer = "loss_fn"
        trace = trace.tb_next
    about_cuda = any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA"))
    kind = "device" if about_cuda and not _any_on_accelerator(model) else "plain"
    hint = "; make tensors with device=x.device of an input x" if kind == "device" else ""
    report.add(kind, layer, explain(error) + hint)


def _any_on_accelerator(model: nn.Module) -> bool:
    return any(p.device.type != "cpu" for layer in layers_of(model) for p in layer.parameters())
