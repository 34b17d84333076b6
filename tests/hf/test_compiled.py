"""Layers that the user compiled: one graph for all equal layers, none for the watching."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf.test_llama import batch, tiny_llama
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe


@pytest.mark.slow
# Dynamo looks at it while it traces; torch warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_equal_layers_share_one_graph() -> None:
    graphs: list[Any] = []

    def counting(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    inputs = batch(4, 12, 0)
    plain: Any = tiny_llama(num_hidden_layers=3)
    model: Any = tiny_llama(num_hidden_layers=3)
    for layer in model.model.layers:
        layer.compile(backend=counting)
    config = RoundPipeRunConfig(num_microbatch=2)
    with wrap_model_to_roundpipe(model, True, devices="cpu:2", model_run_config=config) as pipe:
        assert graphs == []
        for _ in range(2):
            loss = pipe.forward_backward(input_kwargs=inputs)
            assert len(graphs) == 1
        pipe.zero_grad()
        pipe.forward_backward(input_kwargs=inputs)
        pipe.synchronize()
    expected = plain(**inputs).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for name, parameter in plain.named_parameters():
        got = model.get_parameter(name).grad
        torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
