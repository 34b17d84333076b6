"""Each rule by which a model, or a call of a cut model, is refused, with what the user reads."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf.engine_stand_in import run_as_one_graph
from hf.families import build
from hf.test_llama import batch, tiny_llama
from hf.toys import VOCABULARY, WIDTH, Layer, Output, Toy, toy_batch
from roundpipe.errors import InvalidTypeError, RoundPipeError
from roundpipe.hf import CutRefusedError, cut_model, is_cuttable
from roundpipe.hf.refusal import WAY_OUT


def refused(model: nn.Module, reason: str, example: Any = None) -> CutRefusedError:
    """The refusal, at wrap time, with this reason."""
    with pytest.raises(CutRefusedError, match=reason) as caught:
        cut_model(model, example)
    error = caught.value
    assert type(model).__name__ in str(error)
    assert error.way_out in str(error)
    return error


def test_a_refusal_names_class_reason_and_way_out() -> None:
    example = {"input": torch.ones(2, 3)}
    reason = r"no list of layers that its forward calls one by one \(it has no nn.ModuleList at all"
    error = refused(nn.Linear(3, 3), reason, example)
    assert isinstance(error, RoundPipeError)
    assert isinstance(error, NotImplementedError)
    assert error.model_class == "Linear"
    assert error.way_out == WAY_OUT
    assert "use_sequential_preset=False" in WAY_OUT


def test_what_is_no_module_is_a_type_error() -> None:
    with pytest.raises(InvalidTypeError, match="was given a str; expected a model"):
        cut_model("gpt2")  # type: ignore[arg-type]


# Real models


def test_reformer_runs_its_layers_inside_an_autograd_function() -> None:
    family = build("reformer")
    refused(family.model, "last layer without gradients, inside an autograd", family.example())


def test_xlm_makes_a_cache_although_told_not_to() -> None:
    refused(build("xlm").model, "are given a cache .*EncoderDecoderCache.* fill twice")


def test_a_cache_from_the_user() -> None:
    cut = cut_model(tiny_llama())
    with pytest.raises(CutRefusedError, match=r"given a cache \(a DynamicCache"):
        cut.layers[0](**batch(), cache=DynamicCache())


def test_layerdrop_in_training() -> None:
    config = BartConfig(
        d_model=32,
        decoder_layers=3,
        decoder_ffn_dim=48,
        decoder_attention_heads=4,
        vocab_size=120,
        decoder_layerdrop=0.5,
    )
    model = BartForCausalLM(config).train()
    error = refused(model, r"skips layers at random while training \(layerdrop=0.5\)")
    assert error.way_out == "set its layerdrop to 0"
    assert len(cut_model(model.eval()).names) == 5


def test_a_model_that_accelerate_has_spread_over_devices() -> None:
    model: Any = tiny_llama()
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    refused(model, "hf_device_map: accelerate moves its parts")
    model.hf_device_map = {"": "cpu"}
    assert cut_model(model).names[0] == "prefix"


def test_a_model_whose_weights_accelerate_brings_when_they_are_needed() -> None:
    accelerate: Any = importlib.import_module("accelerate")
    model = accelerate.cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    refused(model, r"the forward of the model is replaced on the instance")


class EarlyExit(LlamaForCausalLM):  # type: ignore[misc]
    """Goes through as many layers as the hidden state seems to need."""

    def forward(self, input_ids: torch.Tensor, **_options: Any) -> Any:
        hidden = self.model.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1])[None]
        rotary = self.model.rotary_emb(hidden, positions)
        for layer in self.model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
            if hidden.abs().mean() > 100:
                break
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(hidden)))


def test_a_llama_that_stops_when_it_likes() -> None:
    model = EarlyExit(tiny_llama().config)
    refused(model, r"between its layers it reads the values of a layer's output \(__bool__\)")


def test_a_forward_patched_on_an_instance() -> None:
    model: Any = tiny_llama()
    model.model.norm.forward = lambda hidden: hidden
    refused(model, "the forward of model.norm is replaced on the instance")


def test_rwkv_rescales_its_layers_when_the_mode_changes() -> None:
    family = build("rwkv")
    cut = cut_model(family.model.train())
    cut.layers.eval()
    with pytest.raises(CutRefusedError, match=r"uses rwkv.blocks.0.attention.output.weight \(a"):
        run_as_one_graph(cut, family.batch())


def test_an_image_that_the_example_did_not_have() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    vision = CLIPVisionConfig(**sizes, num_hidden_layers=2, image_size=16, patch_size=8)
    text = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=120)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=110)
    ).eval()
    ids = batch(2, 12)["input_ids"]
    ids[:, 1:5] = 110
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    cut = cut_model(model)
    with pytest.raises(CutRefusedError, match="which the example of cut_model never did") as caught:
        run_as_one_graph(cut, {"input_ids": ids, "pixel_values": images})
    assert "example= a small batch that has all arguments" in caught.value.way_out
    # Llava asks its vision tower for hidden states, so that one stays whole, in the prefix.
    example = {"input_ids": ids, "pixel_values": images}
    cut = cut_model(model, example)
    assert len(cut.names) == 6
    assert torch.equal(run_as_one_graph(cut, example).logits, model(**example).logits)


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("output_hidden_states", True, "output_hidden_states=True asks for values of all layers"),
        ("output_attentions", True, "output_attentions=True asks for values of all layers"),
        ("use_cache", True, "use_cache=True keeps keys and values between calls"),
        ("return_dict", False, "return_dict=False is not supported"),
        ("is_causal", False, "is_causal is not supported as an argument"),
    ],
)
def test_arguments_that_make_no_sense_for_a_sequence(
    argument: str, value: bool, reason: str
) -> None:
    cut = cut_model(tiny_llama())
    with pytest.raises(CutRefusedError, match=reason):
        cut.layers[0](**batch(), **{argument: value})


def test_hidden_states_asked_for_in_the_config() -> None:
    model: Any = tiny_llama()
    model.config.output_hidden_states = True
    refused(model, "collects hidden_states of model.layers.0 and all its neighbours")


def test_hidden_states_asked_for_after_the_cut() -> None:
    model: Any = tiny_llama()
    cut = cut_model(model)
    model.config.output_hidden_states = True
    with pytest.raises(CutRefusedError, match=r"collects hidden_states of model.layers.0"):
        cut.layers[0](**batch())


def test_a_failing_example_is_the_models_own_error_with_a_note() -> None:
    with pytest.raises(ValueError, match="has to be a multiple") as caught:
        cut_model(build("reformer").model.train())
    notes: list[str] = vars(caught.value)["__notes__"]
    assert "failed on the example batch of cut_model" in notes[0]


# Toy models


class ReadsValues(Toy):
    def between(self, hidden: Any, index: int, options: dict[str, Any]) -> torch.Tensor:
        return hidden * 2 if hidden.sum() > 0 else hidden  # type: ignore[no-any-return]


class ChangesInPlace(Toy):
    def between(self, hidden: Any, index: int, options: dict[str, Any]) -> torch.Tensor:
        return hidden.mul_(0.5)  # type: ignore[no-any-return]


class WritesItems(Toy):
    def between(self, hidden: Any, index: int, options: dict[str, Any]) -> torch.Tensor:
        hidden[:, 0] = 0.0
        assert isinstance(hidden, torch.Tensor)
        return hidden


class LeavesTorch(Toy):
    def between(self, hidden: Any, index: int, options: dict[str, Any]) -> torch.Tensor:
        return Square.apply(hidden)  # type: ignore[no-any-return]


class Square(torch.autograd.Function):
    """Its operations cannot be seen from outside."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.detach().as_subclass(torch.Tensor) * 0.25

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class GivesAnObject(Toy):
    def call(
        self, layer: nn.Module, hidden: torch.Tensor, index: int, options: dict[str, Any]
    ) -> Any:
        return layer(hidden, extra=object())


