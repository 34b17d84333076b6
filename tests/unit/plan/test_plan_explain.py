"""Explanations and reports say why, what limits, what to change; and documents are documents."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from roundpipe.plan import (
    ENGINE_RULES,
    BubbleAccount,
    DeviceSpec,
    LayerCost,
    LayerCosts,
    Machine,
    PlanLimits,
    StagePlan,
    Workload,
    explain,
    plan_iteration,
    simulate,
)
from roundpipe.plan.explain import account_of_plan
from roundpipe.plan.iterations import pace_of
from roundpipe.plan.published import published_model
from roundpipe.plan.report import (
    account_document,
    plan_document,
    plan_text,
    simulation_document,
    simulation_text,
)
from roundpipe.plan.simulate import schedule_of

BODY = LayerCosts.uniform(6, 1.0, 2.0, name="small")


def test_a_heavy_layer_is_named_with_its_gain() -> None:
    costs = LayerCosts((*BODY.layers, LayerCost(20.0, 40.0)), "headed")
    planned = plan_iteration(Workload(costs, Machine.uniform(2), 4))

    explanation = explain(planned)

    first = explanation.what_ifs[0]
    assert first.change.startswith("layer 6 took half its time (it takes 20.0 times the median)")
    assert first.gain_percent > 30
    assert "cut layer 6 into smaller layers" in str(explanation)


def test_it_is_said_why_no_stage_is_wide() -> None:
    said = "wide stages were not tried: no layer takes more than 1.2 times the median"
    heavy = LayerCosts((*BODY.layers, LayerCost(20.0, 40.0)), "headed")

    assert said in str(explain(plan_iteration(Workload(BODY, Machine.uniform(2), 4))))
    assert said not in str(explain(plan_iteration(Workload(BODY, Machine.uniform(1), 4))))
    assert said not in str(explain(plan_iteration(Workload(heavy, Machine.uniform(2), 4))))
    narrow = PlanLimits(max_replicas=1)
    planned = plan_iteration(Workload(BODY, Machine.uniform(2), 4), narrow)
    assert said not in str(explain(planned))


def test_a_bubble_is_never_below_zero() -> None:
    planned = plan_iteration(Workload(BODY, Machine.uniform(1), 2))
    over = replace(planned, busy_ms=planned.iteration_ms * (1 + 1e-12))

    assert f"{over.bubble_percent:.2f}" == "0.00"
    account = BubbleAccount(3.0, 3.0 + 1e-12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert f"{account.bubble_percent:.2f}" == "0.00"


def test_slow_uploads_are_blamed_where_they_are_the_limit() -> None:
    layers = tuple(replace(layer, weight_bytes=1000) for layer in BODY.layers)
    slow = DeviceSpec(upload_bytes_per_ms=20.0)
    planned = plan_iteration(Workload(LayerCosts(layers), Machine.uniform(2, like=slow), 4))

    explanation = explain(planned)

    assert explanation.what_ifs[0].change == "uploads took no time"
    assert explanation.account.percent("upload") > 50
    assert "upload: waiting for weights" in str(explanation)


def test_the_optimizer_is_blamed_where_it_is_the_limit() -> None:
    layers = tuple(replace(layer, optimizer_ms=50.0) for layer in BODY.layers)
    planned = plan_iteration(Workload(LayerCosts(layers), Machine.uniform(2, 0.1), 4))

    assert explain(planned).what_ifs[0].change == "the optimizer step took no time"


@pytest.mark.parametrize(
    ("mode", "others"), [("sync", ["async", "layerwise"]), ("layerwise", ["async"]), ("async", [])]
)
def test_it_is_told_what_other_ways_to_step_would_gain(mode: str, others: list[str]) -> None:
    """Steps that take as long as half of the calls; asynchronous ones hide altogether."""
    layers = tuple(replace(layer, optimizer_ms=2.0) for layer in BODY.layers)
    workload = Workload(LayerCosts(layers), Machine.uniform(2, 0.1), 4, rules=ENGINE_RULES)
    planned = plan_iteration(replace(workload, mode=mode))
    schedule = schedule_of(workload, planned.plan, planned.microbatches_per_round)

    found = {item.change: item.iteration_ms for item in explain(planned).what_ifs}

    ways = {
        "async": "steps were asynchronous",
        "layerwise": "layers were updated one by one beside the next iteration",
    }
    assert [way for way in ways if ways[way] in found] == others
    for way in others:
        pace = pace_of(replace(workload, mode=way), [schedule])
        assert found[ways[way]] == pace.iteration_ms


def test_more_microbatches_are_advised_where_devices_wait_at_the_ends_of_an_iteration() -> None:
    """Where calls overlap and the step, too, nobody waits there."""
    said = "if an iteration had twice as many microbatches"
    overlapping = Workload(BODY, Machine.uniform(3), 4, mode="async")
    in_turn = replace(overlapping, rules=ENGINE_RULES)
    narrow = PlanLimits(max_replicas=1)

    for waiting in (replace(overlapping, mode="sync"), in_turn, replace(in_turn, mode="layerwise")):
        assert said in str(explain(plan_iteration(waiting, narrow)))
    assert said not in str(explain(plan_iteration(overlapping, narrow)))


def test_long_hops_are_blamed_where_they_are_the_limit() -> None:
    single = PlanLimits(forward_layers=1, backward_layers=1, fused_layers=1)
    planned = plan_iteration(Workload(BODY, Machine.uniform(3, 30.0), 2), single)

    changes = [item.change for item in explain(planned).what_ifs]

    assert "hops between devices took no time" in changes


def test_full_memory_is_said() -> None:
    layers = tuple(replace(layer, weight_bytes=2**28) for layer in BODY.layers)
    machine = Machine.uniform(2, like=DeviceSpec("gpu", memory_bytes=2**29))
    planned = plan_iteration(Workload(LayerCosts(layers), machine, 4))

    text = str(explain(planned))

    assert "memory limits it: gpu:0 needs 0.50 of 0.50 GiB for layers" in text


def test_stages_that_take_time_of_their_own_are_told() -> None:
    slow = Workload(BODY, Machine.uniform(2, stage_ms=2.0), 4)
    assert "if stages took no time besides their layers'" in str(explain(plan_iteration(slow)))
    fast = Workload(BODY, Machine.uniform(2), 4)
    assert "besides their layers'" not in str(explain(plan_iteration(fast)))


def test_the_best_of_all_plans_is_called_so() -> None:
    small = plan_iteration(Workload(LayerCosts.uniform(3, 1.0, 2.0), Machine.uniform(2), 4))
    large = plan_iteration(published_model("GPT-OSS-20B").workload())

    assert "the fastest of all" in str(explain(small))
    assert "that were simulated" in str(explain(large))
    assert "layers 24..24 run on 3 devices at once" in str(explain(large))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_plan_document_holds_what_was_promised(mode: str) -> None:
    model = published_model("Llama-3.1-8B")
    planned = plan_iteration(model.workload(mode), model.limits)

    document = json.loads(json.dumps(plan_document(planned)))

    stages = [*document["forward"], *document["backward"]]
    assert [stop for _, stop in document["forward"]][-1] == 32
    assert document["backward"][0] == [32, 33]
    assert document["backward"][-1][0] == 0
    assert len(document["replicas"]) == len(stages)
    assert document["microbatches_per_round"] == 16
    assert document["makespan_ms"] == planned.iteration_ms
    work = 16 * (32 * (2 * 18.50370313 + 41.20659375) + 37.2255 + 74.501)
    bubble = 100 * (1 - work / 8 / document["makespan_ms"])
    assert document["bubble_pct"] == pytest.approx(bubble, abs=1e-9)
    assert list(document) == [
        "forward", "backward", "replicas", "microbatches_per_round", "bubble_pct", "makespan_ms",
    ]  # fmt: skip
    account = account_document(account_of_plan(planned)[0])
    assert sum(account.values()) == pytest.approx(100)
    assert 100 - account["busy"] == pytest.approx(bubble, abs=0.1)


def test_the_plan_text_compares_with_what_is_published() -> None:
    model = published_model("Qwen3-1.7B")
    planned = plan_iteration(model.workload(), model.limits)

    text = plan_text(planned, model, width=40)

    assert "Qwen3-1.7B: 29 layers, 8 devices, 16 microbatches, sync" in text
    assert "published: bubble 19.07%" in text
    assert text.count("|") == 16


def test_a_simulation_is_reported_in_both_forms() -> None:
    workload = Workload(BODY, Machine.uniform(2), 4)
    simulation = simulate(workload, StagePlan([range(3)], [range(3, 6), range(3)]), iterations=2)

    document = json.loads(json.dumps(simulation_document(workload, simulation)))
    text = simulation_text(workload, simulation, width=30)

    assert document["iteration_ends_ms"] == list(simulation.ends_ms)
    assert document["makespan_ms"] == simulation.makespan_ms
    assert f"small: 2 iterations (sync) in {simulation.makespan_ms:.3f} ms" in text
    assert "busy" in text
