"""Models of transformers, wrapped: outputs, modes, generation, saving, other kinds of models."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from hf.engine_stand_in import difference, take_grads
from hf.families import build
from hf.test_llama import batch, tiny_llama
from hf.toys import WIDTH, Toy, toy_batch
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.devices.cpu import visible_cores
from roundpipe.errors import InvalidTypeError, InvalidValueError, StateError
from roundpipe.hf import CutRefusedError, HuggingFacePipe
from roundpipe.wrapping import PartedModel, UnknownModelError
from support.plain import intraop_threads

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 120}
VISION: dict[str, Any] = {**SIZES, "image_size": 16, "patch_size": 8}


def wrap(model: nn.Module, **options: Any) -> HuggingFacePipe:
    pipe = wrap_model_to_roundpipe(model, True, **{"devices": "cpu:2", **options})
    assert isinstance(pipe, HuggingFacePipe)
    return pipe


def own_loss(output: Any, _label: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def test_the_output_is_the_models_own_and_so_is_the_loss() -> None:
    model: Any = tiny_llama()
    inputs = batch()
    with wrap(model) as pipe:
        output = pipe(**inputs)
        assert type(output) is type(model(**inputs))
        torch.testing.assert_close(output.logits, model(**inputs).logits)
        output.loss.backward()
        pipe.synchronize()
        assert len(take_grads(model)) == len(list(model.parameters()))
        assert pipe.config is model.config
        assert pipe.get_input_embeddings() is model.model.embed_tokens
        assert set(pipe.state_dict()) == set(model.state_dict())
        with pytest.raises(InvalidValueError, match="has no loss: give labels among input_kwargs"):
            pipe.forward_backward(input_kwargs={"input_ids": inputs["input_ids"]})


def test_a_saved_model_loads_in_plain_transformers(tmp_path: Path) -> None:
    model = tiny_llama()
    with wrap(model) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe.forward_backward(input_kwargs=batch(), loss_fn=own_loss)
        pipe.step(optimizer.step, is_async=True)
        pipe.save_pretrained(tmp_path)
        expected = pipe(**batch()).logits
    loaded = tf.LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**batch()).logits, expected)
    assert not torch.allclose(tiny_llama()(**batch()).logits, expected, atol=1e-3)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3}, {"do_sample": True}])
def test_generation(options: dict[str, Any]) -> None:
    model: Any = tiny_llama().eval()
    prompt = {name: batch()[name][:, -9:] for name in ("input_ids", "attention_mask")}
    arguments = {**prompt, **options, "max_new_tokens": 5, "pad_token_id": 0}
    calls = 0

    def counting(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.model.layers[0].register_forward_hook(counting)
    torch.manual_seed(4)
    expected = model.generate(**arguments, use_cache=False)
    assert calls == 5
    with wrap(model) as pipe:
        calls = 0
        torch.manual_seed(4)
        generated = pipe.generate(**arguments)
        assert calls >= 5 * 2  # microbatches of each token
    assert generated.shape == expected.shape
    if not options.get("do_sample"):
        assert torch.equal(generated, expected)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("name", ["mamba", "gemma3n_text", "qwen3_moe"])
def test_generation_of_other_families(name: str) -> None:
    family = build(name)
    model: Any = family.model.eval()
    ids = family.batch()["input_ids"][:, :6]
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 3,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with wrap(model) as pipe:
        assert torch.equal(pipe.generate(**arguments), model.generate(**arguments, use_cache=False))


def test_what_cannot_generate_is_refused() -> None:
    with wrap(tf.BertModel(tf.BertConfig(**TEXT))) as pipe:
        with pytest.raises(CutRefusedError, match=r"BertModel .*: it cannot generate"):
            pipe.generate()
    with wrap(tiny_t5()) as pipe, pytest.raises(CutRefusedError, match="runs its encoder apart"):
        pipe.generate(batch()["input_ids"])


def test_training_modes_of_the_original_reach_the_pieces() -> None:
    """Dropout after the embedding is in a container's code, dropout in a layer in its own."""
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=120, embd_pdrop=0.3)
    )
    with wrap(model.eval()) as pipe, torch.no_grad():
        quiet = pipe(**batch()).logits
        assert torch.equal(pipe(**batch()).logits, quiet)
        model.train()
        assert not torch.equal(pipe(**batch()).logits, quiet)
        torch.manual_seed(0)
        noisy = pipe(**batch()).logits
        torch.manual_seed(0)
        assert torch.equal(pipe(**batch()).logits, noisy)
        pipe.eval()
        assert not model.transformer.drop.training
        assert torch.equal(pipe(**batch()).logits, quiet)


