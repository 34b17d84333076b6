"""Costs, machines, workloads and limits: the impossible is refused, files come back the same."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.plan import (
    ENGINE_RULES,
    DeviceSpec,
    LayerCost,
    LayerCosts,
    Machine,
    PlanLimits,
    Workload,
)
from roundpipe.plan.documents import (
    machine_from_document,
    plan_from_document,
    plan_to_document,
    workload_from_document,
)
from roundpipe.plan.published import published_model, published_names
from roundpipe.plan.workload import check_count
from unit.plan.draws import layer_costs, plans, workloads


@given(layer_costs())
def test_costs_survive_a_file(costs: LayerCosts) -> None:
    document = json.loads(json.dumps(costs.to_document()))

    assert LayerCosts.from_document(document) == costs


@given(st.data())
def test_plans_survive_a_file(data: st.DataObject) -> None:
    plan = data.draw(plans(data.draw(workloads())))

    assert plan_from_document(json.loads(json.dumps(plan_to_document(plan)))) == plan


def test_a_costs_file_is_a_workload() -> None:
    workload = workload_from_document(
        {
            "name": "mine",
            "layers": [{"forward_ms": 1.0, "backward_ms": 2.0, "weight_bytes": 8}],
            "machine": {"devices": 2, "hop_ms": 0.5, "speed": 2.0},
            "microbatches": 6,
            "mode": "async",
        }
    )

    assert workload.costs == LayerCosts((LayerCost(1.0, 2.0, weight_bytes=8),), "mine")
    assert [device.speed for device in workload.machine.devices] == [2.0, 2.0]
    assert (workload.microbatches, workload.mode, workload.machine.hop_ms) == (6, "async", 0.5)


def test_devices_of_a_costs_file_may_differ() -> None:
    machine = machine_from_document(
        {"devices": [{"speed": 1.0}, {"name": "old", "link": "bus"}], "links": {"bus": 9.0}}
    )

    assert [device.name for device in machine.devices] == ["device:0", "old"]
    assert machine.links == {"bus": 9.0}
    assert not machine.is_uniform
    assert Machine.uniform(3).is_uniform


def test_one_device_and_two_microbatches_unless_said_otherwise() -> None:
    workload = workload_from_document({"layers": [{"forward_ms": 1.0}]})

    assert (len(workload.machine), workload.microbatches, workload.mode) == (1, 2, "sync")


def test_rules_are_the_engines_own_unless_said_otherwise() -> None:
    layers = [{"forward_ms": 1.0}]

    assert workload_from_document({"layers": layers}).rules == ENGINE_RULES
    overlapping = workload_from_document({"layers": layers, "rules": {"overlap_calls": True}})
    assert overlapping.rules == replace(ENGINE_RULES, overlap_calls=True)


LAYERS = [{"forward_ms": 1.0}]


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        ({}, InvalidTypeError, "needs a list 'layers'; got NoneType"),
        ({"layers": []}, InvalidValueError, "got no layers"),
        ({"layers": [3]}, InvalidTypeError, r"layers\[0\] is 3; expected an object"),
        ({"layers": [{"backward_ms": 1}]}, InvalidValueError, r"layers\[0\] lacks 'forward_ms'"),
        ({"layers": [{"forward_ms": 1, "x": 2}]}, InvalidValueError, r"layers\[0\] has 'x'; known"),
        (
            {"layers": [{"forward_ms": -1}]},
            InvalidValueError,
            "forward_ms is -1; expected a number",
        ),
        (
            {"layers": [{"forward_ms": "1"}]},
            InvalidTypeError,
            "forward_ms is '1'; expected a number",
        ),
        ({"layers": LAYERS, "speed": 1}, InvalidValueError, "costs document has 'speed'; known"),
        ({"layers": LAYERS, "machine": 3}, InvalidTypeError, "machine is 3; expected an object"),
        ({"layers": LAYERS, "machine": {"devices": 0}}, InvalidValueError, "machine.devices is 0"),
        (
            {"layers": LAYERS, "machine": {"devices": []}},
            InvalidValueError,
            "got no devices",
        ),
        ({"layers": LAYERS, "machine": {"devices": [2]}}, InvalidTypeError, r"devices\[0\] is 2"),
        ({"layers": LAYERS, "machine": {"size": 2}}, InvalidValueError, "machine has 'size'"),
        ({"layers": LAYERS, "mode": "fast"}, InvalidValueError, "mode 'fast' is unknown"),
        ({"layers": LAYERS, "microbatches": 0}, InvalidValueError, "microbatches is 0"),
        (
            {"layers": LAYERS, "microbatches": "4"},
            InvalidTypeError,
            "microbatches is '4'",
        ),
    ],
)
def test_a_wrong_costs_file_is_refused(
    document: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        workload_from_document(document)


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        ({"forward": [[0]]}, InvalidTypeError, r"forward\[0\] is \[0\]; expected \[first, last"),
        ({"backward": [["a", 1]]}, InvalidTypeError, r"backward\[0\] is"),
        ({"forward": [[0, 2]], "replicas": [1, 1]}, InvalidValueError, "2 entries for 1 forward"),
    ],
)
def test_a_wrong_plan_file_is_refused(
    document: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_from_document(document)


def test_impossible_machines_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="speed is 0; expected a number above 0"):
        DeviceSpec(speed=0)
    with pytest.raises(InvalidValueError, match="shares link 'bus', which Machine"):
        Machine((DeviceSpec(link="bus"),))
    with pytest.raises(InvalidValueError, match=r"Machine.links\['bus'\] is 0"):
        Machine((DeviceSpec(),), links={"bus": 0})
    with pytest.raises(InvalidValueError, match="hop_ms is -1"):
        Machine((DeviceSpec(),), hop_ms=-1)


def test_impossible_workloads_and_limits_are_refused() -> None:
    costs = LayerCosts.uniform(2, 1.0, 2.0)
    with pytest.raises(InvalidValueError, match="costs of kind 'b' have 1 layers; expected 2"):
        Workload(costs, Machine.uniform(1), 1, costs_by_kind={"b": LayerCosts.uniform(1, 1.0, 1.0)})
    with pytest.raises(InvalidValueError, match="fused_layers is 0; expected at least 1"):
        PlanLimits(fused_layers=0)
    with pytest.raises(InvalidTypeError, match=r"count is 1\.0; expected an int"):
        check_count("count", 1.0)


def test_heavy_layers_stand_out_of_the_median() -> None:
    costs = LayerCosts.uniform(4, 1.0, 2.0, LayerCost(2.0, 4.0))

    assert PlanLimits().heavy(costs) == {4}
    assert PlanLimits(heavy_layers=frozenset({1})).heavy(costs) == {1}
    assert PlanLimits().heavy(LayerCosts.uniform(1, 1.0, 2.0)) == frozenset()


@pytest.mark.parametrize("name", published_names())
def test_published_partitions_are_legal_plans(name: str) -> None:
    model = published_model(name)

    model.plan.check_valid(len(model.costs), "fused")
    assert len(model.plan.bwd_plan[0]) == 1


def test_unknown_published_models_are_refused_by_name() -> None:
    with pytest.raises(
        InvalidValueError, match=r"no published model is called 'GPT-5'; .*Qwen3-1\.7B"
    ):
        published_model("GPT-5")
