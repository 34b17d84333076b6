"""A model's own loss over a batch of which each piece sees only a part.

The library's loss is a mean over the labels that count (cross entropy) or over all numbers in the
labels (squared error, binary cross entropy), plus, for mixtures of experts, a balance term. Means
over parts do not add up to the mean over the whole, so the tail is told what to divide by.
With N labels in the batch and parts m::

    loss_m = sum of cross entropies in m / N  +  coefficient * (tokens in m / tokens) * balance_m

Summed over m the first term is the batch's mean exactly. The second is the mean of the parts'
balance terms. The batch's own would be a product of means over all its tokens, sum_e f_e P_e with
the share f of tokens and the mean probability P of each expert; the two differ by the covariance of
f and P over the parts, times the number of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from roundpipe.config import RoundPipeRunConfig
from roundpipe.hf.lazy_logits import project_lazily
from roundpipe.hf.plan import TAIL_OPTIONS, TailOptions

_IGNORED = -100
_COEFFICIENTS = (
    ("router_aux_loss_coef",),
    ("aux_loss_coef",),
    ("ffn_config", "moe_loss_weight"),
)


@dataclass(frozen=True)
class LossRule:
    """How a model forms its own loss, as seen on the example.

    Attributes:
        shifted: whether a label is compared with the position before it, so that the first of a
            row does not count.
        balance_coefficient: the factor of ``aux_loss`` in the loss, if it is in there.
        ignored: the label that does not count.
    """

    shifted: bool
    balance_coefficient: float | None
    ignored: int = _IGNORED

    def items(self, arguments: Mapping[str, Any]) -> int | None:
        """How many labels count in a batch; ``None`` without labels."""
        labels, shifted = arguments.get("shift_labels"), False
        if labels is None:
            labels, shifted = arguments.get("labels"), self.shifted
        return _count(labels, shifted, self.ignored) if isinstance(labels, Tensor) else None


def tokens_in(arguments: Mapping[str, Any]) -> Tensor | int | None:
    """How many tokens of a batch take part in the balance of experts."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.sum()
    for name in ("input_ids", "inputs_embeds"):
        tokens = arguments.get(name)
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            return tokens.shape[0] * tokens.shape[1]
    return None


def with_tail_options(
    rule: LossRule | None,
    arguments: Mapping[str, Any],
    *,
    whole_loss: bool,
    lazy_logits: bool,
    averaged_over: int = 1,
) -> dict[str, Any]:
    """A whole batch's keyword arguments, and with them what the tail must know about the batch.

    To be called before the batch is split. Nothing is divided anew if the model's loss is of an
    unknown kind (``rule`` is ``None``), and no cross entropy if the caller gives
    ``num_items_in_batch``, which the library's other losses do not look at.

    Args:
        rule: the model's, see ``CutModel.loss_rule``.
        arguments: keyword arguments of the model.
        whole_loss: whether the microbatches' losses shall add up to the batch's loss.
        lazy_logits: whether the logits are needed by the loss only.
        averaged_over: number of microbatches, where their losses are averaged and not summed.
    """
    items = tokens = elements = None
    if whole_loss and rule is not None:
        labels = arguments.get("labels")
        elements = labels.numel() if isinstance(labels, Tensor) else None
        if arguments.get("num_items_in_batch") is None:
            items = rule.items(arguments)
            tokens = tokens_in(arguments) if rule.balance_coefficient is not None else None
    options = TailOptions(
        lazy_logits,
        None if items is None else items / averaged_over,
        None if items is None or tokens is None else float(tokens) / averaged_over,
        None if elements is None else elements / averaged_over,
    )
    return {**arguments, TAIL_OPTIONS: options}


def with_spec_of_options(config: RoundPipeRunConfig, split_input: Any) -> RoundPipeRunConfig:
    """``config``, whose specs for the model's arguments also cover the options."""
    if not isinstance(split_input, tuple) or len(split_input) != 2:
        return config
    args_spec, kwargs_spec = split_input
    if not isinstance(kwargs_spec, Mapping):
        return config
    return replace(config, split_input=(args_spec, {**kwargs_spec, TAIL_OPTIONS: None}))


# Losses that are means over all numbers in their target.
_ELEMENTWISE = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)


@dataclass(frozen=True)
class SeenLoss:
    """A loss that was computed.

    Attributes:
        value: the loss.
        target: what the prediction was compared with.
        ignored: the target that does not count; ``None`` if all numbers in the target do.
        divisible: whether it is a mean of which the parts' sums can be divided anew.
    """

    value: float
    target: Tensor
    ignored: int | None
    divisible: bool