def test_a_copy_has_weights_of_its_own() -> None:
    with wrap(tiny_llama(tie_word_embeddings=True)) as pipe, torch.no_grad():
        twin = copy.deepcopy(pipe)
        with twin:
            expected = pipe(**batch()).logits
            assert torch.equal(twin(**batch()).logits, expected)
            assert twin.lm_head.weight is twin.model[0].skeleton.model.embed_tokens.weight
            twin.get_input_embeddings().weight.zero_()
            assert not twin(**batch()).logits.any()
            assert torch.equal(pipe(**batch()).logits, expected)


# Kinds of models


def tiny_t5() -> Any:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_heads=4,
            vocab_size=120,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )


def images(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def with_images(rows: int) -> dict[str, torch.Tensor]:
    inputs = batch(rows, 12, 0)
    inputs["input_ids"][:, 1:5] = 110
    return {**inputs, "pixel_values": images(rows)}


def classes(rows: int) -> torch.Tensor:
    return torch.arange(rows) % 2


def _llava() -> Any:
    vision, text = tf.CLIPVisionConfig(**VISION), tf.LlamaConfig(**TEXT)
    return tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=110)
    )


def _bart() -> Any:
    sizes = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 3), ("ffn_dim", 48), ("attention_heads", 4))
    }
    config = tf.BartConfig(d_model=32, vocab_size=120, dropout=0.0, **sizes)
    return tf.BartForConditionalGeneration(config)