class TouchesWeights(Toy):
    def call(self, layer: Any, hidden: torch.Tensor, index: int, options: dict[str, Any]) -> Any:
        return layer(hidden) + layer.linear.weight.sum()


class CallsMethods(Toy):
    def call(self, layer: Any, hidden: torch.Tensor, index: int, options: dict[str, Any]) -> Any:
        return layer(hidden) + float(layer.describe() == "x")


class SetsAttributes(Toy):
    def call(self, layer: Any, hidden: torch.Tensor, index: int, options: dict[str, Any]) -> Any:
        layer.position = index
        return layer(hidden)


class ReturnsAnObject(Layer):
    def forward(self, hidden: torch.Tensor, extra: Any = None) -> Any:
        return hidden, object()


class WithObjects(Toy):
    layer_class = ReturnsAnObject

    def between(self, hidden: Any, index: int, options: dict[str, Any]) -> torch.Tensor:
        first = hidden[0]
        assert isinstance(first, torch.Tensor)
        return first


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (ReadsValues, r"between its layers it reads the values of a layer's output \(__bool__\)"),
        (ChangesInPlace, r"changes the output of a layer in place \(mul_\)"),
        (WritesItems, r"changes the output of a layer in place \(__setitem__\)"),
        (LeavesTorch, r"call 1 of a layer gets another value at|cannot be followed"),
        (GivesAnObject, "a layer is given a object, which is neither tensor"),
        (TouchesWeights, r"uses layers.0.linear.weight \(a tensor\) from outside of layers.0"),
        (CallsMethods, r"uses layers.0.describe \(a method\) from outside of layers.0"),
        (SetsAttributes, "sets layers.0.position from outside of it"),
        (WithObjects, "layers.0 returns a tuple with something in it that is neither"),
    ],
)
def test_what_code_around_the_layers_may_not_do(model_class: type[Toy], reason: str) -> None:
    refused(model_class(), reason, toy_batch())


