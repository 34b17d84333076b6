"""The model's own loss over a batch that is cut into unequal microbatches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf.engine_stand_in import closeness, take_grads, without_dropout
from hf.families import build
from hf.test_llama import tiny_llama
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import InvalidValueError
from roundpipe.hf import HuggingFacePipe, cut_model, lazy_logits
from roundpipe.hf.lazy_logits import LazyLogits
from roundpipe.microbatch import TensorChunkSpec

PIECES = RoundPipeRunConfig(num_microbatch=3)


def wrap(model: nn.Module, **options: Any) -> HuggingFacePipe:
    pipe = wrap_model_to_roundpipe(
        model, True, **{"devices": "cpu:2", "model_run_config": PIECES, **options}
    )
    assert isinstance(pipe, HuggingFacePipe)
    return pipe


def lopsided(rows: int = 6, length: int = 12) -> dict[str, Tensor]:
    """From row to row fewer tokens, and fewer of them with a label."""
    ids = torch.randint(3, 110, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, length - 2 * row :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def pieces(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v.tensor_split(3)[m] for k, v in batch.items()} for m in range(3)]


def plain(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole model on the whole batch."""
    loss: Tensor = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), take_grads(model)


def assert_equal(
    got: tuple[Tensor, Mapping[str, Tensor]], expected: tuple[Tensor, Mapping[str, Tensor]]
) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=0)
    assert closeness(got[1], expected[1]) < 1e-5


def train(pipe: HuggingFacePipe, model: nn.Module, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    loss = pipe.forward_backward(**options)
    pipe.synchronize()
    return loss, take_grads(model)


def test_unequal_microbatches_give_the_whole_batchs_mean() -> None:
    model, batch = tiny_llama(), lopsided()
    expected = plain(model, batch)
    means = torch.stack([plain(model, piece)[0] for piece in pieces(batch)])
    assert abs(means.mean() - expected[0]) > 1e-3  # what a mean of means would give
    with wrap(model) as pipe:
        assert_equal(train(pipe, model, input_kwargs=batch), expected)


def test_so_do_the_loss_and_the_gradients_of_forward() -> None:
    model, batch = tiny_llama(), lopsided()
    expected = plain(model, batch)
    with wrap(model) as pipe:
        output = pipe(**batch)
        output.loss.backward()
        pipe.synchronize()
        assert_equal((output.loss.detach(), take_grads(model)), expected)
        with torch.no_grad():
            torch.testing.assert_close(pipe(**batch).loss, expected[0], rtol=1e-6, atol=0)


def test_where_the_caller_merges_the_library_counts() -> None:
    model, batch = tiny_llama(), lopsided()
    config = RoundPipeRunConfig(merge_output=lambda outputs: [output.loss for output in outputs])
    with wrap(model) as pipe, torch.no_grad():
        losses = pipe(**batch, roundpipe_run_config=config)
        expected = [model(**piece).loss for piece in pieces(batch)]
    torch.testing.assert_close(losses, expected)


def test_a_number_of_items_from_the_caller_counts() -> None:
    """As in gradient accumulation, where the batch is only a part of what is averaged over."""
    model, batch = tiny_llama(), lopsided()
    whole = {**batch, "num_items_in_batch": 100}
    expected = plain(model, whole)
    with wrap(model) as pipe:
        assert_equal(train(pipe, model, input_kwargs=whole), expected)


def test_labels_that_are_shifted_already() -> None:
    model, batch = tiny_llama(), lopsided()
    batch["shift_labels"] = batch["labels"].roll(-1, 1)
    batch["shift_labels"][:, -1] = -100
    expected = plain(model, batch)
    with wrap(model) as pipe:
        assert_equal(train(pipe, model, input_kwargs=batch), expected)


def test_labels_that_are_not_shifted() -> None:
    config = tf.BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=120,
    )
    model, batch = tf.BertForMaskedLM(config), lopsided()
    without_dropout(model)
    rule = cut_model(model).loss_rule
    assert rule is not None
    assert not rule.shifted
    expected = plain_without_cache(model, batch)
    with wrap(model) as pipe:
        assert_equal(train(pipe, model, input_kwargs=batch), expected)


