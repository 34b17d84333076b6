"""Run configuration: what is refused, and who wins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.config import resolve


@pytest.mark.parametrize(
    ("option", "kind", "text"),
    [
        (
            {"recompute_grain": "block"},
            ValueError,
            "recompute_grain is 'block'; choose one of 'stage', 'layer'",
        ),
        (
            {"loss_reduction": "max"},
            ValueError,
            "loss_reduction is 'max'; choose one of 'sum', 'mean'",
        ),
        (
            {"num_microbatch": 2.0},
            TypeError,
            r"num_microbatch is 2.0 \(float\); give a whole number >= 1",
        ),
        (
            {"num_microbatch": True},
            TypeError,
            r"num_microbatch is True \(bool\); give a whole number >= 1",
        ),
        ({"num_microbatch": 0}, ValueError, "num_microbatch is 0; it must be at least 1"),
        (
            {"execute_plan": [range(1)]},
            TypeError,
            "execute_plan is a list; give a ModelExecutePlan",
        ),
    ],
)
def test_impossible_options_are_refused(
    option: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        RoundPipeRunConfig(**option)


def test_a_config_of_another_type_is_refused() -> None:
    bad: Any = {"num_microbatch": 2}
    with pytest.raises(TypeError, match=r"the run config is a dict; give a RoundPipeRunConfig"):
        resolve(bad, RoundPipeRunConfig(), 2)


def test_the_built_in_defaults() -> None:
    config = resolve(RoundPipeRunConfig(), RoundPipeRunConfig(), 3)
    assert config.requires_grad
    assert config.output_device == torch.device("cpu")
    assert config.preserve_rng_state
    assert (config.recompute_grain, config.loss_reduction) == ("stage", "sum")
    assert config.num_microbatch == 4
    assert config.execute_plan is None
    assert (config.split_input, config.split_label, config.merge_output) == (None, None, None)
    with torch.no_grad():
        assert not resolve(RoundPipeRunConfig(), RoundPipeRunConfig(), 3).requires_grad


def test_the_call_wins_over_the_model_which_wins_over_the_default() -> None:
    plan = ModelExecutePlan([], [range(1)])
    model = RoundPipeRunConfig(
        num_microbatch=7, recompute_grain="layer", preserve_rng_state=True, execute_plan=plan
    )
    call = RoundPipeRunConfig(
        num_microbatch=2, preserve_rng_state=False, requires_grad=False, merge_output=False
    )
    config = resolve(call, model, 3)
    assert config.num_microbatch == 2
    assert config.recompute_grain == "layer"
    assert config.execute_plan is plan
    # False is a value like any other, not "not given".
    assert not config.preserve_rng_state
    assert not config.requires_grad
    assert config.merge_output is False
