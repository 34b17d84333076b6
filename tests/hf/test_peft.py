"""PEFT models through the engine: trained as without it, saved by PEFT, the base untouched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf.engine_stand_in import difference, take_grads, without_dropout
from hf.families import build
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.devices import CpuChecks, open_cpu_pool
from roundpipe.devices.base import Category
from roundpipe.devices.cpu import visible_cores
from support.plain import intraop_threads

# PEFT uses a name that newer versions of transformers call by another.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

Batch = dict[str, torch.Tensor]
MICROBATCHES = 3
TARGETS = ["q_proj", "v_proj", "down_proj"]


def with_adapters(model: nn.Module, **options: Any) -> Any:
    """A PEFT model around ``model``, whose adapters are not zero at the start."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": TARGETS,
            "init_lora_weights": False,
            "task_type": "CAUSAL_LM",
            **options,
        }
    )
    return peft.get_peft_model(model, config)


def own_loss(output: Any, _label: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def wrap(model: Any, **options: Any) -> Any:
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    return wrap_model_to_roundpipe(
        model, True, model_run_config=config, **{"devices": "cpu:2", **options}
    )


def backward_plain(model: Any, batch: Batch) -> float:
    total = torch.zeros(())
    for part in range(MICROBATCHES):
        piece = {name: value.tensor_split(MICROBATCHES)[part] for name, value in batch.items()}
        loss = model(**piece, use_cache=False).loss
        loss.backward()
        total += loss.detach()
    return total.item()


def train_plain(model: Any, batches: list[Batch]) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in batches:
        losses.append(backward_plain(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(pipe: Any, batches: list[Batch]) -> list[float]:
    optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-2)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = []
    for batch in batches:
        losses.append(pipe.forward_backward(input_kwargs=batch, loss_fn=own_loss).item())
        pipe.step(update, is_async=False)
    return losses


@pytest.fixture(autouse=True)
def threads_of_a_device() -> Iterator[None]:
    """Sums in the order in which each of two devices forms them."""
    with intraop_threads(max(1, visible_cores() // 2)):
        yield


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma"])
def test_adapters_train_as_without_roundpipe_and_load_in_plain_peft(
    name: str, tmp_path: Path
) -> None:
    family = build(name)
    without_dropout(family.model)
    base = copy.deepcopy(family.model)
    model = with_adapters(family.model.train())
    plain = copy.deepcopy(model)
    batches = [family.batch(6, 12), family.batch(5, 9), family.batch(6, 12)]
    expected = train_plain(plain, batches)

    with wrap(model) as pipe:
        losses = train(pipe, batches)
        pipe.save_pretrained(tmp_path)
        assert pipe.active_adapter == "default"
    assert losses == expected
    assert losses[2] < losses[0]
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key

    assert difference(base.state_dict(), _base_state(model)) == 0
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert set(saved) == set(peft.get_peft_model_state_dict(plain))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    batch = family.batch()
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, plain.eval()(**batch).logits)


def _base_state(model: Any) -> dict[str, torch.Tensor]:
    """The base model's weights under the names they had before PEFT."""
    state = model.get_base_model().state_dict()
    names = {key: key.replace(".base_layer", "") for key in state if "lora_" not in key}
    return {name: state[key] for key, name in names.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": [*TARGETS, "embed_tokens", "lm_head"]},
        {"use_dora": True, "target_modules": [*TARGETS, "embed_tokens", "lm_head"]},
        {"use_rslora": True, "lora_bias": False, "bias": "lora_only"},
    ],
    ids=["dora", "modules-to-save", "embedding-and-head", "dora-everywhere", "rslora"],
)
def test_kinds_of_adapters(options: dict[str, Any]) -> None:
    family = build("llama")
    model = with_adapters(family.model.train(), **options)
    batch = family.batch(6, 12)
    expected = backward_plain(model, batch)
    grads = take_grads(model)
    assert set(grads) == {n for n, p in model.named_parameters() if p.requires_grad}
    with wrap(model) as pipe:
        loss = pipe.forward_backward(input_kwargs=batch, loss_fn=own_loss)
        pipe.synchronize()
    assert loss.item() == expected
    assert difference(take_grads(model), grads) <= 1e-6


def test_adapters_with_dropout_draw_the_same_numbers_on_one_device_and_on_two() -> None:
    family = build("llama")
    model = with_adapters(family.model.train(), lora_dropout=0.3)
    batch = family.batch(6, 12)
    results = []
    for devices in ("cpu:1", "cpu:2"):
        with wrap(model, devices=devices) as pipe:
            torch.manual_seed(3)
            loss = pipe.forward_backward(input_kwargs=batch, loss_fn=own_loss)
            pipe.synchronize()
        results.append((loss.item(), take_grads(model)))
    assert results[0][0] == results[1][0]
    assert difference(results[0][1], results[1][1]) == 0
    assert results[0][0] != backward_plain(model.eval(), batch)


def test_adapters_are_chosen_and_switched_off_as_in_peft() -> None:
    family = build("llama")
    model = with_adapters(family.model.eval())
    torch.manual_seed(5)
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    batch = family.batch()
    with wrap(model) as pipe, torch.no_grad():
        outputs = [pipe(**batch).logits]
        model.set_adapter("other")
        outputs.append(pipe(**batch).logits)
        with model.disable_adapter():
            outputs.append(pipe(**batch).logits)
            expected = [model(**batch).logits]
        expected.insert(0, model(**batch).logits)
        model.set_adapter("default")
        expected.insert(0, model(**batch).logits)
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    assert not torch.allclose(outputs[1], outputs[2], atol=1e-3)


def test_generation_uses_the_adapters() -> None:
    family = build("llama")
    model = with_adapters(family.model.eval())
    options: dict[str, Any] = {
        "input_ids": family.batch()["input_ids"][:, :5],
        "attention_mask": torch.ones(3, 5, dtype=torch.long),
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with wrap(model) as pipe:
        pipe_output = pipe.generate(**options)
        assert torch.equal(pipe_output, model.generate(**options))
        with model.disable_adapter():
            assert not torch.equal(pipe.generate(**options), pipe_output)


def test_frozen_weights_cost_no_gradient_and_no_master() -> None:
    """Neither on the host nor on a device; the base alone would need 30 times as much."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=512,
    )
    model = with_adapters(LlamaForCausalLM(config).train(), r=1, target_modules=["q_proj"])
    trained = [p for p in model.parameters() if p.requires_grad]
    trained_bytes = sum(p.numel() * p.element_size() for p in trained)
    base_bytes = sum(p.numel() * p.element_size() for p in model.parameters()) - trained_bytes
    assert base_bytes > 30 * trained_bytes
    batch = build("llama").batch(6, 12)
    with open_cpu_pool(2, CpuChecks()) as pool, wrap(model, devices=pool) as pipe:
        pipe.forward_backward(input_kwargs=batch, loss_fn=own_loss)
        peaks = [device.memory().peak_by_category for device in pool.devices]
        slots = [slot.content for _, found in pipe._store.contents() for slot in found]
        masters = list(pipe.optim_parameters())
        assert pool.reports() == []
    assert sum(t.numel() * t.element_size() for t in slots if t is not None) == trained_bytes
    assert sum(m.numel() * m.element_size() for m in masters) == trained_bytes
    assert max(peak.get(Category.WEIGHTS, 0) for peak in peaks) > base_bytes / 10
    assert 0 < max(peak.get(Category.GRADIENTS, 0) for peak in peaks) <= 2 * trained_bytes


class Scale(nn.Module):
    """A model of one weight, as PEFT wants it: a linear layer of width 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result


@pytest.mark.parametrize("synchronized", [True, False])
def test_the_saved_adapter_is_the_trained_one(tmp_path: Path, synchronized: bool) -> None:
    """A saved pipeline model behaved as untrained, and its LoRA matrices were zero or empty.

    Base weight 1, A = 1, B = 0, x = 1, loss = output: B's gradient is 1, A's is 0, so one step
    of 0.1 makes the whole 1 + A·B = 0.9.
    """
    config = peft.LoraConfig(r=1, lora_alpha=1, target_modules=["linear"])
    model = peft.get_peft_model(Scale(), config)
    layer = model.base_model.model.linear
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        a.fill_(1.0)
        b.zero_()
    one = RoundPipeRunConfig(num_microbatch=1)
    with wrap_model_to_roundpipe(model, devices="cpu:2", model_run_config=one) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe.forward_backward((torch.ones(1, 1),), loss_fn=lambda out, _: out.sum())
        pipe.step(optimizer.step, is_async=True)
        if synchronized:
            pipe.synchronize()
            assert (a.item(), b.item()) == (1.0, pytest.approx(-0.1))
            assert layer.base_layer.weight.item() == 1.0
            pipe.save_pretrained(tmp_path)
        else:
            with pytest.warns(UserWarning, match=r"weights are those before it. Call synchronize"):
                pipe.state_dict()
            pipe.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {tuple(value.shape) for value in saved.values()} == {(1, 1)}
    values = sorted(value.item() for value in saved.values())
    assert values == [pytest.approx(-0.1), 1.0]
    loaded = peft.PeftModel.from_pretrained(Scale(), tmp_path)
    assert loaded(torch.ones(1, 1)).item() == pytest.approx(0.9)
