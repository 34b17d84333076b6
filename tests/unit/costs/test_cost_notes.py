"""What workers note: layers' times, their shares of a backward, bytes, spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.costs import RunNotes
from roundpipe.costs.notes import LayerSample
from roundpipe.devices import CpuChecks, open_cpu_pool
from roundpipe.devices.base import HostMoment, Moment, Stream
from roundpipe.devices.cpu import CpuDevice
from roundpipe.trace import EventLog, Span

MS = 1_000_000


class ScriptedClock(CpuDevice):
    """A device on which every look at the clock is a millisecond after the last one."""

    def __init__(self, shares_host_memory: bool = True) -> None:
        super().__init__(0, 1)
        self.shares_host_memory = shares_host_memory
        self._now_ns = 0

    def moment(self, stream: Stream) -> Moment:
        self._now_ns += MS
        return HostMoment(self._now_ns)


def spans_of(log: EventLog) -> list[tuple[str, int, int, int]]:
    return [(s.phase, s.microbatch, s.begin_ns // MS, s.end_ns // MS) for s in log]


@pytest.fixture
def notes() -> RunNotes:
    return RunNotes(ScriptedClock(), call=3, iteration=2, measures_sizes=False)


def test_forward_of_layers_and_the_span_around_them(notes: RunNotes) -> None:
    log = EventLog()
    notes.stage("forward", 1, range(2, 4))
    notes.begin(5)  # at 1 ms
    for layer in (2, 3):
        notes.ran(layer, notes.now())
    notes.end()

    samples = notes.samples(log)

    assert samples.times == [LayerSample("forward", 2, 5, 1.0), LayerSample("forward", 3, 5, 1.0)]
    assert list(log) == samples.spans
    (span,) = log
    assert span == Span("forward", "cpu:0", 3, 1, 5, 1 * MS, 6 * MS, 2, range(2, 4), 0)


def backward_of(notes: RunNotes, marked: list[int], arrivals: list[int]) -> list[LayerSample]:
    notes.stage("backward", 4, range(3))
    notes.begin(0)
    for layer in range(3):
        notes.ran(layer, notes.now())
    for layer in marked:
        notes.marked(layer)
    notes.backward()
    for layer in arrivals:
        notes.reached(layer)
    notes.backward_ended()
    return [each for each in notes.samples(EventLog()).times if each.what == "backward"]


def test_a_layers_backward_lasts_until_the_next_layer_is_reached(notes: RunNotes) -> None:
    shares = backward_of(notes, [0, 1, 2], [2, 1, 0])
    # The last layer's begins with backward itself, before its output's hook fires.
    assert [(each.layer, each.time_ms) for each in shares] == [(2, 2.0), (1, 1.0), (0, 1.0)]


def test_layers_without_gradient_take_no_part(notes: RunNotes) -> None:
    shares = backward_of(notes, [1, 2], [2, 1])
    assert [(each.layer, each.time_ms) for each in shares] == [(2, 2.0), (1, 1.0)]


def test_hooks_that_fire_out_of_order_share_the_whole_as_forward_did(notes: RunNotes) -> None:
    # All three layers hand on one tensor, whose gradient is complete at once.
    shares = backward_of(notes, [0, 1, 2], [0, 1, 2])
    assert [each.layer for each in shares] == [0, 1, 2]
    assert [each.time_ms for each in shares] == pytest.approx([4 / 3] * 3)


def test_where_compute_is_only_enqueued_waiting_for_inputs_is_no_work() -> None:
    notes, log = RunNotes(ScriptedClock(shares_host_memory=False), 0, 0, False), EventLog()
    notes.stage("backward", 1, range(1))
    notes.begin(0)  # 1: the input may still be on its way
    notes.entered()  # 2: it is there
    notes.ran(0, notes.now())  # 3 to 4
    recompute_end = notes.now()  # 5; the gradient may still be on its way
    notes.recomputed(recompute_end)  # 6: it is there
    notes.backward()  # 7
    notes.backward_ended()  # 8
    notes.end()
    notes.samples(log)
    assert spans_of(log) == [("recompute", 0, 2, 5), ("backward", 0, 6, 8)]


def test_short_waits_for_a_step_are_not_noted(notes: RunNotes) -> None:
    notes.waited_for_step(0, range(1), 0)  # since the clock began
    notes.transferred(0, range(1), "upload", 0, notes.now(), notes.now())  # nothing to send
    log = EventLog()
    notes.write_spans(log)
    assert [span.phase for span in log] == ["step_wait"]


# --- in the engine ---------------------------------------------------------------------------


class Residual(nn.Module):
    """Takes and returns a pair, of which it passes the first on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        kept, x = pair
        return kept, self.linear(x)


@pytest.fixture
def limited() -> Iterator[RoundPipe]:
    plan = ModelExecutePlan([range(2)], [range(2, 3), range(2)])
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    model = nn.Sequential(Residual(), Residual(), Residual())
    with open_cpu_pool(2, CpuChecks(limit_bytes=1 << 20)) as pool:
        with RoundPipe(model, devices=pool, model_run_config=config) as pipe:
            yield pipe


def test_bytes_come_from_the_layers_outputs_and_the_devices_ledger(limited: RoundPipe) -> None:
    kept, x = torch.randn(4, 8), torch.randn(4, 8)
    for _ in range(2):
        limited.forward_backward(((kept, x),), loss_fn=lambda out, _: out[1].sum())

    costs = limited.costs()

    assert costs.source == "measured"
    first, second, third = costs.layers.layers
    # Two of the four rows; what a layer only passes through is not its output.
    assert (first.saved_input_bytes, second.saved_input_bytes) == (0, 2 * 8 * 4)
    assert second.forward_bytes >= 2 * 8 * 4
    assert second.activation_bytes >= 2 * 8 * 4
    assert third.activation_bytes >= 2 * 8 * 4
    assert all(device.memory_bytes == 1 << 20 for device in costs.machine.devices)


def test_each_kind_of_time_is_measured_for_each_layer(limited: RoundPipe) -> None:
    x = torch.randn(4, 8)
    for _ in range(3):
        limited.forward_backward(((x, x),), loss_fn=lambda out, _: out[1].sum())
        limited.step(lambda: None)
    limited.synchronize()
    first, second, third = limited.costs().layers.layers
    assert all(layer.forward_ms > 0 for layer in (first, second, third))
    assert all(layer.backward_ms > 0 for layer in (first, second, third))
    assert first.recompute_ms is not None
    assert third.recompute_ms is None  # in the fused stage: nothing is recomputed
    assert second.optimizer_ms > 0
    phases = {span.phase for span in limited.event_log}
    assert {"forward", "fused", "recompute", "backward", "upload", "download", "step"} <= phases


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_recompute_by_layer_is_measured_as_well(limited: RoundPipe, grain: str) -> None:
    config = RoundPipeRunConfig(recompute_grain=grain)
    x = torch.randn(4, 8)
    for _ in range(2):
        limited.forward_backward(((x, x),), loss_fn=lambda out, _: out[1].sum(), run_config=config)
    costs = limited.costs().layers.layers
    assert all(layer.backward_ms > 0 and layer.again_ms > 0 for layer in costs)
