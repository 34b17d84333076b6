"""Turning a model of transformers into a sequence of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from roundpipe.errors import InvalidTypeError, add_note
from roundpipe.hf import private
from roundpipe.hf.analysis import Analysis, analyse, candidate_lists
from roundpipe.hf.assemble import prefix_skeleton, tail_skeleton
from roundpipe.hf.batch_loss import LossRule, learn_loss
from roundpipe.hf.blueprint import Blueprint, CallSpec, learn_output, refuse_collecting
from roundpipe.hf.check import check_cut, check_output
from roundpipe.hf.example import (
    default_examples,
    problem_type_kept,
    takes_use_cache,
    text_config,
)
from roundpipe.hf.layer import LayerPiece
from roundpipe.hf.learn import learn_tail
from roundpipe.hf.prefix import PrefixPiece
from roundpipe.hf.probe import ModuleCall, Probe, quiet_random, run_probe
from roundpipe.hf.refusal import CutRefusedError, class_name
from roundpipe.hf.skeleton import SkeletonPiece, first_device
from roundpipe.hf.stubs import is_plain
from roundpipe.hf.tail import TailPiece
from roundpipe.microbatch.tree import flatten


@dataclass(frozen=True)
class CutModel:
    """A model as a sequence of layers.

    Attributes:
        model: the original; its parameters are the layers' parameters.
        layers: prefix, one piece per call of a layer, tail. The first takes the arguments of the
            model, the last returns its output, and each hands a pytree of tensors to the next.
        names: for each of ``layers``, what it is: ``prefix``, the layer's name in the model, or
            ``tail``.
        loss_rule: what the model's own loss is made of, if that is known; see
            :func:`roundpipe.hf.batch_loss.with_tail_options`.
    """

    model: nn.Module
    layers: nn.Sequential
    names: tuple[str, ...]
    loss_rule: LossRule | None = None

    def refresh_flags(self) -> None:
        """Let all pieces see the original's training flags; to be called before each run."""
        for piece in self.layers:
            if isinstance(piece, SkeletonPiece):
                piece.refresh_flags()


def cut_model(model: nn.Module, example: Mapping[str, Any] | None = None) -> CutModel:
    """Cut a model at its layers.

    The library's own forward is run once on a small batch and watched. The pieces then run that
    same forward: the prefix up to the last layer, with stand-ins for the layers, each layer with
    the arguments that the library gave it, and the tail over the layers' results. No weight is
    copied and nothing of the model is changed.

    Args:
        model: a model of transformers, or a PEFT model around one, on one device.
        example: keyword arguments of a small batch with all arguments that later calls will have.
            Without it, token ids with an attention mask, or images, and labels where the model
            takes them.

    Returns:
        The layers; see :class:`CutModel`.

    Raises:
        CutRefusedError: the model cannot be cut; the message has the reason and a way out.
        InvalidTypeError: ``model`` is no module.
    """
    refuse_at_sight(model)
    examples = default_examples(model) if example is None else [example]
    with problem_type_kept(model):
        return _cut(model, [dict(given) for given in examples])


def _cut(model: nn.Module, examples: list[dict[str, Any]]) -> CutModel:
    no_cache = takes_use_cache(model)
    probe, kwargs = _probe_first(model, examples, no_cache)
    whole: frozenset[str] = frozenset()
    while True:
        analysis = analyse(model, probe, whole)
        try:
            return _Cutter(model, probe, analysis, kwargs, no_cache).cut()
        except CutRefusedError as error:
            # The values that one stack computes may steer the code around another. Such a stack
            # stays whole, as a part of the prefix.
            stack = (error.part or "").rpartition(".")[0]
            stacks = {name.rpartition(".")[0] for name in analysis.element_names}
            if stack not in stacks or len(stacks) == 1:
                raise
            whole |= {stack}


