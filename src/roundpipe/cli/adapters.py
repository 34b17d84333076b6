"""Putting PEFT adapters on a model, as the recipe's ``adapter`` section says."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roundpipe.cli.model_source import LoadedModel
from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import AdapterSection


def check_adapter(section: AdapterSection | None) -> None:
    """Find out whether adapters can be had, before anything is loaded.

    Raises:
        UsageError: PEFT is not installed.
    """
    if section is not None and importlib.util.find_spec("peft") is None:
        raise UsageError(
            "adapter: training adapters needs the package peft, which is not installed; "
            "pip install peft, or leave the section out to train all weights"
        )


def with_adapter(loaded: LoadedModel, section: AdapterSection | None, seed: int) -> LoadedModel:
    """The model with new adapters and everything else frozen; as it is without a section.

    Raises:
        UsageError: PEFT cannot put such adapters on this model.
    """
    if section is None:
        return loaded
    import peft

    targets = section.targets
    with warnings.catch_warnings():
        # PEFT uses a name of transformers that newer versions call by another.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = peft.get_peft_model(
                    loaded.model,
                    peft.LoraConfig(
                        task_type="CAUSAL_LM",
                        r=section.rank,
                        lora_alpha=section.alpha,
                        lora_dropout=section.dropout,
                        use_dora=section.dora,
                        target_modules=targets if isinstance(targets, str) else list(targets),
                        modules_to_save=list(section.modules_to_save) or None,
                    ),
                )
        except (ValueError, TypeError) as error:
            raise UsageError(f"adapter: {error}") from error
    return replace(loaded, model=model)


def save_model(loaded: LoadedModel, folder: Path) -> None:
    """Save model and tokenizer; of a model with adapters, what was trained."""
    options: dict[str, Any] = {}
    if hasattr(loaded.model, "peft_config"):
        # The default looks for the base model on the hub.
        options["save_embedding_layers"] = False
    loaded.model.save_pretrained(folder, **options)
    loaded.tokenizer.save_pretrained(folder)
