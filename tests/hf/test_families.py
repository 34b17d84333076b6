"""Every causal language model family of transformers, tiny: the cut model equals the whole one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf.engine_stand_in import (
    Weights,
    difference,
    fingerprint,
    poisoned,
    run_as_engine,
    run_as_one_graph,
    take_grads,
)
from hf.families import FAMILIES, Family, build
from hf.family_checks import TOLERANT, allowed_difference, engine_difference, prepare
from roundpipe.hf import cut_model

# Families that together need every part of the cut.
QUICK = {
    "llama": "one list, hidden state in and out",
    "opt": "no base model object around the layers",
    "bert": "a base model without a parameter of its own in the tail",
    "openai-gpt": "takes the dtype from the first parameter",
    "bloom": "layers return a tuple; tied embedding",
    "ctrl": "changes the embedding in place",
    "prophetnet": "an embedding that returns a tuple",
    "xmod": "asks a layer for the names of its adapters",
    "rwkv": "rescales its layers' weights in eval mode",
    "mixtral": "router logits and an auxiliary loss",
    "cpmant": "a learned position bias that all layers read",
    "zamba": "an attention block that layers share, and the embedding read by layers",
    "glm_moe_dsa": "integers carried from layer to layer",
    "zaya": "a second residual stream; parameters outside of modules; a dict of masks",
    "deepseek_v4": "a dict that layers read, and more than a norm after them",
    "gemma3n_text": "a dict that layers write; layer inputs from the prefix that need gradients",
    "gemma4_text": "a dict that layers write, operations between layers",
    "git": "images; two stacks of layers",
    "hrm_text": "two stacks in nested loops, some calls without gradients",
    "dory": "layers called several times, a norm between them",
    "inkling2_text": "the tail reads the embedding",
    "xlnet": "two streams, one of them detached between layers",
    "blt": "a stack whose values steer the code around the others",
}
REFUSED = {"reformer", "xlm"}
WORKING = [name for name in FAMILIES if name not in REFUSED]

quick = pytest.mark.parametrize("name", QUICK)
every = pytest.mark.parametrize("name", WORKING)


def check_alone(family: Family, *, train: bool, rows: int = 3, length: int = 16) -> None:
    """One graph over all pieces, and each piece alone on weights of its own."""
    model = family.model.train(train)
    before = fingerprint(model)
    cut = cut_model(model, family.example())
    if family.name != "rwkv" and not is_mixture(model):
        assert fingerprint(model) == before
    batch = family.batch(rows, length)
    tolerance = 2e-6 if family.name in TOLERANT else 0.0

    torch.manual_seed(5)
    expected = model(**batch, use_cache=False)
    expected.loss.backward()
    grads = take_grads(model)
    assert grads
    assert difference({"loss": expected.loss.detach() * 2}, {"loss": expected.loss.detach()}) > 0

    torch.manual_seed(5)
    output = run_as_one_graph(cut, batch)
    output.loss.backward()
    assert type(output) is type(expected)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.logits, expected.logits)
    assert difference(take_grads(model), grads) <= tolerance

    weights = Weights.of(model)
    torch.manual_seed(5)
    with poisoned(model):
        result = run_as_engine(cut, batch, weights)
    assert torch.equal(result.output.loss, expected.loss)
    assert torch.equal(result.output.logits, expected.logits)
    alone = {n: result.grads[id(p)] for n, p in model.named_parameters() if id(p) in result.grads}
    assert difference(alone, grads) <= tolerance


def is_mixture(model: nn.Module) -> bool:
    """Whether watching it makes the library install hooks that collect router logits."""
    return any(getattr(m, "_output_capturing_hooks_installed", False) for m in model.modules())


def check_engine(family: Family, *grains: str) -> None:
    """Three microbatches on two devices against the whole model on the same microbatches."""
    cut, plain = prepare(family)
    for grain in grains:
        assert engine_difference(cut, plain, grain) <= allowed_difference(family.name, cut)


@pytest.mark.parametrize("name", ["llama", "bert", "zamba", "xlnet", "dory"])
def test_quick_families_alone(name: str) -> None:
    check_alone(build(name), train=True)


@quick
def test_quick_families_through_the_engine(name: str) -> None:
    check_engine(build(name), "layer" if len(name) % 2 else "stage")


@pytest.mark.slow
@every
@pytest.mark.parametrize("train", [False, True])
def test_all_families_alone(name: str, train: bool) -> None:
    check_alone(build(name), train=train or name == "rwkv")


@pytest.mark.slow
@every
def test_all_families_through_the_engine(name: str) -> None:
    check_engine(build(name), "stage", "layer")


def test_the_table_is_complete() -> None:
    assert len(WORKING) >= 190
    assert set(QUICK) | set(TOLERANT) <= set(WORKING)
    assert set(FAMILIES) >= REFUSED