KINDS: dict[str, Any] = {
    "encoder": (
        lambda: tf.BertForMaskedLM(tf.BertConfig(**TEXT)),
        lambda rows: batch(rows, 12, 3),
        6,
    ),
    "classifier": (
        lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**TEXT, pad_token_id=0)),
        lambda rows: {**batch(rows, 12, 3), "labels": classes(rows)},
        6,
    ),
    "vision": (
        lambda: tf.ViTForImageClassification(tf.ViTConfig(**VISION)),
        lambda rows: {"pixel_values": images(rows), "labels": classes(rows)},
        6,
    ),
    "vision-language": (_llava, with_images, 6),
    "encoder-decoder": (_bart, lambda rows: batch(rows, 12, 3), 8),
    "encoder-decoder with a bias that layers share": (tiny_t5, lambda rows: batch(rows, 12, 3), 8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind: str) -> None:
    make, make_batch, pieces = KINDS[kind]
    torch.manual_seed(0)
    model = make().eval()
    inputs = make_batch(6)
    expected = torch.zeros(())
    with intraop_threads(max(1, visible_cores() // 2)):
        for part in range(3):
            loss = model(**{k: v.tensor_split(3)[part] for k, v in inputs.items()}).loss
            loss.backward()
            expected += loss.detach()
    grads = take_grads(model)
    config = RoundPipeRunConfig(num_microbatch=3)
    with wrap(model, example=make_batch(2), model_run_config=config) as pipe:
        assert len(pipe.model) == pieces
        loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=own_loss)
        pipe.synchronize()
    assert torch.equal(loss, expected)
    assert difference(take_grads(model), grads) <= 1e-6


@pytest.mark.parametrize("kind", ["encoder", "classifier", "vision", "encoder-decoder"])
def test_the_example_is_made_up_where_it_can_be(kind: str) -> None:
    make, make_batch, pieces = KINDS[kind]
    with wrap(make()) as pipe, torch.no_grad():
        assert len(pipe.model) == pieces
        assert pipe(**make_batch(3)).loss > 0


# What is wrapped how


def test_a_model_of_ones_own_is_cut_on_an_example() -> None:
    model = Toy()
    inputs = toy_batch(4)
    with wrap(model, example=toy_batch()) as pipe:
        assert len(pipe.model) == 5
        pipe.forward_backward(input_kwargs=inputs)
        pipe.synchronize()
        assert len(take_grads(model)) == len(list(model.parameters()))
        torch.testing.assert_close(pipe(**inputs).logits, model(**inputs).logits)


class OfLinears(Toy):
    """Its layers are torch's own, and what goes between them is in its forward."""

    layer_class = staticmethod(lambda: nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]

    def between(self, hidden: Any, index: int, options: dict[str, Any]) -> torch.Tensor:
        return torch.tanh(hidden) + index


def test_layers_may_be_plain_modules() -> None:
    model = OfLinears()
    inputs = toy_batch(6)
    expected = model(**inputs).loss
    expected.backward()
    grads = take_grads(model)
    with wrap(model, example=toy_batch()) as pipe:
        assert len(pipe.model) == 5
        loss = pipe.forward_backward(input_kwargs=inputs)
        pipe.synchronize()
    torch.testing.assert_close(loss, expected.detach())
    assert difference(take_grads(model), grads) <= 1e-6


def test_it_is_too_late_to_resize_embeddings() -> None:
    with wrap(tiny_llama()) as pipe:
        assert pipe.resize_token_embeddings() is pipe.get_input_embeddings()
        with pytest.raises(
            StateError, match=r"resize_token_embeddings\(130\) .* resize, then wrap"
        ):
            pipe.resize_token_embeddings(130)


def test_an_unknown_model_as_a_sequence_is_refused_naming_what_is_known() -> None:
    match = (
        "Linear is not known as a sequence of layers: known are models of transformers, and PEFT"
    )
    with pytest.raises(UnknownModelError, match=match) as caught:
        wrap_model_to_roundpipe(nn.Linear(2, 2), True)
    assert isinstance(caught.value, NotImplementedError)


def test_a_refused_model_is_wrapped_by_size_with_a_warning_unless_forbidden() -> None:
    family = build("xlm")
    family.model.eval()
    with pytest.raises(CutRefusedError, match="are given a cache"):
        wrap_model_to_roundpipe(family.model, True)
    inputs = family.batch(6, 12)
    options: dict[str, Any] = {"devices": "cpu:2", "lower_threshold": 4096}
    for config in (RoundPipeRunConfig(), RoundPipeRunConfig(num_microbatch=1)):
        with pytest.warns(UserWarning, match=r"are given a cache .*\. It is wrapped by size"):
            pipe = wrap_model_to_roundpipe(family.model, model_run_config=config, **options)
        assert isinstance(pipe, PartedModel)
        with pipe:
            if config.num_microbatch is None:
                with pytest.raises(InvalidValueError, match="which all microbatches would fill"):
                    pipe(**inputs)
            else:
                logits = pipe(**inputs).logits
                torch.testing.assert_close(logits, family.model(**inputs).logits)


def test_a_known_model_can_be_wrapped_by_size() -> None:
    with wrap_model_to_roundpipe(
        tiny_llama(), False, upper_threshold=2**30, devices="cpu:2"
    ) as pipe:
        assert type(pipe) is RoundPipe
        assert len(pipe(**batch(), use_cache=False).logits) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"model": "gpt2"}, InvalidTypeError, "model is a str; give an nn.Module"),
        ({"use_sequential_preset": "gpt2"}, InvalidTypeError, "'gpt2'; give True, False or None"),
        ({"model_run_config": {}}, InvalidTypeError, "model_run_config is a dict"),
        ({"lower_threshold": 0.5}, InvalidTypeError, "lower_threshold is 0.5; give a number"),
        ({"lower_threshold": -1}, InvalidValueError, "lower_threshold is -1; it must not"),
        ({"upper_threshold": 1}, InvalidValueError, r"upper_threshold \(1\) is below lower"),
        ({"skip_modules": "model"}, InvalidTypeError, "skip_modules is one module; give a list"),
        ({"skip_modules": ["nope"]}, InvalidValueError, "has 'nope', which is no module of Llama"),
        (
            {"override_config": {3: RoundPipeRunConfig()}},
            InvalidValueError,
            "override_config has a int, which is no module of LlamaForCausalLM; give its modules",
        ),
        ({"override_config": {"model": {}}}, InvalidTypeError, "override_config has a dict; give"),
        (
            {"use_sequential_preset": False, "skip_modules": ["model", "lm_head"]},
            InvalidValueError,
            "nothing is left to wrap: all modules are in skip_modules",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        wrap_model_to_roundpipe(**{"model": tiny_llama(), "devices": "cpu:1", **arguments})


def test_wrapping_by_size_needs_no_transformers() -> None:
    program = """
import sys, torch, roundpipe
with roundpipe.wrap_model_to_roundpipe(torch.nn.Linear(2, 2), devices="cpu:1") as pipe:
    pipe(torch.ones(2, 2))
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
