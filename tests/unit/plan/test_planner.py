"""The planner: as good as trying everything, legal, steady, never worse with more room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import InvalidValueError
from roundpipe.plan import (
    ENGINE_RULES,
    DeviceSpec,
    EngineRules,
    LayerCost,
    LayerCosts,
    Machine,
    PlanLimits,
    Planned,
    StagePlan,
    Workload,
    plan_iteration,
    plan_models,
    simulate,
)
from roundpipe.plan.planner import memory_of
from roundpipe.plan.published import published_model, published_names
from roundpipe.plan.search import Search, try_every_plan
from roundpipe.plan.space import PlanSpace
from roundpipe.plan.timeline import COMPUTE
from unit.plan.draws import divisors, layer_costs, machines, times
from unit.plan.event_by_event import EventByEvent


def every_stage_plan(workload: Workload, widths: dict[int, int]) -> Iterator[StagePlan]:
    """All plans; ``widths`` says how many replicas a stage of a layer alone may have."""
    layers = len(workload.costs)
    for backward in every_cut(layers) if workload.run_type != "infer" else [[]]:
        top = backward[-1].start if workload.run_type == "fused" else layers
        for forward in every_cut(top):
            stages = [*forward, *backward[::-1]]
            choices = [
                range(1, widths.get(stage.start, 1) + 1) if len(stage) == 1 else [1]
                for stage in stages
            ]
            for replicas in product(*choices):
                count = len(forward)
                yield StagePlan(
                    forward, backward[::-1], list(replicas[:count]), list(replicas[count:])
                )


def every_cut(layers: int) -> list[list[range]]:
    if layers == 0:
        return [[]]
    cuts = (
        (0, *inner, layers)
        for count in range(layers)
        for inner in combinations(range(1, layers), count)
    )
    return [[range(start, stop) for start, stop in pairwise(cut)] for cut in cuts]


def time_by_event(workload: Workload, plan: StagePlan, per_round: int) -> float:
    return EventByEvent(workload, plan, per_round, 1).run().iteration_ends[0]


@settings(max_examples=25, deadline=None)
@given(
    layer_costs(4),
    st.integers(1, 3),
    st.sampled_from([(0.0, 0.0), (0.5, 0.0), (0.5, 0.75)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["fused", "train", "infer"]),
)
def test_equals_brute_force_on_small_models(
    costs: LayerCosts,
    devices: int,
    overhead_ms: tuple[float, float],
    microbatches: int,
    run_type: str,
) -> None:
    hop_ms, stage_ms = overhead_ms
    machine = Machine.uniform(devices, hop_ms, stage_ms=stage_ms)
    workload = Workload(costs, machine, microbatches, run_type)
    limits = PlanLimits(max_replicas=1)

    planned = plan_iteration(workload, limits)

    fastest = min(
        time_by_event(workload, plan, per_round)
        for plan in every_stage_plan(workload, {})
        for per_round in divisors(microbatches)
    )
    assert planned.is_best
    assert planned.iteration_ms == pytest.approx(fastest, abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.lists(times, min_size=2, max_size=3), st.integers(2, 3), st.sampled_from([2, 4]))
def test_equals_brute_force_with_a_heavy_head(
    body: list[float], devices: int, microbatches: int
) -> None:
    """Some layers and a head of ten times their weight, which may run on all devices at once."""
    head = len(body)
    costs = LayerCosts((*(LayerCost(time, 2 * time) for time in body), LayerCost(20.0, 40.0)))
    workload = Workload(costs, Machine.uniform(devices, 0.25), microbatches)

    planned = plan_iteration(workload, PlanLimits(heavy_layers=frozenset({head}), fused_layers=1))

    fastest = min(
        time_by_event(workload, plan, per_round)
        for plan in every_stage_plan(workload, {head: devices})
        for per_round in divisors(microbatches)
        if len(plan.bwd_plan[0]) == 1
    )
    assert planned.iteration_ms == pytest.approx(fastest, abs=1e-9)


@pytest.mark.parametrize("rules", [EngineRules(), ENGINE_RULES])
@pytest.mark.parametrize("mode", ["layerwise", "async"])
def test_equals_brute_force_in_the_long_run(mode: str, rules: EngineRules) -> None:
    """Iterations that overlap are compared by their pace, here that of the last 6 of 12."""
    layers = tuple(LayerCost(time, 2 * time, optimizer_ms=1.0) for time in (1.0, 3.0, 2.0))
    workload = Workload(LayerCosts(layers), Machine.uniform(3, 0.5), 3, mode=mode, rules=rules)
    limits = PlanLimits(max_replicas=1, microbatches_per_round=(3,))

    planned = plan_iteration(workload, limits)

    paces = []
    for plan in every_stage_plan(workload, {}):
        ends = EventByEvent(workload, plan, 3, 12).run().iteration_ends
        paces.append((ends[-1] - ends[-7]) / 6)
    assert planned.iteration_ms == pytest.approx(min(paces), rel=1e-9)


@pytest.mark.parametrize("times", [(1, 2, 1, 5, 1, 1, 2, 3), (3, 1, 4, 1, 5, 9, 2, 6), (1,) * 8])
def test_scan_and_small_changes_come_near_the_best_of_all_plans(times: tuple[int, ...]) -> None:
    """Eight layers have 5462 plans: too many to try them all as a rule, few enough for once."""
    costs = LayerCosts(tuple(LayerCost(float(time), 2.0 * time) for time in times))
    workload = Workload(costs, Machine.uniform(3, 0.25), 6)
    limits = PlanLimits(max_replicas=1, microbatches_per_round=(6,))
    space = PlanSpace(workload, limits)
    everything = Search(space, 1 << 60, 0.0, is_thorough=True)
    everything.run(try_every_plan)

    planned = plan_iteration(workload, limits)

    assert not planned.is_best
    assert planned.tried < everything.tried / 5
    assert planned.iteration_ms <= 1.02 * everything.best_ms


SYNC_PERCENT = {
    "Qwen3-1.7B": 8.5,
    "Llama-3.1-8B": 6.6,
    "GPT-OSS-20B": 7.5,
    "Qwen3-32B": 3.0,
    "Qwen3-235B-LoRA": 2.6,
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", published_names())
def test_halves_the_published_bubbles(name: str, mode: str) -> None:
    """With stages no larger than the published ones, and only the head on several devices."""
    model = published_model(name)

    planned = plan_iteration(model.workload(mode), model.limits)

    assert planned.bubble_percent <= (SYNC_PERCENT[name] if mode == "sync" else 0.5)
    assert planned.plan.bwd_plan[0] == range(len(model.costs) - 1, len(model.costs))
    planned.plan.check_valid(len(model.costs), "fused")
    iterations = 1 if mode == "sync" else 100
    simulation = simulate(
        model.workload(mode),
        planned.plan,
        microbatches_per_round=planned.microbatches_per_round,
        iterations=iterations,
    )
    ends = (0.0, *simulation.ends_ms) if mode == "sync" else simulation.ends_ms
    late = 1 if mode == "sync" else 48
    pace = (ends[-1] - ends[-1 - late]) / late
    assert pace == pytest.approx(planned.iteration_ms, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_plan_is_legal_and_steady(data: st.DataObject) -> None:
    machine = data.draw(machines())
    workload = Workload(
        data.draw(layer_costs(10)),
        machine,
        data.draw(st.sampled_from([1, 4, 6])),
        data.draw(st.sampled_from(["infer", "train", "fused"])),
        data.draw(st.sampled_from(["sync", "layerwise", "async"])),
        rules=EngineRules(*(data.draw(st.booleans()) for _ in range(3))),
    )
    limits = PlanLimits(
        forward_layers=data.draw(st.sampled_from([None, 2, 5])),
        backward_layers=data.draw(st.sampled_from([None, 1, 3])),
        fused_layers=data.draw(st.sampled_from([None, 1, 2])),
        min_stages=data.draw(st.sampled_from([1, 3])),
        max_replicas=data.draw(st.sampled_from([None, 1, 2])),
    )

    planned = plan_iteration(workload, limits, effort=1500)

    plan = planned.plan
    plan.check_valid(len(workload.costs), workload.run_type)
    assert all(len(stage) <= (limits.forward_layers or 99) for stage in plan.fwd_plan)
    fused = plan.bwd_plan[:1] if workload.run_type == "fused" else []
    assert all(len(stage) <= (limits.fused_layers or 99) for stage in fused)
    rest = plan.bwd_plan[len(fused) :]
    assert all(len(stage) <= (limits.backward_layers or 99) for stage in rest)
    assert max((*plan.fwd_replicas, *plan.bwd_replicas)) <= (limits.max_replicas or len(machine))
    assert workload.microbatches % planned.microbatches_per_round == 0
    assert planned.iteration_ms >= planned.bound_ms * (1 - 1e-9)
    assert plan_iteration(workload, limits, effort=1500) == planned


def test_a_stage_count_below_the_minimum_is_not_planned() -> None:
    costs = LayerCosts.uniform(6, 1.0, 2.0)
    for run_type, stages in (("infer", 4), ("train", 4), ("fused", 8)):
        workload = Workload(costs, Machine.uniform(1), 2, run_type)
        plan = plan_iteration(workload, PlanLimits(min_stages=stages)).plan
        count = len(plan.fwd_plan) + (len(plan.bwd_plan) if run_type == "fused" else 0)
        assert count >= stages
        if run_type == "train":
            assert len(plan.bwd_plan) >= stages


# --- more room never hurts -------------------------------------------------------------------


def planned_ms(workload: Workload, limits: PlanLimits | None = None) -> float:
    try:
        planned = plan_iteration(workload, limits)
    except InvalidValueError:
        return float("inf")
    assert planned.is_best
    return planned.iteration_ms


@settings(max_examples=40, deadline=None)
@given(
    layer_costs(4),
    st.integers(2, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["sync", "async"]),
    st.data(),
)
def test_a_relaxed_constraint_never_makes_it_slower(
    costs: LayerCosts, devices: int, microbatches: int, mode: str, data: st.DataObject
) -> None:
    rate, memory = data.draw(st.sampled_from([5.0, 20.0])), data.draw(st.sampled_from([90, 150]))
    tight = DeviceSpec(memory_bytes=memory, upload_bytes_per_ms=rate, download_bytes_per_ms=rate)
    workload = Workload(
        costs,
        Machine.uniform(devices, 0.5, like=tight),
        microbatches,
        mode=mode,
        rules=EngineRules(overlap_calls=False),
    )
    heavy = frozenset({len(costs) - 1})
    limits = PlanLimits(forward_layers=2, fused_layers=1, max_replicas=1, heavy_layers=heavy)
    now_ms = planned_ms(workload, limits)
    relaxed = data.draw(
        st.sampled_from(
            [
                replace(tight, memory_bytes=2 * memory),
                replace(tight, memory_bytes=None),
                replace(tight, upload_bytes_per_ms=2 * rate),
                replace(tight, upload_bytes_per_ms=None),
                replace(tight, download_bytes_per_ms=None),
                replace(tight, speed=2.0),
            ]
        )
    )
    machine = Machine.uniform(devices, data.draw(st.sampled_from([0.5, 0.0])), like=relaxed)
    roomier = data.draw(
        st.sampled_from(
            [
                limits,
                replace(limits, forward_layers=None),
                replace(limits, fused_layers=None),
                replace(limits, max_replicas=2),
            ]
        )
    )

    then_ms = planned_ms(replace(workload, machine=machine), roomier)

    assert then_ms <= now_ms * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(layer_costs(4), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.booleans())
def test_one_more_device_never_makes_it_slower(
    costs: LayerCosts, devices: int, microbatches: int, early_recompute: bool
) -> None:
    rules = EngineRules(early_recompute=early_recompute)
    few, more = (
        Workload(costs, Machine.uniform(count), microbatches, rules=rules)
        for count in (devices, devices + 1)
    )

    limits = PlanLimits(max_replicas=1)
    assert planned_ms(more, limits) <= planned_ms(few, limits) * (1 + 1e-9)


# --- memory, links, speeds -------------------------------------------------------------------


def test_stages_get_small_where_memory_is() -> None:
    layer = LayerCost(1.0, 2.0, weight_bytes=100, gradient_bytes=100, activation_bytes=50)
    costs = LayerCosts((layer,) * 12)
    roomy = Workload(costs, Machine.uniform(2), 4)
    tight = replace(roomy, machine=Machine.uniform(2, like=DeviceSpec(memory_bytes=900)))

    planned = plan_iteration(tight)

    assert plan_iteration(roomy).plan != planned.plan
    assert all(need.excess_bytes <= 0 for need in memory_of(planned))
    # Three layers, running or on their way: 300 of weights, 300 of gradients.
    assert max(len(stage) for stage in planned.plan.bwd_plan) <= 3


def test_a_layer_that_cannot_fit_is_named() -> None:
    layer = LayerCost(1.0, 2.0, weight_bytes=100)
    costs = LayerCosts((layer, LayerCost(1.0, 2.0, weight_bytes=5000), layer), name="big")
    machine = Machine.uniform(2, like=DeviceSpec("gpu", memory_bytes=1000))

    with pytest.raises(InvalidValueError, match=r"no plan of big fits: .* layer 1 needs \d+ bytes"):
        plan_iteration(Workload(costs, machine, 2))


def test_limits_that_nothing_keeps_to_are_refused() -> None:
    workload = Workload(LayerCosts.uniform(3, 1.0, 2.0), Machine.uniform(2), 2)
    contradiction = PlanLimits(min_stages=99, forward_layers=1, backward_layers=1, fused_layers=3)
    plan_iteration(workload, contradiction)  # as many stages as there are layers will do

    # A fused stage of more than 1 layer is not allowed, and neither is one of the heavy last.
    with pytest.raises(InvalidValueError, match="microbatches_per_round has 3; expected divisors"):
        plan_iteration(workload, PlanLimits(microbatches_per_round=(3,)))


def test_uploads_that_cannot_hide_are_charged() -> None:
    """On a slow link, longer stages and fewer calls move fewer bytes per computation."""
    layer = LayerCost(1.0, 2.0, weight_bytes=40)
    costs = LayerCosts((layer,) * 8)
    fast = Workload(costs, Machine.uniform(4, 0.1), 8)
    slow = replace(
        fast,
        machine=Machine.uniform(
            4, 0.1, like=DeviceSpec(upload_bytes_per_ms=20.0, link="bus"), links={"bus": 20.0}
        ),
    )
    blind, planned = plan_iteration(fast), plan_iteration(slow)

    blind_ms = simulate(
        slow, blind.plan, microbatches_per_round=blind.microbatches_per_round
    ).makespan_ms

    assert planned.iteration_ms > blind.iteration_ms
    assert planned.iteration_ms <= blind_ms
    assert planned.microbatches_per_round == 8


def test_a_slow_device_gets_less_to_do() -> None:
    machine = Machine((DeviceSpec("fast"), DeviceSpec("slow", speed=0.5), DeviceSpec("fast")))
    workload = Workload(LayerCosts.uniform(24, 2.0, 4.0), machine, 12)

    planned = plan_iteration(workload)

    timeline = simulate(workload, planned.plan).timeline
    computed = [
        spec.speed * sum(span.end_ms - span.begin_ms for span in timeline.of(index, *COMPUTE))
        for index, spec in enumerate(machine.devices)
    ]
    assert computed[1] < 0.7 * min(computed[0], computed[2])
    equal = plan_iteration(replace(workload, machine=Machine.uniform(3)))
    equal_ms = simulate(workload, equal.plan, iterations=12).makespan_ms / 12
    assert planned.iteration_ms < 0.9 * equal_ms


def test_devices_of_a_kind_have_costs_of_their_own() -> None:
    """On the second kind the first layer takes ten times as long: it is better kept away."""
    machine = Machine((DeviceSpec("a", kind="a"), DeviceSpec("b", kind="b")))
    costs = LayerCosts.uniform(2, 1.0, 2.0)
    on_b = LayerCosts((LayerCost(10.0, 20.0), LayerCost(1.0, 2.0)))
    workload = Workload(costs, machine, 4, "infer", costs_by_kind={"b": on_b})

    plan = plan_iteration(workload).plan

    ends = simulate(workload, plan, iterations=2).ends_ms
    assert plan.fwd_plan == [range(1), range(1, 2)]
    assert ends[-1] == pytest.approx(2 * 5.0)


# --- several models --------------------------------------------------------------------------


def test_models_planned_together_are_no_slower_than_planned_alone() -> None:
    machine = Machine.uniform(3, 0.25)
    small = Workload(LayerCosts.uniform(5, 1.0, 2.0, name="small"), machine, 4)
    large = Workload(LayerCosts.uniform(9, 2.0, 5.0, name="large"), machine, 4)

    together = plan_models([small, large])

    alone = [plan_iteration(workload) for workload in (small, large)]
    alone_ms = simulate(
        [small, large],
        [planned.plan for planned in alone],
        microbatches_per_round=[planned.microbatches_per_round for planned in alone],
    ).makespan_ms
    assert [planned.workload.costs.name for planned in together] == ["small", "large"]
    for planned in together:
        planned.plan.check_valid(len(planned.workload.costs), "fused")
        assert planned.iteration_ms == together[0].iteration_ms <= alone_ms
    both_ms = simulate(
        [small, large],
        [planned.plan for planned in together],
        microbatches_per_round=[planned.microbatches_per_round for planned in together],
    ).makespan_ms
    assert both_ms == pytest.approx(together[0].iteration_ms)


def test_models_planned_together_must_share_what_they_share() -> None:
    workload = Workload(LayerCosts.uniform(2, 1.0, 2.0), Machine.uniform(2), 2)

    with pytest.raises(InvalidValueError, match="got no workloads"):
        plan_models([])
    with pytest.raises(InvalidValueError, match="got 1 limits for 2 models"):
        plan_models([workload, workload], [PlanLimits()])
    with pytest.raises(InvalidValueError, match="model 1 has another mode than model 0"):
        plan_models([workload, replace(workload, mode="async")])


def test_one_model_together_is_one_model() -> None:
    workload = Workload(LayerCosts.uniform(3, 1.0, 2.0), Machine.uniform(2), 2)

    planned: Planned = plan_models([workload])[0]

    assert planned == plan_iteration(workload)