def refuse_at_sight(model: nn.Module) -> None:
    """Refuse what need not be run to be seen.

    Raises:
        InvalidTypeError: it is no module.
        CutRefusedError: it is spread over devices, skips layers, or a forward is patched.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"cut_model was given a {type(model).__name__}; expected a model of transformers"
        )
    for name, module in model.named_modules():
        where = name or "the model"
        places = vars(module).get("hf_device_map") or {}
        if len(set(map(str, places.values()))) > 1:
            raise CutRefusedError(
                class_name(model),
                f"{where} has an hf_device_map: accelerate moves its parts between devices",
                "load the model without device_map",
            )
        if "forward" in vars(module):
            raise CutRefusedError(
                class_name(model),
                f"the forward of {where} is replaced on the instance, and the replacement belongs "
                "to that one object",
                "load the model without device_map and without patches, or subclass it",
            )
        drop = vars(module).get("layerdrop", 0.0)
        if module.training and isinstance(drop, float) and drop > 0:
            raise CutRefusedError(
                class_name(model),
                f"{where} skips layers at random while training (layerdrop={drop})",
                "set its layerdrop to 0",
            )


def is_cuttable(model: nn.Module) -> bool:
    """Whether to try :func:`cut_model`: it is a model of transformers and has lists of layers.

    Nothing is run. The answer may be True for a model that :func:`cut_model` then refuses.
    """
    base = getattr(model, "get_base_model", None)
    inner = base() if callable(base) else model
    return private.is_pretrained(inner) and bool(candidate_lists(model))


def _probe_first(
    model: nn.Module, examples: list[dict[str, Any]], no_cache: bool
) -> tuple[Probe, dict[str, Any]]:
    """Watch a forward on the first example that the model takes."""
    failures: list[Exception] = []
    for kwargs in examples:
        if no_cache:
            kwargs["use_cache"] = False
        try:
            return _probe(model, kwargs)
        except Exception as error:  # noqa: BLE001 - raised below, if no example does
            failures.append(error)
    raise failures[0]


def _probe(model: nn.Module, kwargs: dict[str, Any]) -> tuple[Probe, dict[str, Any]]:
    """Watch a forward, with all outputs on that the library collects, if the model takes that."""
    layers = [element for found in candidate_lists(model).values() for element in found]
    collect = {f"output_{name}": True for name in private.collectable_outputs(model)}
    if collect:
        wanted = {**collect, **kwargs}
        try:
            return run_probe(model, wanted, layers), wanted
        except Exception:  # noqa: BLE001 - whatever it is, the plain probe will tell
            pass
    try:
        return run_probe(model, kwargs, layers), kwargs
    except Exception as error:
        add_note(
            error,
            f"roundpipe: {class_name(model)} failed on the example batch of cut_model, with "
            f"{', '.join(kwargs)}; pass example= a small batch that its forward takes",
        )
        raise


class _Cutter:
    """The steps of one cut."""

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        analysis: Analysis,
        kwargs: dict[str, Any],
        no_cache: bool,
    ) -> None:
        self.model = model
        self.probe = probe
        self.analysis = analysis
        self.kwargs = kwargs
        self.device = first_device(kwargs, model)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.blueprint = Blueprint(
            class_name(model), analysis.element_names, self._call_specs(), no_cache
        )
        self.loss_rule: LossRule | None = None

    def cut(self) -> CutModel:
        held = self._learn_tail()
        prefix = PrefixPiece(prefix_skeleton(self.model, self.analysis, held), self.blueprint)
        parameters = self._between(prefix)
        self.blueprint = replace(
            self.blueprint, glue_parameters={k: tuple(v) for k, v in parameters.items()}
        )
        prefix.blueprint = self.blueprint
        layers = [
            LayerPiece(index, call.module, self.blueprint, parameters.get(index, {}))
            for index, call in enumerate(self.analysis.calls)
        ]
        skeleton = tail_skeleton(self.model, self.analysis, held)
        tail = TailPiece(skeleton, self.blueprint, self.loss_rule)
        inputs = ((), self.kwargs)
        check_cut((prefix, layers, tail), self.analysis.calls, inputs, self.probe.output)
        elements = [self.blueprint.elements[call.element] for call in self.blueprint.calls]
        return CutModel(
            self.model,
            nn.Sequential(prefix, *layers, tail),
            ("prefix", *elements, "tail"),
            self.loss_rule,
        )

    def _call_specs(self) -> tuple[CallSpec, ...]:
        index = {id(element): i for i, element in enumerate(self.analysis.elements)}
        specs = []
        for call in self.analysis.calls:
            refuse_collecting(
                class_name(self.model), self.names[id(call.module)], tuple(call.collected)
            )
            output = learn_output(call.args, dict(call.kwargs), call.output)
            if output is None:
                raise CutRefusedError(
                    class_name(self.model),
                    f"{self.names[id(call.module)]} returns a {type(call.output).__name__} with "
                    "something in it that is neither tensor nor constant",
                )
            specs.append(CallSpec(index[id(call.module)], output))
        return tuple(specs)

    def _learn_tail(self) -> set[int]:
        """Find what the tail reads, and which modules it need not run.

        A module of which the tail's code uses more than the output is not held.
        """
        before = self.analysis.guests.before
        held = {key for key, calls in before.items() if all(_describable(c) for c in calls)}
        while True:
            calls = {self.names[key]: before[key] for key in held}
            skeleton = tail_skeleton(self.model, self.analysis, held)
            inputs = ((), self.kwargs)
            try:
                read, output, watch = learn_tail(
                    skeleton, self.blueprint, self.analysis, calls, inputs, self.device
                )
                break
            except CutRefusedError as error:
                stubborn = {key for key in held if self.names[key] == error.part}
                if not stubborn:
                    raise
                held -= stubborn
        check_output(self.blueprint.model_class, output, self.probe.output)
        self.loss_rule = learn_loss(watch, output, self.kwargs, text_config(self.model))
        of_modules = [name.rsplit(":", 2) for name in read if ":" in name]
        self.blueprint = replace(
            self.blueprint,
            tail_reads=frozenset(name for name in read if ":" not in name),
            tail_reads_held=frozenset((n, int(call), int(leaf)) for n, call, leaf in of_modules),
        )
        return held

    def _between(self, prefix: PrefixPiece) -> dict[int, dict[str, nn.Parameter]]:
        """For each call, the parameters that operations after it use."""
        with torch.no_grad(), quiet_random():
            state = prefix(**self.kwargs)
        found: dict[int, dict[str, nn.Parameter]] = {}
        for index, call in enumerate(state.plan.calls):
            names = {
                name
                for operation in call.operations
                for expr in operation.arguments.exprs()
                for name in expr.parameters()
            }
            if names:
                found[index] = {name: prefix.skeleton.get_parameter(name) for name in sorted(names)}
        return found


def _describable(call: ModuleCall) -> bool:
    return all(isinstance(leaf, torch.Tensor) or is_plain(leaf) for leaf in flatten(call.output)[0])
