"""What is checked of a family, for the tests and for the table in docs/models.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf.engine_stand_in import closeness, difference, take_grads, without_dropout
from hf.families import Family
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.devices.cpu import visible_cores
from roundpipe.hf import CutModel, batch_loss, cut_model, lazy_logits
from roundpipe.hf.chunked_loss import ChunkedLoss, chunked_cross_entropy
from roundpipe.hf.plan import Plan
from roundpipe.hf.prefix import PrefixPiece
from roundpipe.microbatch import TensorChunkSpec
from support.plain import intraop_threads

MICROBATCHES = 3
# Sums of more than two gradients, in another order than the whole model adds them.
TOLERANT = frozenset({"inkling2_loop_text", "inkling2_text"})


@dataclass(frozen=True)
class Plain:
    """What the whole model makes of the microbatches, one after the other."""

    batch: Mapping[str, torch.Tensor]
    loss: torch.Tensor
    logits: torch.Tensor
    grads: Mapping[str, torch.Tensor]


def prepare(family: Family) -> tuple[CutModel, Plain]:
    """The family's model, training without dropout, cut, and what it does when it is whole."""
    model = family.model.train()
    without_dropout(model)
    cut = cut_model(model, family.example())
    return cut, run_plain(model, family.batch(6, 12))


def run_plain(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Plain:
    """The plain loop over the microbatches."""
    loss, logits = torch.zeros(()), []
    # As many threads as each of the engine's two devices has: sums are formed in that order, and a
    # last bit decides which expert a token goes to.
    with device_threads():
        for part in range(MICROBATCHES):
            piece = {k: v.tensor_split(MICROBATCHES)[part] for k, v in batch.items()}
            output = model(**piece, use_cache=False)
            output.loss.backward()
            loss = loss + output.loss.detach()
            logits.append(output.logits.detach())
    return Plain(batch, loss, torch.cat(logits), take_grads(model))


@contextmanager
def device_threads() -> Iterator[None]:
    with intraop_threads(max(1, visible_cores() // 2)):
        yield


def engine_difference(cut: CutModel, plain: Plain, grain: str) -> float:
    """Outputs, loss and gradients through the engine on two devices; 0 if all bits agree."""
    config = RoundPipeRunConfig(
        num_microbatch=MICROBATCHES, recompute_grain=grain, split_input=by_rows(plain.batch)
    )
    with RoundPipe(cut.layers, devices="cpu:2", model_run_config=config) as pipe:
        loss, output = pipe.forward_backward(
            input_kwargs=dict(plain.batch), loss_fn=own_loss, return_outputs=True
        )
        pipe.synchronize()
    got = {"loss": loss, "logits": output.logits}
    outputs = difference(got, {"loss": plain.loss, "logits": plain.logits})
    return max(outputs, difference(take_grads(cut.model), plain.grads))


def by_rows(arguments: Mapping[str, Any]) -> Any:
    """Says that every tensor is cut: Musicgen has four rows of tokens to one of the mask."""
    cut = {
        k: TensorChunkSpec(0) if isinstance(v, torch.Tensor) else None for k, v in arguments.items()
    }
    return (), cut


def shares_parameters(cut: CutModel) -> bool:
    owned = [id(p) for piece in cut.layers for p in piece.parameters()]
    return len(owned) != len(set(owned))


def allowed_difference(name: str, cut: CutModel) -> float:
    # Gradients of a parameter that two pieces have are added in another order.
    return 1e-6 if shares_parameters(cut) or name in TOLERANT else 0.0


@dataclass(frozen=True)
class HeadCheck:
    """The loss of a whole batch, through microbatches and without logits.

    Attributes:
        chunked: whether the loss was taken in chunks.
        loss: relative difference to the loss of the whole model on the whole batch.
        grads: the same for gradients.
    """

    chunked: bool
    loss: float
    grads: float


def check_head(family: Family, cut: CutModel) -> HeadCheck | None:
    """``None`` where the model's loss is of a kind that is not weighted anew."""
    if cut.loss_rule is None:
        return None
    batch = family.batch(6, 12)
    with device_threads():
        expected = cut.model(**batch, use_cache=False).loss
        expected.backward()
    grads = take_grads(cut.model)
    loss, chunked = lazy_loss(cut, batch)
    got = {"loss": loss}
    return HeadCheck(
        chunked,
        difference(got, {"loss": expected.detach()}),
        closeness(take_grads(cut.model), grads),
    )


def few_rows_at_a_time(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    loss: ChunkedLoss,
) -> torch.Tensor:
    return chunked_cross_entropy(hidden, weight, bias, target, replace(loss, chunk_rows=5))


def lazy_loss(cut: CutModel, batch: Mapping[str, Any]) -> tuple[torch.Tensor, bool]:
    """A training call that leaves out however small logits; and whether they were left out."""
    arguments = batch_loss.with_tail_options(
        cut.loss_rule, batch, whole_loss=True, lazy_logits=True
    )
    chunked = mock.Mock(side_effect=few_rows_at_a_time)
    tail: Any = cut.layers[-1]
    tail.lazy_from_bytes = 0
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, split_input=by_rows(arguments))
    with (
        mock.patch.object(lazy_logits, "chunked_cross_entropy", chunked),
        RoundPipe(cut.layers, devices="cpu:2", model_run_config=config) as pipe,
    ):
        loss = pipe.forward_backward(input_kwargs=arguments, loss_fn=own_loss)
        pipe.synchronize()
    assert isinstance(loss, torch.Tensor)
    return loss, chunked.call_count == MICROBATCHES


def own_loss(output: Any, label: object) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def recipe_parts(cut: CutModel, family: Family) -> str:
    """What the cut needs beyond one list of layers that get and return a hidden state.

    Letters as in docs/models.md.
    """
    prefix = cut.layers[0]
    assert isinstance(prefix, PrefixPiece)
    blueprint = prefix.blueprint
    with torch.enable_grad():
        state = prefix(**family.batch(2, 12))
    wanted = [t for t in state.tensors.values() if t.requires_grad]
    layers = list(cut.layers)[1:-1]
    owned = [{id(p) for p in piece.parameters()} for piece in layers]
    lists = {name.rpartition(".")[0] for name in blueprint.elements}
    repeated = len(blueprint.calls) > len(blueprint.elements)
    unique = len(set().union(*owned))
    found = {
        "T": any(not spec.output.structure.is_leaf for spec in blueprint.calls),
        "C": most_carried(state.plan) > 1,
        "M": bool(state.plan.containers),
        "G": any(call.operations for call in state.plan.calls),
        "E": len(wanted) > 1,
        "S": not repeated and unique < sum(map(len, owned)),
        "L": len(lists) > 1,
        "R": repeated,
        "H": bool(blueprint.tail_reads_held),
    }
    return "".join(letter for letter, needed in found.items() if needed)


def most_carried(plan: Plan) -> int:
    """The largest number of layers' results that cross a border together."""
    live: set[str] = set()
    most = 0
    for index, call in enumerate(plan.calls[:-1]):
        results = {name for operation in call.operations for name in operation.results if name}
        outputs = {name for name in plan.alive if name.startswith(f"c{index}.")}
        live = (live | outputs | (results & plan.alive)) - call.drops
        most = max(most, len(live))
    return most