class LossWatch(TorchFunctionMode):
    """Notes the losses that are computed in it.

    Attributes:
        calls: they, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SeenLoss] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (func is F.cross_entropy or func in _ELEMENTWISE) and result.dim() == 0:
            target = _target(args, kwargs).detach().as_subclass(Tensor)
            classes = func is F.cross_entropy and not target.is_floating_point()
            same = classes or args[0].numel() == target.numel()
            self.calls.append(
                SeenLoss(
                    float(result.detach().as_subclass(Tensor)),
                    target,
                    kwargs.get("ignore_index", _IGNORED) if classes else None,
                    same and _is_mean(args, kwargs),
                )
            )
        return result


def _target(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    target: Tensor = args[1] if len(args) > 1 else kwargs["target"]
    return target


def learn_loss(
    watch: LossWatch, output: Any, arguments: Mapping[str, Any], config: Any
) -> LossRule | None:
    """What the loss in ``output`` is made of; ``None`` if it is not one mean over the labels.

    Args:
        watch: what was seen while the output was made.
        output: the model's.
        arguments: what the model was given.
        config: the model's.
    """
    loss, labels = _field(output, "loss"), arguments.get("labels")
    if loss is None or not isinstance(labels, Tensor) or len(watch.calls) != 1:
        return None
    seen = watch.calls[0]
    shifted = _is_shifted(seen, labels)
    if shifted is None:
        return None
    balance = _field(output, "aux_loss") if isinstance(output, MutableMapping) else None
    coefficient, explained = None, seen.value
    if balance is not None and (coefficient := _coefficient(config)) is not None:
        explained += coefficient * float(balance)
    if abs(float(loss) - explained) > 1e-5 * max(1.0, abs(explained)):
        return None
    return LossRule(shifted, coefficient, _IGNORED if seen.ignored is None else seen.ignored)


def _is_shifted(seen: SeenLoss, labels: Tensor) -> bool | None:
    """Whether the loss leaves out the first label of a row; ``None``: they are not its targets."""
    if not seen.divisible:
        return None
    if seen.ignored is None:
        return False if seen.target.numel() == labels.numel() else None
    counted = int((seen.target != seen.ignored).sum())
    counts = {shifted: _count(labels, shifted, seen.ignored) for shifted in (True, False)}
    if counted == 0 or counted not in counts.values():
        return None
    if counts[True] != counts[False]:
        return counted == counts[True]
    # One label per row, or no first label counts: only the order of the targets tells.
    return not torch.equal(seen.target.flatten(), labels.flatten().to(seen.target.device))


@contextmanager
def loss_options(options: TailOptions, lazy_from_bytes: int) -> Iterator[None]:
    """Within it the library's head and loss do as ``options`` say."""
    if options.items is None and options.elements is None and not options.lazy_logits:
        yield
        return
    with _LossMode(options, lazy_from_bytes):
        yield


class _LossMode(TorchFunctionMode):
    """Steps in where the library projects onto the vocabulary and where it takes the loss."""

    def __init__(self, options: TailOptions, lazy_from_bytes: int) -> None:
        super().__init__()
        self._options = options
        self._lazy_from_bytes = lazy_from_bytes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and self._options.lazy_logits and self._is_large(args, kwargs):
            return project_lazily(*args, **kwargs)
        if func is F.cross_entropy or func in _ELEMENTWISE:
            divisor = self._divisor(func, args, kwargs)
            if divisor is not None and _is_mean(args, kwargs):
                return func(*args, **{**kwargs, "reduction": "sum"}) / divisor
        return func(*args, **kwargs)

    def _divisor(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> float | None:
        if func is F.cross_entropy and not _target(args, kwargs).is_floating_point():
            return self._options.items
        elements = self._options.elements
        if func is F.cross_entropy and elements is not None:  # a probability for each class
            classes: int = args[0].shape[min(1, args[0].dim() - 1)]
            return elements / classes
        return elements

    def _is_large(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if len(args) < 2 or not all(type(t) in _PLAIN for t in args[:2]):
            return False
        hidden, weight = args[:2]
        if weight.dim() != 2 or hidden.dim() < 2:
            return False
        size_bytes: int = 4 * hidden[..., 0].numel() * weight.shape[0]
        return size_bytes >= self._lazy_from_bytes


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_mean(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if len(args) == 0 or any(value is not None for value in args[2:]):
        return False
    unusual = ("size_average", "reduce", "weight")
    return kwargs.get("reduction", "mean") == "mean" and all(kwargs.get(k) is None for k in unusual)


def weigh_balance(
    rule: LossRule | None, options: TailOptions, arguments: Mapping[str, Any], output: Any
) -> None:
    """Give the balance term in the output's loss the weight of this microbatch's tokens."""
    loss, balance = _field(output, "loss"), _field(output, "aux_loss")
    if rule is None or rule.balance_coefficient is None or options.tokens is None:
        return
    tokens = tokens_in(arguments)
    if loss is None or balance is None or tokens is None:
        return
    surplus = rule.balance_coefficient * (1 - tokens / options.tokens)
    output["loss"] = loss - surplus * balance.to(loss.device)


def _field(output: Any, name: str) -> Tensor | None:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _count(labels: Tensor, shifted: bool, ignored: int) -> int:
    counted = labels[:, 1:] if shifted and labels.dim() > 1 else labels
    return int((counted != ignored).sum())


def _coefficient(config: Any) -> float | None:
    for path in _COEFFICIENTS:
        value = config
        for name in path:
            value = getattr(value, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return None
