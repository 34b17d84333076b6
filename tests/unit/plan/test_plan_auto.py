"""Plans from models: from sizes until there are times, under a memory limit, several together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.plan import DeviceSpec, LayerCost, LayerCosts, Machine, ModelExecutePlan


@dataclass(frozen=True)
class Model:
    """All that the planner wants of a model."""

    costs: LayerCosts
    machine: Machine

    def plan_costs(self) -> LayerCosts:
        return self.costs

    def plan_machine(self) -> Machine:
        return self.machine


SIZED = LayerCosts((LayerCost(0.0, weight_bytes=100),) * 8)
TIMED = LayerCosts((LayerCost(1.0, 2.0, weight_bytes=100, gradient_bytes=100),) * 8)


@pytest.mark.parametrize("costs", [SIZED, TIMED])
@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
def test_a_model_gets_a_legal_plan_with_a_stage_for_each_device(
    run_type: str, costs: LayerCosts
) -> None:
    plan = ModelExecutePlan.auto(run_type, Model(costs, Machine.uniform(3)))

    assert isinstance(plan, ModelExecutePlan)
    plan.check_valid(8, run_type)
    count = len(plan.fwd_plan) + (len(plan.bwd_plan) if run_type == "fused" else 0)
    assert count >= 3


@pytest.mark.parametrize("costs", [SIZED, TIMED])
def test_a_stage_may_use_half_of_the_limit(costs: LayerCosts) -> None:
    plan = ModelExecutePlan.auto(
        "train", Model(costs, Machine.uniform(1)), min_stages=1, model_memory_limit=800
    )

    assert max(len(stage) for stage in plan.fwd_plan) <= 4
    assert max(len(stage) for stage in plan.bwd_plan) <= 2


def test_the_limit_is_a_share_of_the_smallest_device() -> None:
    machine = Machine(
        (DeviceSpec("large", memory_bytes=10_000), DeviceSpec("small", memory_bytes=1000))
    )

    plan = ModelExecutePlan.auto("infer", Model(TIMED, machine), min_stages=1)

    assert max(len(stage) for stage in plan.fwd_plan) <= 3  # half of 600 bytes


def test_no_stage_is_much_longer_than_even_ones() -> None:
    plan = ModelExecutePlan.auto("train", Model(TIMED, Machine.uniform(2)), min_stages=4)

    assert max(len(stage) for stage in plan.bwd_plan) <= 2
    assert len(plan.fwd_plan) >= 4


def test_several_models_get_one_plan_each() -> None:
    machine = Machine.uniform(2)
    models = [Model(TIMED, machine), Model(replace(TIMED, layers=TIMED.layers[:3]), machine)]

    plans = ModelExecutePlan.auto("fused", *models)

    assert isinstance(plans, list)
    for plan, model in zip(plans, models, strict=True):
        plan.check_valid(len(model.costs), "fused")


def test_what_cannot_be_planned_is_refused() -> None:
    model = Model(TIMED, Machine.uniform(2))
    with pytest.raises(InvalidValueError, match="run type 'learn' is unknown"):
        ModelExecutePlan.auto("learn", model)
    with pytest.raises(InvalidValueError, match="got no models"):
        ModelExecutePlan.auto("fused")  # type: ignore[call-overload]
    with pytest.raises(InvalidTypeError, match="cannot plan a int; expected a RoundPipe"):
        ModelExecutePlan.auto("fused", 3)  # type: ignore[call-overload]
    with pytest.raises(InvalidValueError, match=r"upper_threshold is 0\.5; expected at least 1"):
        ModelExecutePlan.auto("fused", model, upper_threshold=0.5)
    with pytest.raises(InvalidValueError, match="model_memory_limit is 0; expected at least 1"):
        ModelExecutePlan.auto("fused", model, model_memory_limit=0)
    with pytest.raises(InvalidValueError, match="no plan of model fits"):
        ModelExecutePlan.auto("fused", model, model_memory_limit=50)