def plain_without_cache(
    model: nn.Module, batch: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    loss: Tensor = model(**batch).loss
    loss.backward()
    return loss.detach(), take_grads(model)


def test_a_mean_over_rows_is_left_to_the_engine() -> None:
    model, batch = tiny_llama(), lopsided(7)
    batch = {k: v[[0, 1, 2, 3, 4, 4, 4]] for k, v in batch.items()}
    parts = pieces(batch)
    expected = sum(plain(model, part)[0] * len(part["labels"]) / 7 for part in parts)
    config = RoundPipeRunConfig(loss_reduction="mean")
    with wrap(model) as pipe:
        loss, _ = train(pipe, model, input_kwargs=batch, run_config=config)
        torch.testing.assert_close(loss, expected)
        with pytest.raises(InvalidValueError, match="divides the loss twice"):
            pipe.forward_backward(
                input_kwargs={**batch, "num_items_in_batch": 9}, run_config=config
            )


def test_a_loss_function_of_the_caller_gets_what_the_library_computes() -> None:
    model, batch = tiny_llama(), lopsided()
    expected = sum(plain(model, piece)[0] for piece in pieces(batch))
    with wrap(model) as pipe:
        loss = pipe.forward_backward(input_kwargs=batch, loss_fn=lambda out, _: out.loss)
    torch.testing.assert_close(loss, expected)


def test_specs_of_the_caller_need_not_know_of_the_options() -> None:
    model, batch = tiny_llama(), lopsided()
    config = RoundPipeRunConfig(split_input=((), dict.fromkeys(batch, TensorChunkSpec(0))))
    expected = plain(model, batch)
    with wrap(model) as pipe:
        assert_equal(train(pipe, model, input_kwargs=batch, run_config=config), expected)
        with torch.no_grad():
            loss = pipe(**batch, roundpipe_run_config=config).loss
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)


def test_models_whose_loss_is_of_another_kind_keep_it() -> None:
    family = build("prophetnet")
    assert cut_model(family.model).loss_rule is None
    assert cut_model(tiny_llama(), {"input_ids": lopsided()["input_ids"]}).loss_rule is None


# --- logits that nobody asked for -----------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[LazyLogits]:
    """The logits that were computed in full."""
    seen: list[LazyLogits] = []
    original = lazy_logits.computed

    def noting(lazy: LazyLogits) -> Tensor:
        seen.append(lazy)
        return original(lazy)

    monkeypatch.setattr(lazy_logits, "computed", noting)
    return seen


def all_lazy(pipe: HuggingFacePipe) -> None:
    tail: Any = pipe.model[-1]
    tail.lazy_from_bytes = 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere", "bert"])
def test_training_without_logits(name: str, computed: list[LazyLogits]) -> None:
    """Scaled and capped logits, tied embeddings, a bias."""
    model, batch = build(name).model.train(), lopsided()
    without_dropout(model)
    expected = plain(model, batch)
    with wrap(model) as pipe:
        all_lazy(pipe)
        assert_equal(train(pipe, model, input_kwargs=batch), expected)
    # So small a threshold makes other projections lazy, too.
    assert all(lazy.shape[-1] != 120 for lazy in computed)


def test_a_part_of_the_logits(computed: list[LazyLogits]) -> None:
    model, batch = tiny_llama(), lopsided()
    options = {"logits_to_keep": 5, "labels": batch["labels"][:, -5:].contiguous()}
    whole = {**batch, **options}
    expected = plain(model, whole)
    with wrap(model) as pipe:
        all_lazy(pipe)
        assert_equal(train(pipe, model, input_kwargs=whole), expected)
    assert not computed


