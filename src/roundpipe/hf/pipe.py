"""A model of transformers, cut at its layers and wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch

from roundpipe.calls import LossFunction
from roundpipe.config import RoundPipeRunConfig
from roundpipe.errors import InvalidValueError, StateError
from roundpipe.hf.batch_loss import LossRule, with_spec_of_options, with_tail_options
from roundpipe.hf.generation import generating_copy
from roundpipe.hf.plan import TAIL_OPTIONS
from roundpipe.hf.skeleton import SkeletonPiece
from roundpipe.hf.tail import TailPiece
from roundpipe.microbatch import packed_count
from roundpipe.pipeline import RoundPipe

Self = TypeVar("Self", bound="HuggingFacePipe")


def own_loss(output: Any, _label: Any) -> torch.Tensor:
    """The loss that the model computed itself, from the labels among its arguments.

    Raises:
        InvalidValueError: there is none.
    """
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise InvalidValueError(
            f"the model's output, a {type(output).__name__}, has no loss: give labels among "
            "input_kwargs, or a loss_fn that computes one from the output"
        )
    return loss


class HuggingFacePipe(RoundPipe):
    """A :class:`RoundPipe` over the layers of a model of transformers, or of PEFT around one.

    Made by :func:`roundpipe.wrap_model_to_roundpipe`. ``model`` is the sequence of pieces;
    attributes, ``config``, key names and ``save_pretrained`` are the original's. The pieces share
    the original's parameters and modules: ``train()`` and ``eval()`` of the original, and PEFT's
    ``set_adapter`` and ``disable_adapter``, are seen by the next call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_modes"] = None

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """As :meth:`RoundPipe.forward`; returns the model's own output class.

        With ``labels``, the merged ``loss`` is that of the whole batch, if the outputs are merged
        automatically and the loss is a mean over labels.
        """
        self._follow_modes()
        config = self._resolve(roundpipe_run_config)
        pieces = config.num_microbatch
        if not config.num_microbatch_given:
            pieces = packed_count(args, kwargs) or pieces
        kwargs = with_tail_options(
            self._loss_rule,
            kwargs,
            whole_loss=config.merge_output in (None, True),
            lazy_logits=False,
            averaged_over=pieces,
        )
        run_config = with_spec_of_options(roundpipe_run_config, config.split_input)
        return super().forward(*args, roundpipe_run_config=run_config, **kwargs)

    def forward_backward(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFunction = own_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    ) -> Any:
        """As :meth:`RoundPipe.forward_backward`; by default with the model's own loss.

        That loss is the mean over the labels of the whole batch, however they are spread over
        microbatches (``loss_reduction="sum"``). A ``loss_fn`` of the caller finds in the outputs
        what the library computes for the microbatch alone. Large logits are computed only if
        ``loss_fn`` uses them or ``return_outputs`` asks for them. If the model's loss is of an
        unknown kind, the microbatches' own losses are summed, with a warning. With
        ``return_outputs``, ``loss`` of the merged output is the loss that is returned.

        Raises:
            InvalidValueError: without ``loss_fn``, and the output has no loss, or it is divided
                twice: by ``num_items_in_batch`` and by ``loss_reduction="mean"``.
        """
        self._follow_modes()
        config = self._resolve(run_config)
        summed = config.loss_reduction == "sum"
        given = input_kwargs if isinstance(input_kwargs, Mapping) else {}
        if given.get("num_items_in_batch") is not None and loss_fn is own_loss and not summed:
            raise InvalidValueError(
                'num_items_in_batch together with loss_reduction="mean" divides the loss twice; '
                "leave one of them out"
            )
        if input_kwargs is None or isinstance(input_kwargs, Mapping):
            input_kwargs = with_tail_options(
                self._loss_rule,
                given,
                whole_loss=loss_fn is own_loss and summed,
                lazy_logits=not return_outputs,
            )
        pieces = config.num_microbatch
        if not config.num_microbatch_given:
            pieces = packed_count(input_args, given) or pieces
        run_config = with_spec_of_options(run_config, config.split_input)
        result = super().forward_backward(
            input_args, input_kwargs, label, loss_fn, return_outputs, run_config
        )
        if loss_fn is own_loss and summed and pieces > 1 and isinstance(input_kwargs, Mapping):
            self._warn_of_sum(input_kwargs)
        if return_outputs and loss_fn is own_loss and config.merge_output in (None, True):
            loss, output = result
            return loss, _with_loss(output, loss)
        return result

    def resize_token_embeddings(self, new_num_tokens: int | None = None, **kwargs: Any) -> Any:
        """The library's without a number: the embeddings; with one, it is too late.

        Raises:
            StateError: a number is given: the pieces hold the embeddings and head of before.
        """
        if new_num_tokens is None:
            return self._target.get_input_embeddings()  # type: ignore[operator]
        raise StateError(
            f"resize_token_embeddings({new_num_tokens}) of a wrapped {type(self._target).__name__}"
            ": the layers were cut from it with the embeddings of now; resize, then wrap"
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The library's ``generate``, each token computed by a call of :meth:`forward`.

        Nothing is cached between tokens: the whole sequence is computed for each.

        Args:
            *args: as for the model's ``generate``.
            **kwargs: likewise.

        Raises:
            CutRefusedError: the model has an encoder apart, or cannot generate.
        """
        return generating_copy(self._target, self._generating_forward).generate(
            *args, **{**kwargs, "use_cache": False}
        )

    @property
    def _loss_rule(self) -> LossRule | None:
        tails = [piece for piece in self.model if isinstance(piece, TailPiece)]
        return tails[-1].loss_rule if tails else None

    def _warn_of_sum(self, arguments: Mapping[str, Any]) -> None:
        """Warn, once, if nothing is known by which the microbatches' losses could be weighted."""
        options = arguments[TAIL_OPTIONS]
        known = options.items is not None or options.elements is not None
        divided = arguments.get("num_items_in_batch") is not None
        if known or divided or "sum of losses" in self._warned:
            return
        self._warned.add("sum of losses")
        warnings.warn(
            f"roundpipe does not know how the loss of {type(self._target).__name__} follows from "
            "labels among input_kwargs, so the microbatches' own losses are summed: with N "
            "microbatches about N times the loss and the gradients of the whole batch. Give "
            'loss_reduction="mean" or a loss_fn, or wrap with an example= that has labels',
            stacklevel=3,
        )

    def _generating_forward(self, **kwargs: Any) -> Any:
        tensors = [v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.dim() > 0]
        rows = max((len(tensor) for tensor in tensors), default=1)
        pieces = min(rows, self._resolve(RoundPipeRunConfig()).num_microbatch)
        config = RoundPipeRunConfig(num_microbatch=pieces, requires_grad=False)
        return self.forward(**kwargs, roundpipe_run_config=config)

    def _follow_modes(self) -> None:
        """Let the pieces have the original's training flags, however they were set."""
        modes = tuple(module.training for module in self._target.modules())
        if modes == self._modes:
            return
        for piece in self.model:
            if isinstance(piece, SkeletonPiece):
                piece.refresh_flags()
        self._engine.randomness.forget()  # other layers may draw random numbers now
        self.__dict__["_modes"] = modes


def _with_loss(output: Any, loss: torch.Tensor) -> Any:
    """The output with ``loss`` in place of the mean of the microbatches' shares of it."""
    if isinstance(output, MutableMapping):
        output["loss"] = loss
        return output
    if is_dataclass(output) and not isinstance(output, type):
        return replace(output, loss=loss)
    if isinstance(output, tuple) and hasattr(output, "_replace"):
        return output._replace(loss=loss)
    return output
