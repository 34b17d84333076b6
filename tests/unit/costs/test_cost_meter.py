"""From samples of runs to costs of layers: what is dropped, what is smoothed, what is unknown."""

from __future__ import annotations

import pytest

from roundpipe.costs import CostMeter, RunSamples
from roundpipe.costs.notes import LayerSample, SizeSample
from roundpipe.plan import DeviceSpec, LayerCost, LayerCosts, Machine
from roundpipe.trace import Span

SIZES = LayerCosts(
    (
        LayerCost(0.1, weight_bytes=100, gradient_bytes=100),
        LayerCost(0.1, weight_bytes=300, gradient_bytes=300),
    ),
    "net",
)


def samples(*times: tuple[str, int, int, float]) -> RunSamples:
    return RunSamples([LayerSample(*each) for each in times])


def both_layers(microbatch: int, first_ms: float, second_ms: float) -> list[LayerSample]:
    return [
        LayerSample("forward", 0, microbatch, first_ms),
        LayerSample("recompute", 0, microbatch, first_ms + 1),
        LayerSample("backward", 0, microbatch, 2 * first_ms),
        LayerSample("forward", 1, microbatch, second_ms),
        LayerSample("loss", 1, microbatch, 0.5),
        LayerSample("backward", 1, microbatch, 2 * second_ms),
    ]


def run(meter: CostMeter, parts: list[RunSamples], *, keeps_grad: bool = True) -> None:
    record = meter.open_run(keeps_grad, devices=len(parts))
    for part in parts:
        record.add(part)
    meter.settle()


def fused_run(meter: CostMeter, *times_ms: tuple[float, float]) -> None:
    times = [each for m, pair in enumerate(times_ms) for each in both_layers(m, *pair)]
    run(meter, [RunSamples(times)])


def test_the_first_microbatch_is_dropped_and_the_others_give_a_median() -> None:
    meter = CostMeter()
    fused_run(meter, (900.0, 900.0), (3.0, 5.0), (4.0, 6.0), (3.5, 90.0))

    costs = meter.layer_costs(SIZES, "fused")

    assert costs is not None
    first, second = costs.layers
    assert (first.forward_ms, first.recompute_ms, first.backward_ms) == (3.5, 4.5, 7.0)
    assert (second.forward_ms, second.recompute_ms, second.backward_ms) == (6.5, None, 12.0)
    assert second.again_ms == 6.5  # the loss is a part of the last layer's forward
    assert second.weight_bytes == 300


def test_one_call_that_was_disturbed_counts_as_one_of_many() -> None:
    meter = CostMeter()
    for factor in (1.0, 1.0, 40.0, 1.0):
        fused_run(meter, *[(3.0 * factor, 5.0 * factor)] * 4)

    costs = meter.layer_costs(SIZES, "fused")

    assert costs is not None
    assert [layer.forward_ms for layer in costs.layers] == [3.0, 5.5]


def test_as_long_as_a_layer_has_not_run_twice_there_are_no_costs() -> None:
    meter = CostMeter()
    fused_run(meter, (3.0, 5.0))
    assert meter.layer_costs(SIZES, "fused") is None
    fused_run(meter, (3.0, 5.0))
    assert meter.layer_costs(SIZES, "fused") is not None


def test_evaluation_tells_nothing_about_training_but_training_about_evaluation() -> None:
    evaluated, trained = CostMeter(), CostMeter()
    for _ in range(2):
        part = samples(("forward", 0, 0, 2.0), ("forward", 1, 0, 3.0))
        run(evaluated, [part], keeps_grad=False)
        fused_run(trained, (3.0, 5.0))
    assert evaluated.layer_costs(SIZES, "fused") is None
    assert evaluated.layer_costs(SIZES, "infer") is not None
    assert trained.layer_costs(SIZES, "infer") is not None


