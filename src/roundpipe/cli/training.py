"""The training itself: the one module of the command line that drives the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.cli.batches import Batch
from roundpipe.cli.optimizers import build_optimizer, build_schedule
from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import Recipe
from roundpipe.devices import open_pool
from roundpipe.hf import cut_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a recipe calls ``name``."""
    return _DTYPES[name]


class Trainer:
    """Trains a causal language model of ``transformers`` as a recipe says, through RoundPipe.

    The model's weights are trained in place; read them after :meth:`finish`. To be used as a
    context, which ends the engine's threads.

    Args:
        model: the model, in host memory.
        recipe: batch, optimizer, schedule and devices are taken from it.

    Raises:
        UsageError: the model cannot be cut into layers, the devices are not there, or the
            optimizer refuses.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self._recipe = recipe
        self._grad_norms: list[float] = []
        try:
            self._cut = cut_model(model)
            self._pool = open_pool(recipe.devices)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UsageError(str(error)) from error
        try:
            self._pipe = self._wrap()
            with OptimizerCtx():
                self._masters = list(self._pipe.parameters())
            self.optimizer = build_optimizer(recipe.optimizer, self._masters)
            self._schedule = build_schedule(recipe.schedule, recipe.training.steps, self.optimizer)
        except BaseException:
            self.close()
            raise

    @property
    def device_names(self) -> list[str]:
        """The devices that take turns."""
        return [str(device.name) for device in self._pool.devices]

    @property
    def num_microbatch(self) -> int:
        """Into how many pieces a training batch is cut."""
        training = self._recipe.training
        return min(training.microbatches or len(self._pool.devices) + 1, training.batch_size)

    @property
    def grad_norms(self) -> Sequence[float]:
        """The gradient's norm before clipping, of each update that is done."""
        return self._grad_norms

    def train_step(self, batch: Batch) -> float:
        """Compute the mean loss per predicted token of ``batch``, and update the weights.

        With asynchronous steps the update goes on while the next step computes.
        """
        loss = float(self._pipe.forward_backward(input_kwargs=model_inputs(batch)))
        self._pipe.step(self._update, is_async=self._recipe.training.async_step)
        return loss

    def held_out_loss(self, batches: Iterable[Batch]) -> float:
        """The mean loss per predicted token over ``batches``, with the latest weights."""
        self.finish()
        total, count = 0.0, 0
        self._set_mode(training=False)
        try:
            for batch in batches:
                total += float(self._loss_only(batch)) * batch.num_predicted
                count += batch.num_predicted
        finally:
            self._set_mode(training=True)
        return total / count

    def finish(self) -> None:
        """Wait for the update in flight; the model then holds the latest weights."""
        self._pipe.synchronize()

    def close(self) -> None:
        """End the engine's threads."""
        if hasattr(self, "_pipe"):
            self._pipe.close()
        self._pool.close()

    def __enter__(self) -> Trainer:
        self._set_mode(training=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wrap(self) -> RoundPipe:
        *layers, tail = self._cut.layers
        return RoundPipe(
            nn.Sequential(*layers, LossTail(tail)),
            optim_dtype=dtype_named(self._recipe.model.master_dtype),
            name=type(self._cut.model).__name__,
            model_run_config=RoundPipeRunConfig(
                num_microbatch=self.num_microbatch,
                recompute_grain=self._recipe.training.recompute_grain,
            ),
            devices=self._pool,
        )

    def _loss_only(self, batch: Batch) -> Tensor:
        pieces = min(self.num_microbatch, len(batch.input_ids))
        config = RoundPipeRunConfig(num_microbatch=pieces, merge_output=_total)
        with torch.no_grad():
            loss: Tensor = self._pipe.forward(**model_inputs(batch), roundpipe_run_config=config)
        return loss

    def _set_mode(self, training: bool) -> None:
        self._cut.model.train(training)
        self._cut.refresh_flags()

    def _update(self) -> None:
        """One step of the optimizer, on the engine's optimizer thread."""
        limit = self._recipe.training.clip_norm
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if limit is not None:
            nn.utils.clip_grads_with_norm_(self._masters, limit, norm)
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()
        self._grad_norms.append(float(norm))


class LossTail(nn.Module):
    """The model's tail, giving only its loss, so that the logits stay on the device."""

    def __init__(self, tail: nn.Module) -> None:
        super().__init__()
        self.tail = tail

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a microbatch."""
        loss: Tensor = self.tail(*args, **kwargs).loss
        return loss


def model_inputs(batch: Batch) -> dict[str, Any]:
    """A batch as the model's keyword arguments."""
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "labels": batch.labels,
        # Each microbatch divides by the whole batch's count, so that their losses add up to the
        # batch's mean however unevenly the tokens are spread.
        "num_items_in_batch": batch.num_predicted,
    }


def _total(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).sum()
