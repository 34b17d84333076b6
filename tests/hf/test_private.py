"""The private and version-dependent names of transformers and gguf: an upgrade fails here first."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from torch import nn
from transformers import DynamicCache

from hf.families import build
from hf.test_llama import tiny_llama
from roundpipe.hf import private


def test_kinds_of_objects() -> None:
    assert private.is_pretrained(tiny_llama())
    assert not private.is_pretrained(nn.Linear(1, 1))
    assert private.is_cache(DynamicCache())
    assert not private.is_cache({})


def test_router_logits_are_collected_by_hooks_into_lists() -> None:
    family = build("mixtral")
    model: Any = family.model
    assert "router_logits" in private.collectable_outputs(model)
    assert private.active_collector() == {}
    assert not any(private.has_collecting_hooks(module) for module in model.modules())
    model(**family.batch(), output_router_logits=True)
    assert any(private.has_collecting_hooks(module) for module in model.modules())
    layer = model.model.layers[0]
    hidden = torch.zeros(1, 3, model.config.hidden_size)
    rotary = model.model.rotary_emb(hidden, torch.arange(3)[None])
    with private.collecting(("router_logits",)) as caught:
        assert set(private.active_collector()) == {"router_logits"}
        layer(hidden, position_embeddings=rotary)
    assert len(caught["router_logits"]) == 1
    assert private.active_collector() == {}


def test_outputs_that_are_never_collected() -> None:
    names = ["router_logits", "hidden_states", "attentions"]
    assert private.per_layer_outputs(names) == ["attentions", "hidden_states"]
    assert "hidden_states" not in private.collectable_outputs(tiny_llama())


def test_a_model_is_initialised_anew() -> None:
    model: Any = tiny_llama()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7.0)
    private.initialise(model)
    fresh: Any = tiny_llama()
    assert 0.01 < model.lm_head.weight.std().item() < 0.03
    assert torch.equal(model.model.norm.weight, fresh.model.norm.weight)
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)


def test_gguf_names_are_exchanged_for_a_while() -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with private.quick_gguf(), private.quick_gguf():
        assert gguf.GGUFReader is not before[0]
        arch = gguf.MODEL_ARCH.LLAMA
        assert gguf.get_tensor_name_map(arch, 2) is gguf.get_tensor_name_map(arch, 2)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    assert private.gguf_options("a.gguf")["gguf_file"] == "a.gguf"