class Uncalled(Toy):
    def call(self, layer: Any, hidden: torch.Tensor, index: int, options: dict[str, Any]) -> Any:
        return hidden + torch.tanh(layer.linear(hidden))


class OfEmbeddings(Toy):
    layer_class = staticmethod(lambda: nn.Embedding(VOCABULARY, WIDTH))  # type: ignore[assignment]

    def call(self, layer: Any, hidden: torch.Tensor, index: int, options: dict[str, Any]) -> Any:
        return hidden + layer(torch.tensor(index))


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (Uncalled, r"\(the example's forward called no module of layers\)"),
        (OfEmbeddings, r"\(the modules in layers have no modules of their own\)"),
    ],
)
def test_lists_that_are_no_layers(model_class: type[Toy], reason: str) -> None:
    refused(model_class(), reason, toy_batch())


class TakesOrders(Toy):
    """Does what the options of a call say."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Parameter(torch.eye(WIDTH))

    def before(self, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        return hidden @ self.mixer

    def call(
        self, layer: nn.Module, hidden: torch.Tensor, index: int, options: dict[str, Any]
    ) -> Any:
        if options.get("skip") == index:
            return hidden
        if options.get("twice") == index:
            return layer(layer(hidden))
        return layer(hidden, extra=options.get("extra"))

    def between(self, hidden: Any, index: int, options: dict[str, Any]) -> torch.Tensor:
        assert isinstance(hidden, torch.Tensor)
        if options.get("mix") == index:
            return hidden @ self.mixer
        return self.norm(hidden) if options.get("norm") == index else hidden


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ({"skip": 0}, r"call 0 of a layer went to layers.1; .* it was layers.0"),
        ({"skip": 2}, r"norm is called after 2 of 3 calls of layers, which the example"),
        ({"twice": 0}, r"call 1 of a layer went to layers.0; .* it was layers.1"),
        ({"norm": 1}, r"norm is called after 2 of 3 calls of layers, which the example"),
        ({"mix": 1}, r"layer call 1 it uses the parameter mixer, which it did not"),
        ({"extra": object()}, "a layer is given a object"),
    ],
)
def test_calls_that_run_otherwise_than_the_example(order: dict[str, Any], reason: str) -> None:
    cut = cut_model(TakesOrders(), toy_batch())
    with pytest.raises(CutRefusedError, match=reason):
        run_as_one_graph(cut, {**toy_batch(), **order})


def test_a_layer_call_after_the_last_one() -> None:
    cut = cut_model(TakesOrders(), toy_batch())
    # The prefix leaves the forward at the last call, so that only the tail sees one more.
    with pytest.raises(CutRefusedError, match=r"call 3 of a layer went to layers.2; .* the end"):
        run_as_one_graph(cut, {**toy_batch(), "twice": 2})


class Bare(TakesOrders):
    """Has nothing after its layers."""

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any
    ) -> Any:
        hidden = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            hidden = self.call(layer, hidden, index, options)
        return Output(hidden)


def test_a_forward_that_ends_before_the_last_layer() -> None:
    cut = cut_model(Bare(), toy_batch())
    with pytest.raises(CutRefusedError, match="its forward made 2 calls of layers; it was 3"):
        cut.layers[0](**toy_batch(), skip=2)


class Moody(Layer):
    """What it returns depends on an option."""

    def forward(self, hidden: torch.Tensor, extra: Any = None) -> Any:
        hidden = super().forward(hidden)
        return {None: hidden, 1: (hidden, hidden), 2: 1.0}[extra]


class WithMoods(TakesOrders):
    layer_class = Moody


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (1, r"layers.0 returned tuple\(\*, \*\)|layers.0 returned \(\*, \*\)"),
        (2, "layers.0 returned a float as output 0"),
    ],
)
def test_a_layer_that_returns_something_else_than_before(extra: int, reason: str) -> None:
    cut = cut_model(WithMoods(), toy_batch())
    state = cut.layers[0](**toy_batch(), extra=extra)
    with pytest.raises(CutRefusedError, match=reason):
        cut.layers[1](state)


class ComputesEachTime(Toy):
    """Returns something else whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def after(self, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self.calls += 1
        return hidden * self.calls


def test_the_self_check_compares_the_output() -> None:
    refused(
        ComputesEachTime(), "its tail returns another value at .logits: off by up to", toy_batch()
    )


class ChangesItsMind(Toy):
    """Returns another class of output the second time."""

    calls = 0

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any
    ) -> Any:
        output = super().forward(input_ids, labels, **options)
        self.calls += 1
        return output if self.calls == 1 else (output.logits, output.loss)


def test_the_self_check_compares_the_structure() -> None:
    refused(ChangesItsMind(), r"its tail returns .*\*.* instead of Output", toy_batch())


class GrowsMoods(TakesOrders):
    """An embedding whose output has an object in it, if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = MoodyEmbedding(11, WIDTH)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any
    ) -> Any:
        hidden = self.embed(input_ids, **options)[0]
        for layer in self.layers:
            hidden = layer(hidden)
        return Output(self.head(self.norm(hidden)))


class MoodyEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor, mood: object = None) -> Any:
        return super().forward(input), mood


def test_a_module_before_the_layers_that_returns_something_new() -> None:
    cut = cut_model(GrowsMoods(), {"input_ids": toy_batch()["input_ids"]})
    with pytest.raises(CutRefusedError, match="embed returned a object, and no such thing when"):
        cut.layers[0](toy_batch()["input_ids"], mood=object())


def test_is_cuttable_looks_and_does_not_run() -> None:
    assert is_cuttable(tiny_llama())
    assert is_cuttable(build("reformer").model)  # refused only when it is cut
    assert not is_cuttable(nn.Linear(3, 3))
    assert not is_cuttable(Toy())
