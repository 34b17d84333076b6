"""When streams get somewhere, on the host's clock."""

from __future__ import annotations

import threading

import pytest
import torch

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import DevicePool
from roundpipe.devices.accelerator import AcceleratorDevice
from roundpipe.devices.base import Category, Moment, Stream
from roundpipe.trace import clock_ns
from support.backends import Backend, run_on

FAR_NS = 1_000_000  # how far the clocks of device and host may be apart


def test_moments_of_a_stream_follow_each_other_on_the_hosts_clock(pool: DevicePool) -> None:
    device = pool.devices[0]

    def work() -> list[int]:
        device.start_clock()
        moments: list[Moment] = []
        with device.compute_scope():
            x = device.empty(torch.zeros(64, 64), Stream.COMPUTE, Category.TEMPORARIES).fill_(1.0)
            for _ in range(3):
                moments.append(device.moment(Stream.COMPUTE))
                x = x @ x
            moments.append(device.moment(Stream.COMPUTE))
        return [moment.ns() for moment in moments]

    begin_ns = clock_ns()
    times_ns = run_on(pool, 0, work).result()
    end_ns = clock_ns()
    assert times_ns == sorted(times_ns)
    assert begin_ns - FAR_NS <= times_ns[0]
    assert times_ns[-1] <= end_ns + FAR_NS


def test_a_moment_behind_a_copy_that_is_held_is_told_when_it_has_passed(
    backend: Backend, pool: DevicePool
) -> None:
    device = pool.devices[0]
    held = backend.hold(device, Stream.WEIGHTS)
    if held is None or not isinstance(device, AcceleratorDevice):
        pytest.skip("copies cannot be held, or moments are the host's own")
    source = device.host_empty(torch.ones(8))
    target = device.empty(source, Stream.WEIGHTS, Category.WEIGHTS)
    told = threading.Event()
    with held:
        device.copy(target, source, Stream.WEIGHTS)
        moment = device.moment(Stream.WEIGHTS)

        def ask() -> None:
            moment.ns()
            told.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert not told.wait(0.05)
        released_ns = clock_ns()
    asking.join()
    assert moment.ns() >= released_ns - FAR_NS


def test_an_engine_on_any_devices_measures_its_layers(pool: DevicePool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    plan = ModelExecutePlan([range(2)], [range(2, 3), range(2)])
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    with RoundPipe(model, devices=pool, model_run_config=config) as pipe:
        with pipe.profile() as profile:
            for _ in range(2):
                pipe.forward_backward((torch.ones(6, 8),), loss_fn=lambda out, _: out.sum())
                pipe.step(lambda: None)
        costs = pipe.costs()
    assert costs.source == "measured"
    assert all(layer.forward_ms >= 0 and layer.backward_ms >= 0 for layer in costs.layers.layers)
    spans = profile.timeline.spans
    assert all(span.begin_ms <= span.end_ms for span in spans)
    kinds = {span.kind for span in spans}
    assert {"forward", "fused", "backward", "step"} <= kinds
    if not pool.devices[0].shares_host_memory:
        assert {"recompute", "upload", "download"} <= kinds
