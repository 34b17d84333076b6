"""A Llama cut at its layers does what the whole Llama does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf.engine_stand_in import Weights, poisoned, run_as_engine, run_as_one_graph
from roundpipe.hf import cut_model


def tiny_llama(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 120,
            "max_position_embeddings": 64,
            **changes,
        }
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def batch(rows: int = 3, length: int = 16, padding: int = 5) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 110, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding:
        mask[1, -padding:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def named_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def check_equal(model: nn.Module, inputs: dict[str, Any]) -> None:
    """The uncut model, one graph over the pieces, and each piece alone: equal bit by bit."""
    cut = cut_model(model)
    expected = model(**inputs)
    expected.loss.backward()
    grads = named_grads(model)
    assert set(grads) == {name for name, _ in model.named_parameters()}

    output = run_as_one_graph(cut, inputs)
    output.loss.backward()
    assert type(output) is type(expected)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.logits, expected.logits)
    for name, grad in named_grads(model).items():
        assert torch.equal(grad, grads[name]), name

    weights = Weights.of(model)
    with poisoned(model):
        result = run_as_engine(cut, inputs, weights)
    assert torch.equal(result.output.loss, expected.loss)
    assert torch.equal(result.output.logits, expected.logits)
    for name, parameter in model.named_parameters():
        alone = result.grad(parameter)
        assert alone is not None, name
        assert torch.equal(alone, grads[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [0, 5])
def test_equal_to_the_whole_model(tied: bool, padding: int) -> None:
    check_equal(tiny_llama(tie_word_embeddings=tied), batch(padding=padding))