def test_layers_below_everything_trainable_are_not_recomputed() -> None:
    meter = CostMeter()
    for _ in range(2):
        times = [each for each in both_layers(0, 3.0, 5.0) if each.layer or each.what == "forward"]
        run(meter, [RunSamples(times)])

    costs = meter.layer_costs(SIZES, "fused")

    assert costs is not None
    assert (costs.layers[0].again_ms, costs.layers[0].backward_ms) == (0.0, 0.0)


def test_a_run_that_failed_on_one_device_is_not_taken_in() -> None:
    meter = CostMeter()
    record = meter.open_run(True, devices=2)
    record.add(RunSamples(both_layers(0, 3.0, 5.0)))
    meter.settle()
    assert meter.runs == 0
    for _ in range(20):  # and makes room
        fused_run(meter, (3.0, 5.0))
    assert meter.runs == 20


def test_bytes_are_those_in_front_of_a_layer_and_within_it() -> None:
    meter = CostMeter()
    fused_run(meter, (1.0, 1.0), (1.0, 1.0))
    sizes = [
        SizeSample("output", 0, 64), SizeSample("output", 1, 8),
        SizeSample("forward", 0, 70), SizeSample("activation", 1, 90),
    ]  # fmt: skip
    run(meter, [RunSamples(both_layers(0, 1.0, 1.0), sizes)])

    costs = meter.layer_costs(SIZES, "fused")

    assert costs is not None
    first, second = costs.layers
    assert (first.saved_input_bytes, second.saved_input_bytes) == (0, 64)
    assert (first.forward_bytes, second.activation_bytes) == (70, 90)


def test_a_step_is_shared_out_by_the_bytes_that_it_updates() -> None:
    meter = CostMeter()
    fused_run(meter, (1.0, 1.0), (1.0, 1.0))
    for end_ns in (900_000_000, 8_000_000, 8_000_000):  # the first makes the optimizer's state
        meter.hear(Span("step", "net", -1, -1, -1, 0, end_ns))
    meter.hear(Span("publish", "net", -1, -1, -1, 0, 10**12))
    meter.settle()

    costs = meter.layer_costs(SIZES, "fused")

    assert costs is not None
    assert [layer.optimizer_ms for layer in costs.layers] == pytest.approx([2.0, 6.0])


def compute(stage: int, device: str, microbatch: int, begin_ms: float, end_ms: float) -> Span:
    begin_ns, end_ns = int(begin_ms * 1e6), int(end_ms * 1e6)
    return Span("forward", device, 0, stage, microbatch, begin_ns, end_ns, 0, range(1))


def test_the_machine_gets_rates_hand_over_times_and_what_stages_take_besides_layers() -> None:
    meter = CostMeter()
    spans = [
        compute(0, "a", 0, 0, 4), compute(0, "a", 1, 4, 8), compute(0, "a", 2, 8, 12),
        compute(1, "b", 0, 4.5, 5.5), compute(1, "b", 1, 8.25, 9.25), compute(1, "b", 2, 12.5, 13),
        Span("upload", "a", 0, 0, -1, 0, 2_000_000, nbytes=1_000_000),
        Span("download", "b", 0, 1, -1, 0, 1_000_000, nbytes=3_000_000),
        Span("upload", "a", 0, 0, -1, 0, 2_000_000, nbytes=10),  # says nothing about bandwidth
    ]  # fmt: skip
    times = [LayerSample("forward", 0, m, 3.5) for m in range(3)]
    run(meter, [RunSamples(times, [], spans[:3]), RunSamples([], [], spans[3:])])

    machine = meter.machine(Machine((DeviceSpec("a"), DeviceSpec("b"))))

    assert machine.hop_ms == pytest.approx(0.25)  # the fastest of those that were waited for
    assert machine.stage_ms == pytest.approx(0.5)
    assert machine.devices[0].upload_bytes_per_ms == pytest.approx(500_000)
    assert machine.devices[1].download_bytes_per_ms == pytest.approx(3_000_000)