def test_logits_are_there_for_those_who_use_them(computed: list[LazyLogits]) -> None:
    model, batch = tiny_llama(), lopsided()

    def with_regulariser(output: Any, _label: Any) -> Tensor:
        loss: Tensor = output.loss + 0.1 * output.logits.square().mean()
        return loss

    expected = torch.zeros(())
    for piece in pieces(batch):
        loss = with_regulariser(model(**piece, use_cache=False), None)
        loss.backward()
        expected = expected + loss.detach()
    grads = take_grads(model)
    with wrap(model) as pipe:
        all_lazy(pipe)
        assert_equal(
            train(pipe, model, input_kwargs=batch, loss_fn=with_regulariser), (expected, grads)
        )
        assert len(computed) == 3
        _, output = pipe.forward_backward(input_kwargs=batch, return_outputs=True)
        with torch.no_grad():
            torch.testing.assert_close(output.logits, model(**batch).logits)
    assert len(computed) == 3  # they were never lazy


# --- mixtures of experts --------------------------------------------------------------------------


def shares_and_probabilities(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Share of tokens and mean probability of each expert, over layers and unmasked tokens."""
    with torch.no_grad():
        output = model(**batch, use_cache=False, output_router_logits=True)
    kept = batch["attention_mask"].flatten().bool()
    probabilities = torch.cat([logits.softmax(-1)[kept] for logits in output.router_logits])
    top = probabilities.topk(model.config.num_experts_per_tok).indices
    shares = nn.functional.one_hot(top, probabilities.shape[-1]).sum(1).float().mean(0)
    return shares, probabilities.mean(0)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_balance_of_experts_is_that_of_the_microbatches(name: str) -> None:
    """And off the whole batch's by the covariance of shares and probabilities."""
    model: Any = build(name).model.train()
    without_dropout(model)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.5
    batch: dict[str, Any] = lopsided()
    coefficient, experts = 0.5, model.num_experts
    with torch.no_grad():
        whole = model(**batch, use_cache=False, output_router_logits=True)
    parts = pieces(batch)
    tokens = torch.stack([part["attention_mask"].sum() for part in parts])
    weights = tokens / tokens.sum()
    seen = [shares_and_probabilities(model, part) for part in parts]
    shares, probabilities = (torch.stack(column) for column in zip(*seen, strict=True))
    mean_share, mean_probability = weights @ shares, weights @ probabilities
    covariance = weights @ (shares * probabilities) - mean_share * mean_probability
    off = coefficient * experts * covariance.sum()

    with wrap(model) as pipe:
        arguments = {**batch, "output_router_logits": True}
        loss, grads = train(pipe, model, input_kwargs=arguments)
    balance = experts * (mean_share * mean_probability).sum()
    torch.testing.assert_close(whole.aux_loss, balance)  # the whole batch's number
    torch.testing.assert_close(loss, whole.loss + off)  # the microbatches' number
    assert off > 10 * 1e-6

    items = int((batch["labels"][:, 1:] != -100).sum())
    for part, weight in zip(parts, weights, strict=True):
        output = model(**part, use_cache=False, output_router_logits=True, num_items_in_batch=items)
        (output.loss + coefficient * (weight - 1) * output.aux_loss).backward()
    assert closeness(grads, take_grads(model)) < 1e-5


def test_without_padding_rows_are_the_weights() -> None:
    model: Any = build("mixtral").model.train()
    without_dropout(model)
    batch: dict[str, Any] = lopsided()
    del batch["attention_mask"]
    batch["labels"] = batch["input_ids"].clone()
    arguments = {**batch, "output_router_logits": True}
    with torch.no_grad():
        whole = model(**arguments, use_cache=False)
        balances = [
            model(**part, use_cache=False, output_router_logits=True).aux_loss
            for part in pieces(batch)
        ]
    with wrap(model) as pipe:
        loss = pipe.forward_backward(input_kwargs=arguments)
    off = model.router_aux_loss_coef * (torch.stack(balances).mean() - whole.aux_loss)
    torch.testing.assert_close(loss, whole.loss + off, rtol=1e-6, atol=0)


def test_pieces_are_copied_with_what_they_know() -> None:
    with wrap(tiny_llama()) as pipe:
        twin = copy.deepcopy(pipe)
        with twin:
            batch = lopsided()
            assert torch.equal(
                twin.forward_backward(input_kwargs=batch), pipe.forward_backward(input_kwargs=batch)
            )
