"""LoRA from a recipe: only adapters are trained and saved, and plain PEFT loads them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.test_cli_finetune import finetune, metrics

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
ADAPTER = "adapter={rank: 4, targets: [q_proj, v_proj]}"


def test_a_recipe_becomes_an_adapter_that_plain_peft_loads(
    recipe_file: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["training.eval_every=0", "training.steps=12", "optimizer.lr=3e-2"]
    assert finetune(recipe_file, ADAPTER, *changes) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "parameters, 1.3 k of them trained" in shown
    assert 'PeftModel.from_pretrained(base, "' in shown
    run = tmp_path / "run"
    files = {path.name for path in run.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "recipe.yaml"} <= files
    assert "model.safetensors" not in files
    before, after = metrics(run, "held_out", "loss")
    assert after < before - 0.05

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        untrained = base(ids).logits
        model = peft.PeftModel.from_pretrained(base, run)
        assert not torch.allclose(model(ids).logits, untrained, atol=1e-2)
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, untrained)


def test_the_options_reach_peft(recipe_file: Path, tmp_path: Path) -> None:
    options = "{rank: 2, alpha: 6, dropout: 0.1, dora: true, modules_to_save: [norm]}"
    changes = ["training.steps=1", "training.eval_every=0", "training.recompute_grain=layer"]
    assert finetune(recipe_file, f"adapter={options}", *changes) == 0
    config: dict[str, Any] = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 6, 0.1)
    assert config["use_dora"] is True
    assert config["modules_to_save"] == ["norm"]
    assert set(config["target_modules"]) > {"q_proj", "down_proj"}


def test_the_seed_decides_the_adapters(recipe_file: Path, tmp_path: Path) -> None:
    losses = []
    for seed in (0, 0, 1):
        changes = ["training.steps=2", "training.eval_every=0", "output.overwrite=true"]
        assert finetune(recipe_file, ADAPTER, *changes, f"seed={seed}") == 0
        losses.append(metrics(tmp_path / "run", "step", "loss"))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{rank: 0}", "adapter.rank"),
        ("{size: 3}", "adapter.size"),
        ("{targets: [nowhere]}", "adapter: Target modules {'nowhere'} not found"),
    ],
)
def test_mistakes_in_the_section(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], section: str, problem: str
) -> None:
    assert finetune(recipe_file, f"adapter={section}") == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_without_peft_the_recipe_says_what_to_install(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def without_peft(name: str, *args: Any) -> Any:
        return None if name == "peft" else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without_peft)
    assert finetune(recipe_file, ADAPTER) == 2
    assert "pip install peft, or leave the section out" in " ".join(capsys.readouterr().err.split())
