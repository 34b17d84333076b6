"""The bridge from torch's autograd engine to a pipelined backward.

A call of ``forward`` with gradients is one node of the user's graph: its inputs are the
microbatches' input tensors that require grad, its outputs all output tensors of all microbatches.
Backward through it runs the call's backward plan on the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .calls import Call
from .compat import backward_keeps_graph, backward_reaches, hooks_of
from .errors import StateError
from .transfer import Value

RunBackward = Callable[[Call], None]


class Bridge:
    """One call with gradients, from its outputs to its inputs.

    Args:
        call: the call, at the latest when its run has just been over.
        num_layers: layers of the model.
        run_backward: runs the call's backward on the devices.
        parameters: the model's.
    """

    def __init__(
        self,
        call: Call,
        num_layers: int,
        run_backward: RunBackward,
        parameters: Iterable[torch.Tensor] = (),
    ) -> None:
        self._call = call
        self._num_layers = num_layers
        self._run_backward = run_backward
        self._spent = False
        # A hook on a parameter that is an input of the node would be called with None.
        self._parameters = [p for p in parameters if p.requires_grad and hooks_of(p) is None]
        self._anchor = torch.empty(0, device="cpu")
        self.inputs: list[tuple[torch.Tensor, Value]] = []
        self.outputs: list[Value] = []
        # Noted now, and not when the run is over: the caller may be at work beside it.
        self._versions = {id(t): t._version for chain in call.chains for t, _ in chain.sources}

    def connect(self) -> dict[int, torch.Tensor]:
        """Make the outputs part of the user's graph, when the forward is done.

        Returns:
            For each output value, by identity, the tensor that carries gradients back into the
            pipeline.
        """
        chains = self._call.chains
        self.inputs = [pair for chain in chains for pair in chain.sources]
        for tensor, _ in self.inputs:
            # What another call made has only now become a tensor.
            self._versions.setdefault(id(tensor), tensor._version)
        self.outputs = [
            value
            for chain in chains
            for value in chain.borders[self._num_layers].values()
            if value.requires_grad
        ]
        if not self.outputs:
            return {}
        # Something must make the outputs require grad when no input of the user does, and tell
        # whether a backward is for everything. The parameters get no gradient through the node;
        # they are its inputs so that a backward for one of them alone does not pass it by unseen.
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")
        inputs = [tensor for tensor, _ in self.inputs]
        tensors = _PipelineNode.apply(self, self._anchor, *inputs, *self._parameters)
        pairs = zip(self.outputs, tensors, strict=True)
        return {id(value): tensor for value, tensor in pairs}

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run the pipelined backward.

        Args:
            grads: for each output, the gradient, or None.

        Returns:
            For each input, its gradient, or None.
        """
        if self._spent:
            raise StateError(
                "backward was run a second time through a roundpipe forward whose saved inputs "
                "were freed by the first; give the first one retain_graph=True"
            )
        for tensor, _ in self.inputs:
            if tensor._version != self._versions[id(tensor)]:
                raise StateError(
                    "an input of a roundpipe forward was modified in place before backward, which "
                    "has to recompute from it; modify a copy"
                )
        self._call.gradients_of_parameters = self._is_for_parameters()
        keeps = backward_keeps_graph()
        self._spent = not keeps
        self._call.keeps_borders = keeps
        for value, grad in zip(self.outputs, grads, strict=True):
            value.grad = None if grad is None else Value(grad.detach().to("cpu"))
        self._run_backward(self._call)
        results = []
        for tensor, value in self.inputs:
            results.append(None if value.grad is None else value.grad.home().to(tensor.device))
            value.grad = None
        return results + [None] * len(self._parameters)

    def _is_for_parameters(self) -> bool:
        """Whether the backward that is running is for all leaves, not for some of the inputs."""
        if backward_reaches(self._anchor):
            return True
        if any(backward_reaches(parameter) for parameter in self._parameters):
            raise StateError(
                "torch.autograd.grad, or backward(inputs=...), was called for a parameter of a "
                "roundpipe model, whose gradients accumulate inside roundpipe: call backward() "
                "without inputs and read the gradient in step_fn, or from parameter.grad after "
                "synchronize()"
            )
        return False


class _PipelineNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bridge: Bridge, anchor: torch.Tensor, *_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.bridge = bridge
        ctx.set_materialize_grads(False)
        # `.data`: an output that is also kept for recompute must not share a version counter with
        # what the user does to it.
        return tuple(value.home().data for value in bridge.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.bridge.backward(grads))
