"""Losses of classifiers and regression heads over microbatches, and losses of unknown kinds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

from hf.engine_stand_in import closeness, take_grads
from hf.test_batch_loss import lopsided, plain_without_cache, train, wrap
from hf.test_llama import tiny_llama
from hf.toys import VOCABULARY, Output, Toy, toy_batch
from roundpipe import RoundPipeRunConfig
from roundpipe.hf import cut_model

ROWS = 7  # microbatches of 3, 2 and 2
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 120,
}


def bert(num_labels: int, problem_type: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    config = tf.BertConfig(
        **SIZES,
        num_labels=num_labels,
        problem_type=problem_type,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = tf.BertForSequenceClassification(config)
    return model


def llama(num_labels: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = tf.LlamaForSequenceClassification(
        tf.LlamaConfig(**SIZES, num_labels=num_labels, pad_token_id=0)
    )
    return model


def texts(labels: Tensor) -> dict[str, Tensor]:
    batch = lopsided(len(labels), 2 * len(labels))
    return {**batch, "labels": labels}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, -100])  # the last row does not count
HEADS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "classes": (lambda: bert(3), CLASSES),
    "classes, by a decoder": (lambda: llama(3), CLASSES.clamp(min=0)),
    "a number": (lambda: bert(1), numbers(ROWS)),
    "a number, in a column": (lambda: llama(1), numbers(ROWS, 1)),
    "three numbers": (lambda: bert(3, "regression"), numbers(ROWS, 3)),
    "several classes": (
        lambda: bert(3, "multi_label_classification"),
        (numbers(ROWS, 3) > 0).float(),
    ),
    "several classes, seen from the labels": (lambda: bert(3), (numbers(ROWS, 3) > 0).float()),
}


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_of_a_head_is_that_of_the_whole_batch(head: str) -> None:
    make, labels = HEADS[head]
    exact = labels.double() if labels.is_floating_point() else labels
    model, batch = make().train().double(), texts(exact)
    expected = without_key_biases(plain_without_cache(copy.deepcopy(model), batch))
    with wrap(model) as pipe:
        got = train(pipe, model, input_kwargs=batch)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-7, atol=0)
        assert closeness(without_key_biases(got)[1], expected[1]) < 1e-7
        output = pipe(**batch)
        torch.testing.assert_close(output.loss.detach(), expected[0], rtol=1e-7, atol=0)


def without_key_biases(result: tuple[Any, dict[str, Tensor]]) -> tuple[Any, dict[str, Tensor]]:
    """Their gradients are zero but for rounding: a bias of all keys changes no attention."""
    loss, grads = result
    return loss, {name: grad for name, grad in grads.items() if not name.endswith("key.bias")}


def test_wrapping_leaves_the_kind_of_problem_to_the_first_batch() -> None:
    model: Any = bert(3)
    cut_model(model)
    assert model.config.problem_type is None


def test_examples_of_prompts_without_labels_tell_what_is_shifted() -> None:
    """Where no first label counts, both ways of counting give the same number."""
    batch = lopsided()
    batch["labels"][:, :2] = -100
    example = {name: value[:2] for name, value in batch.items()}
    rule = cut_model(tiny_llama(), example).loss_rule
    assert rule is not None
    assert rule.shifted
    toy = {**toy_batch(), "labels": toy_batch()["labels"].clone()}
    toy["labels"][:, 0] = -100
    rule = cut_model(Toy(), toy).loss_rule
    assert rule is not None
    assert not rule.shifted


class NamedOutput(NamedTuple):
    """A tuple as an output."""

    logits: Any
    loss: Any


LossOf = Callable[[Tensor, Tensor], Tensor]


class WithLoss(Toy):
    """A toy with a loss of its own."""

    def __init__(self, loss_of: LossOf, output: Callable[..., Any] = Output) -> None:
        super().__init__()
        self.loss_of = loss_of
        self.make_output = output

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        logits = super().forward(input_ids).logits
        assert labels is not None
        return self.make_output(logits=logits, loss=self.loss_of(logits, labels))


def classes_weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, VOCABULARY)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)


def two_terms(logits: Tensor, labels: Tensor) -> Tensor:
    first = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return first + F.mse_loss(logits.amax(-1), labels.float())


@pytest.mark.parametrize("loss_of", [classes_weighted, two_terms])
def test_a_loss_of_an_unknown_kind_is_summed_with_one_warning(loss_of: LossOf) -> None:
    model, batch = WithLoss(loss_of), toy_batch(6)
    parts = [{k: v.tensor_split(3)[m] for k, v in batch.items()} for m in range(3)]
    losses = torch.stack([model(**part).loss.detach() for part in parts])
    with wrap(model, example=toy_batch()) as pipe:
        with pytest.warns(UserWarning, match="does not know how the loss of WithLoss follows") as w:
            first = pipe.forward_backward(input_kwargs=batch)
        assert 'Give loss_reduction="mean" or a loss_fn' in str(w[0].message)
        assert w[0].filename == __file__
        torch.testing.assert_close(first, losses.sum())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.forward_backward(input_kwargs=batch)


def test_no_warning_where_nothing_is_summed_or_the_caller_divides() -> None:
    batch = toy_batch(6)
    with warnings.catch_warnings(), wrap(WithLoss(two_terms), example=toy_batch()) as pipe:
        warnings.simplefilter("error")
        for config in (
            RoundPipeRunConfig(loss_reduction="mean"),
            RoundPipeRunConfig(num_microbatch=1),
        ):
            pipe.forward_backward(input_kwargs=batch, run_config=config)
        pipe.forward_backward(
            input_kwargs=batch, loss_fn=lambda output, _: output.logits.square().mean()
        )
        pipe.forward_backward(input_kwargs={**batch, "num_items_in_batch": 3})


def probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 0], labels)


def test_targets_that_are_probabilities() -> None:
    model = WithLoss(probabilities)
    ids = toy_batch(ROWS)["input_ids"]
    batch = {"input_ids": ids, "labels": numbers(ROWS, VOCABULARY).softmax(-1)}
    expected = model(**batch).loss
    expected.backward()
    grads = take_grads(model)
    with wrap(model, example={k: v[:2] for k, v in batch.items()}) as pipe:
        loss, got = train(pipe, model, input_kwargs=batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    assert closeness(got, grads) < 1e-5


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_returned_outputs_have_the_returned_loss(reduction: Any) -> None:
    config = RoundPipeRunConfig(loss_reduction=reduction)
    with wrap(tiny_llama()) as pipe:
        loss, output = pipe.forward_backward(
            input_kwargs=lopsided(), return_outputs=True, run_config=config
        )
        assert torch.equal(output.loss, loss)
        assert torch.equal(output["loss"], loss)


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("make", [Toy, lambda: WithLoss(token_mean, NamedOutput)])
def test_so_have_those_of_ones_own_classes(make: Callable[[], nn.Module]) -> None:
    """A data class and a named tuple."""
    model, batch = make(), toy_batch(6)
    with wrap(model, example=toy_batch()) as pipe:
        loss, output = pipe.forward_backward(input_kwargs=batch, return_outputs=True)
    assert type(output) is type(model(**batch))
    assert torch.equal(output.loss, loss)
    torch.testing.assert_close(loss, model(**batch).loss.detach(), rtol=1e-6, atol=0)
