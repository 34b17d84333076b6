"""Which version of the parameters each layer of each call computes with, whatever is late.

With masters θ_0, θ_1, ... after each step, call t computes with θ_max(t-1,0) beside asynchronous
steps, and with θ_t behind synchronous ones or a ``synchronize``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.devices import CpuChecks, DevicePool, open_cpu_pool
from roundpipe.devices.base import Stream
from roundpipe.parameters import ParameterStore
from support.cases import config_of, split_plan, sum_loss
from support.faults import watched_pool
from support.waits import start, watched_waits

LAYERS = 4
INFER = RoundPipeRunConfig(execute_plan=split_plan(LAYERS, LAYERS))


class Versions(nn.Module):
    """A layer whose weight is its version, and who writes down what it saw."""

    def __init__(self, index: int, seen: list[tuple[int, float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.index, self.seen = index, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.index, self.weight.item()))  # appending is atomic
        return x + self.weight


class Training:
    """A model whose step makes the next version."""

    def __init__(self, pool: DevicePool) -> None:
        self.seen: list[tuple[int, float]] = []
        model = nn.Sequential(*(Versions(index, self.seen) for index in range(LAYERS)))
        self.pipe = RoundPipe(
            model, devices=pool, model_run_config=config_of(LAYERS, LAYERS, 3), name="net"
        )

    def call(self) -> float:
        """Run a call; the one version that all layers saw on all microbatches, in all passes."""
        self.seen.clear()
        self.pipe.forward_backward((torch.ones(3),), loss_fn=sum_loss)
        assert {index for index, _ in self.seen} == set(range(LAYERS))
        # Forward on three microbatches, and recompute but for the fused last layer.
        assert len(self.seen) == 3 * (2 * LAYERS - 1)
        (version,) = {version for _, version in self.seen}
        return version

    def step_fn(self) -> None:
        with torch.no_grad():
            for master in self.pipe.parameters():
                master.add_(1.0)

    @property
    def in_model(self) -> list[float]:
        return [float(p.item()) for p in self.pipe.model.parameters()]


@contextlib.contextmanager
def training(pool: DevicePool) -> Iterator[Training]:
    made = Training(pool)
    with made.pipe:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[DevicePool]:
    with open_cpu_pool(2) as pool:
        yield pool


@pytest.mark.parametrize("delay_seed", [None, 1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_staleness_is_exactly_one_or_none(is_async: bool, delay_seed: int | None) -> None:
    checks = CpuChecks(delay_seed=delay_seed, max_delay_s=0.001)
    with watched_pool(2, checks) as pool, training(pool) as run:
        seen = []
        for _ in range(5):
            seen.append(run.call())
            run.pipe.step(run.step_fn, is_async=is_async)
        run.pipe.synchronize()
        assert run.in_model == [5.0] * LAYERS
    assert seen == [max(t - 1, 0) if is_async else t for t in range(5)]


def test_a_step_that_ends_long_before_the_call_is_still_not_seen(plain: DevicePool) -> None:
    with training(plain) as run:
        run.call()
        over = threading.Event()

        def step() -> None:
            run.step_fn()
            over.set()

        run.pipe.step(step)
        over.wait()
        run.pipe._stepper._done.wait(1, "the test")
        assert run.call() == 0.0


def test_a_step_that_ends_long_after_the_call_does_not_hold_it_up(plain: DevicePool) -> None:
    with training(plain) as run:
        run.call()
        go = threading.Event()

        def step() -> None:
            go.wait()
            run.step_fn()

        run.pipe.step(step)
        assert run.call() == 0.0  # while the step waits for what comes behind this call
        go.set()
        run.pipe.step(run.step_fn)
        assert run.call() == 1.0


@pytest.mark.parametrize("stream", list(Stream)[1:])
def test_a_stream_that_is_held_back_beside_a_step_changes_no_version(stream: Stream) -> None:
    with watched_pool() as pool, training(pool) as run:
        run.call()
        go = threading.Event()

        def step() -> None:
            go.wait()
            run.step_fn()

        with pool.hold(stream) as hold:

            def release() -> None:
                hold.wait_reached()  # a copy of the second call stands; its step may run now
                go.set()
                run.pipe._stepper._done.wait(1, "the test")
                hold.release()

            helper = threading.Thread(target=release)
            run.pipe.step(step)
            helper.start()
            assert run.call() == 0.0
            helper.join()
        run.pipe.step(run.step_fn)
        assert run.call() == 1.0


def test_a_call_waits_for_a_layer_that_is_still_being_published(
    plain: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Layer 3 is published only once layer 0 of the call that is entitled to it has run.
    ran, original = threading.Event(), ParameterStore._publish_parameter

    def late(self: ParameterStore, record: Any, declared: Any) -> None:
        if 3 in record.layers and self.submitted_version == 2:
            ran.wait()
        original(self, record, declared)

    with training(plain) as run:
        run.call()
        run.pipe.step(run.step_fn)
        run.call()
        monkeypatch.setattr(ParameterStore, "_publish_parameter", late)
        run.pipe.model[0].register_forward_hook(lambda *_: ran.set())
        run.pipe.step(run.step_fn)
        assert run.call() == 1.0


def test_a_gradient_belongs_to_the_step_behind_its_call(
    plain: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first step folds only when the second call has come to its end.
    go, original = threading.Event(), ParameterStore.fold
    folded: list[list[float]] = []

    def late(self: ParameterStore, record: Any, contributions: Any) -> None:
        go.wait()
        original(self, record, contributions)

    with training(plain) as run:

        def step() -> None:
            folded.append(
                [float(p.grad.item()) for p in run.pipe.parameters() if p.grad is not None]
            )
            run.pipe.zero_grad()

        monkeypatch.setattr(ParameterStore, "fold", late)
        run.pipe.forward_backward((torch.ones(3),), loss_fn=sum_loss)
        run.pipe.step(step)
        run.pipe.forward_backward((torch.ones(30),), loss_fn=sum_loss)
        go.set()
        run.pipe.step(step)
        run.pipe.synchronize()
    assert folded == [[3.0] * LAYERS, [30.0] * LAYERS]


def test_at_most_one_step_is_in_flight(plain: DevicePool) -> None:
    order: list[str] = []
    go = threading.Event()

    def first() -> None:
        go.wait()
        order.append("first is over")

    with training(plain) as run, watched_waits() as waits:
        run.pipe.step(first)
        second = start(waits, lambda: run.pipe.step(lambda: order.append("second runs")))
        assert waits.blocked_on("steps done of net")
        go.set()
        second.result(30)
        run.pipe.synchronize()
    assert order == ["first is over", "second runs"]


OPERATIONS = st.lists(
    st.sampled_from(["call", "async", "sync", "synchronize", "evaluate"]), max_size=12
)


@settings(deadline=None, max_examples=25)
@given(operations=OPERATIONS)
def test_any_order_of_calls_and_steps(plain: DevicePool, operations: list[str]) -> None:
    made = readable = 0
    with training(plain) as run:
        for operation in operations:
            if operation == "call":
                assert run.call() == readable
            elif operation == "evaluate":
                run.seen.clear()
                run.pipe.eval()
                with torch.no_grad():
                    run.pipe(torch.ones(3), roundpipe_run_config=INFER)
                run.pipe.train()
                assert {version for _, version in run.seen} == {readable}
            elif operation == "synchronize":
                run.pipe.synchronize()
                readable = made
                assert run.in_model == [made] * LAYERS
            else:
                run.pipe.step(run.step_fn, is_async=operation == "async")
                readable, made = (made if operation == "async" else made + 1), made + 1
