"""Station 9: what a call leaves behind, once all of it has succeeded.

Buffers go into the user's model, gradients to the inputs that want one, losses are summed and
outputs merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .autograd import Bridge
from .calls import Call, Chain
from .errors import InvalidValueError, Where, add_where
from .microbatch import merge_outputs
from .microbatch.tree import flatten, unflatten
from .transfer import Border, Value


def homecoming(call: Call, num_layers: int) -> Iterator[tuple[Value, int | None]]:
    """What a run sends home, each with its microbatch; None where it belongs to none."""
    for history in call.histories.values():
        yield from ((value, None) for value in history.latest.values())
    for chain in call.chains:
        values = [*chain.losses, *(v.grad for _, v in chain.sources if v.grad is not None)]
        border = chain.output if call.run_type == "fused" else chain.borders.get(num_layers)
        if border is not None:
            # Backward with retain_graph=True finds outputs that the user was given already.
            values += (value for value in border.values() if value.has_host)
        yield from ((value, chain.index) for value in values)


def wait_homecoming(call: Call, num_layers: int, name: str) -> None:
    """Block until what a run sends home is there.

    What fails on its way fails the call now, before anything has taken effect.

    Raises:
        BaseException: what failed, with a note saying where.
    """
    for value, microbatch in homecoming(call, num_layers):
        try:
            value.home()
        except BaseException as error:
            stage, device = value.origin or (None, None)
            add_where(error, Where(name, None, stage, microbatch, "download", device))
            raise


def outputs_of(call: Call, num_layers: int, bridge: Bridge | None) -> list[Any]:
    """For each microbatch its output tree in host memory, connected to the user's graph."""
    carrying = {} if bridge is None else bridge.connect()
    outputs = []
    for chain in call.chains:
        border = chain.borders[num_layers]
        leaves = [
            carrying.get(id(leaf), leaf) if isinstance(leaf, Value) else leaf
            for leaf in border.leaves
        ]
        outputs.append(Border(border.structure, leaves).home())
        for value in border.values():
            if call.run_type == "infer" or not _is_saved(value, chain, num_layers):
                value.drop_host()  # the user's from here on; backward needs only its gradient
    return outputs


def merged(call: Call, outputs: list[Any]) -> Any:
    """The microbatches' outputs as one, on the call's output device."""
    device = call.config.output_device
    output = merge_outputs(outputs, call.config.merge_output)
    return output if device.type == "cpu" else _move(output, device)


def give_input_gradients(call: Call) -> None:
    """Inputs that require grad receive theirs, through whatever graph they come from."""
    tensors, grads = [], []
    for chain in call.chains:
        for tensor, value in chain.sources:
            if value.grad is not None:
                tensors.append(tensor)
                grads.append(value.grad.home().to(tensor.device))
    if tensors:
        torch.autograd.backward(tensors, grads)


def summed_losses(call: Call) -> Any:
    """The sum over microbatches of the loss, or of each if there are several.

    Raises:
        InvalidValueError: another number of losses for one microbatch than for the first.
    """
    totals: list[torch.Tensor] = []
    for chain in call.chains:
        losses = [value.home() for value in chain.losses]
        if not totals:
            totals = [loss.clone() for loss in losses]
            continue
        if len(losses) != len(totals):
            raise InvalidValueError(
                f"loss_fn returned {len(totals)} losses for microbatch 0 and {len(losses)} for "
                f"microbatch {chain.index}; return the same number for each"
            )
        totals = [total + loss for total, loss in zip(totals, losses, strict=True)]
    return totals if call.chains[0].losses_are_sequence else totals[0]


def _is_saved(value: Value, chain: Chain, num_layers: int) -> bool:
    return any(
        value is other
        for index, border in chain.borders.items()
        if index != num_layers
        for other in border.values()
    )


def _move(tree: Any, device: torch.device) -> Any:
    leaves, structure = flatten(tree)
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return unflatten(structure, moved)
