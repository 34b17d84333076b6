"""The record of a plan, and its rules: what is wrong is said by layer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.plan import ModelExecutePlan, StagePlan, default_plan
from unit.plan.draws import plans, workloads


@given(st.data())
def test_plans_of_every_run_type_are_valid(data: st.DataObject) -> None:
    workload = data.draw(workloads())
    plan = data.draw(plans(workload))

    plan.check_valid(len(workload.costs), workload.run_type)


def test_the_fused_stage_may_be_the_last_layer_alone_or_everything() -> None:
    ModelExecutePlan([range(3)], [range(3, 4), range(3)]).check_valid(4, "fused")
    ModelExecutePlan([], [range(4)]).check_valid(4, "fused")
    ModelExecutePlan([range(4)]).check_valid(4, "infer")
    ModelExecutePlan([range(4)], [range(2, 4), range(2)]).check_valid(4, "infer")


@pytest.mark.parametrize(
    ("forward", "backward", "run_type", "message"),
    [
        (
            [range(2), range(3, 4)],
            [],
            "infer",
            "fwd_plan lacks layer 2; expected each of the layers",
        ),
        ([range(3), range(2, 4)], [], "infer", "fwd_plan has layer 2 more than once"),
        ([range(2, 4), range(2)], [], "infer", "fwd_plan has layer 0 out of order.*ascending"),
        ([range(5)], [], "infer", "fwd_plan has layer 4; expected each of the layers 0..3 once"),
        ([range(4)], [range(2), range(2, 4)], "train", "bwd_plan has layer 2 out of order.*desc"),
        ([range(4)], [range(2, 4)], "train", "bwd_plan lacks layer 0"),
        ([range(4)], [], "train", "bwd_plan lacks layer 0"),
        ([range(2)], [range(3, 4), range(3)], "fused", "fwd_plan lacks layer 2.*starts at layer 3"),
        ([range(4)], [range(3, 4), range(3)], "fused", "fwd_plan has layer 3; expected each"),
        ([range(1)], [range(4)], "fused", "fwd_plan has layer 0; expected no stages; bwd_plan"),
        ([range(4)], [], "fused", r"bwd_plan is empty.*bwd_plan=\[range\(0, 4\)\]"),
        ([range(3)], [range(3, 5), range(3)], "fused", "bwd_plan has layer 4"),
        ([range(4)], [], "learn", "run type 'learn' is unknown; expected one of 'infer'"),
    ],
)
def test_the_message_names_the_layer(
    forward: list[range], backward: list[range], run_type: str, message: str
) -> None:
    plan = ModelExecutePlan(forward, backward)

    with pytest.raises(InvalidValueError, match=message):
        plan.check_valid(4, run_type)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[0, 1]],), InvalidTypeError, r"fwd_plan\[0\] is \[0, 1\]; expected a range"),
        (([range(0)],), InvalidValueError, r"fwd_plan\[0\].*expected at least one layer and step"),
        (
            ([], [range(0, 4, 2)]),
            InvalidValueError,
            r"bwd_plan\[0\].*at least one layer and step 1",
        ),
        (([range(2)], [], [1, 1]), InvalidValueError, "fwd_replicas has 2 entries for 1 stages"),
        (([range(2)], [], [0]), InvalidValueError, r"fwd_replicas\[0\] is 0; expected at least 1"),
        (([range(2)], [], [1.5]), InvalidTypeError, r"fwd_replicas\[0\] is 1.5; expected an int"),
        (([range(2)], [], [True]), InvalidTypeError, r"fwd_replicas\[0\] is True; expected an int"),
    ],
)
def test_what_is_no_plan_at_all_is_refused_at_once(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        StagePlan(*arguments)


def test_replicas_are_one_unless_given() -> None:
    narrow = StagePlan([range(2)], [range(2, 3), range(2)])
    wide = StagePlan([range(2)], [range(2, 3), range(2)], [], [4, 1])

    assert (narrow.fwd_replicas, narrow.bwd_replicas, narrow.is_wide) == ([1], [1, 1], False)
    assert (wide.fwd_replicas, wide.bwd_replicas, wide.is_wide) == ([1], [4, 1], True)


# --- plans from sizes ------------------------------------------------------------------------

sizes = st.lists(st.sampled_from([0, 1, 10, 10, 25, 400]), min_size=1, max_size=20)


@given(
    sizes,
    st.integers(1, 6),
    st.sampled_from(["infer", "train", "fused"]),
    st.sampled_from([None, 1, 40, 100]),
)
def test_default_plans_are_legal_and_under_the_limit(
    layer_sizes: list[int], devices: int, run_type: str, limit: int | None
) -> None:
    plan = default_plan(run_type, layer_sizes, devices, stage_limit=limit)

    plan.check_valid(len(layer_sizes), run_type)
    assert plan == default_plan(run_type, layer_sizes, devices, stage_limit=limit)
    assert not plan.is_wide
    if limit is not None:
        for stage in (*plan.fwd_plan, *plan.bwd_plan):
            assert len(stage) == 1 or sum(layer_sizes[layer] for layer in stage) <= limit
    count = len(plan.fwd_plan)
    if run_type == "fused":
        count += len(plan.bwd_plan)
    assert count >= min(devices, len(layer_sizes))


def test_default_backward_stages_are_smaller_than_forward_ones() -> None:
    plan = default_plan("fused", [10] * 24, 4)

    longest_forward = max(len(stage) for stage in plan.fwd_plan)
    assert max(len(stage) for stage in plan.bwd_plan) < longest_forward
    assert {len(stage) for stage in plan.bwd_plan} <= {4, 5, 6}


@pytest.mark.parametrize(
    ("layer_sizes", "devices", "limit", "message"),
    [
        ([], 1, None, "got no layers"),
        ([1, -2], 1, None, "layer 1 has size -2 bytes"),
        ([1], 0, None, "got num_devices=0; expected at least 1"),
        ([1], 1, 0, "got stage_limit=0 bytes; expected at least 1 or None"),
    ],
)
def test_default_plans_need_sizes_and_devices(
    layer_sizes: list[int], devices: int, limit: int | None, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        default_plan("train", layer_sizes, devices, stage_limit=limit)
