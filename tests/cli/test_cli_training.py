"""The trainer against a plain loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from cli.tiny import make_model, make_tokenizer
from roundpipe.cli.batches import Batch, encode, evaluation_batches, training_batches
from roundpipe.cli.documents import Document, read_corpus
from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import DataSection, Recipe
from roundpipe.cli.training import Trainer

STEPS = 5
LR_FACTORS = [0.5, 1.0, 1.0, 2 / 3, 1 / 3]  # linear, with a warm-up of two steps


def recipe(**changes: dict[str, Any]) -> Recipe:
    sections: dict[str, Any] = {
        "model": {"source": "tiny"},
        "output": {"folder": "out"},
        "training": {"steps": STEPS, "async_step": False, "microbatches": 3},
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "linear", "warmup_steps": 2},
        "devices": "cpu:2",
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    return Recipe.model_validate(sections)


def text_batches() -> list[Batch]:
    examples = encode(read_corpus(DataSection()).train[:3], make_tokenizer(), 16)
    return list(islice(training_batches(examples, 4, 0, seed=1), STEPS))


def chat_batches() -> list[Batch]:
    """Uneven ones: of padding, of learned tokens, of both between the microbatches."""
    documents = [
        Document(
            str(number),
            messages=(
                {"role": "user", "content": "question " * number},
                {"role": "assistant", "content": "yes " * (7 - number)},
            ),
        )
        for number in range(7)
    ]
    examples = encode(documents, make_tokenizer(), 60)
    return list(islice(training_batches(examples, 4, 0, seed=1), STEPS))


def plain_losses(batches: list[Batch], staleness: int, clip_norm: float | None) -> list[float]:
    """A plain loop over whole batches; step t computes with the weights after t - staleness."""
    masters, model = make_model(), make_model().train()
    optimizer = torch.optim.AdamW(masters.parameters(), weight_decay=0.0)
    versions = [make_model().state_dict()]
    losses = []
    for step, (batch, factor) in enumerate(zip(batches, LR_FACTORS, strict=True)):
        model.load_state_dict(versions[max(step - staleness, 0)])
        model.zero_grad()
        loss = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            labels=batch.labels,
            use_cache=False,
        ).loss
        loss.backward()
        losses.append(loss.item())
        for master, weight in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = weight.grad
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), clip_norm)
        optimizer.param_groups[0]["lr"] = 1e-2 * factor
        optimizer.step()
        versions.append({name: value.clone() for name, value in masters.state_dict().items()})
    return losses


@pytest.mark.parametrize("batches", [text_batches, chat_batches])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_losses_equal_a_plain_loops_on_the_same_batches(
    batches: Callable[[], list[Batch]], is_async: bool, clip_norm: float | None
) -> None:
    given = batches()
    changes = {"async_step": is_async, "clip_norm": clip_norm}
    with Trainer(make_model(), recipe(training=changes)) as trainer:
        losses = [trainer.train_step(batch) for batch in given]
    expected = plain_losses(given, staleness=int(is_async), clip_norm=clip_norm)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == STEPS


def test_the_model_holds_the_trained_weights_and_its_names_after_finish() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Trainer(model, recipe()) as trainer:
        trainer.train_step(text_batches()[0])
        trainer.finish()
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(not torch.equal(after[name], before[name]) for name in before)
        assert len(trainer.grad_norms) == 1
        assert trainer.grad_norms[0] > 0


def test_the_held_out_loss_is_per_predicted_token_of_all_batches() -> None:
    documents = read_corpus(DataSection()).held_out[:2]
    model = make_model()
    examples = encode(documents, make_tokenizer(), 16)
    batches = evaluation_batches(examples, 4, 0, limit=10)
    assert len(batches[-1].input_ids) == 2  # fewer than microbatches
    with Trainer(model, recipe()) as trainer:
        loss = trainer.held_out_loss(batches)
        assert model.training
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            for row in range(len(batch.input_ids)):
                labels = batch.labels[row : row + 1]
                number = int((labels[:, 1:] != -100).sum())
                found = model(input_ids=batch.input_ids[row : row + 1], labels=labels).loss
                total, count = total + float(found) * number, count + number
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_bfloat16_weights_train_with_float32_masters() -> None:
    model = make_model().to(torch.bfloat16)
    with Trainer(model, recipe(model={"dtype": "bfloat16"})) as trainer:
        group = trainer.optimizer.param_groups[0]
        assert {master.dtype for master in group["params"]} == {torch.float32}
        losses = [trainer.train_step(batch) for batch in [text_batches()[0]] * STEPS]
        trainer.finish()
    assert losses[-1] < losses[0] - 0.1
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_microbatches_follow_the_devices_and_never_exceed_the_batch() -> None:
    def pieces(**training: int | None) -> int:
        with Trainer(make_model(), recipe(training=training)) as trainer:
            return trainer.num_microbatch

    assert pieces(microbatches=None) == 3
    assert pieces(microbatches=4) == 4
    assert pieces(microbatches=None, batch_size=2) == 2


def test_nothing_runs_on_after_the_trainer_is_closed_or_refused() -> None:
    before = set(threading.enumerate())
    with Trainer(make_model(), recipe()) as trainer:
        assert trainer.device_names == ["cpu:0", "cpu:1"]
        trainer.train_step(text_batches()[0])
    with pytest.raises(UsageError, match="optimizer: AdamW refuses: Invalid epsilon"):
        Trainer(make_model(), recipe(optimizer={"options": {"eps": -1.0}}))
    assert set(threading.enumerate()) == before


def test_devices_and_models_that_cannot_be_used_are_refused() -> None:
    devices = Recipe.model_validate({**recipe().model_dump(), "devices": "cpu:x"})
    with pytest.raises(UsageError, match=r"devices='cpu:x': 'x' is not a number"):
        Trainer(make_model(), devices)
    with pytest.raises(UsageError, match="Linear"):
        Trainer(torch.nn.Linear(2, 2), recipe())
