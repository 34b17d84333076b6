"""Which version of the parameters each layer of each call computes with.

Masters hold their own version's number, so a layer sees it in its weights.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe import RoundPipe, optim
from roundpipe.devices import CpuChecks, open_cpu_pool
from support.faults import watched_pool
from support.versions import CONFIG, Gate, Play, advance, build, expected, scaled_sum

PROGRAMS = {
    "asynchronous: the call before last": ("CACACACA", [0, 0, 1, 2]),
    "synchronous: the latest": ("CSCSCSCS", [0, 1, 2, 3]),
    "two calls before one step": ("CCACCACC", [0, 0, 0, 0, 1, 1]),
    "calls without a step": ("CCCC", [0, 0, 0, 0]),
    "synchronize makes the latest visible": ("CAYCACYC", [0, 1, 1, 2]),
    "synchronize between calls without a step": ("CYCYC", [0, 0, 0]),
    "steps without a call": ("AACAAC", [1, 3]),
    "a synchronous step after an asynchronous one": ("CACSCAC", [0, 0, 2, 2]),
    "an asynchronous step after a synchronous one": ("CSCACAC", [0, 1, 1, 2]),
    "evaluation sees what training sees": ("ECAECAECYE", [0, 0, 0, 0, 1, 1, 2]),
    "forward and backward by hand": ("FAFAFSFF", [0, 0, 1, 3, 3]),
    "layer by layer: the latest": ("CLCLCLCYC", [0, 1, 2, 3, 3]),
    "layer by layer, by hand and in evaluation": ("FLEFLE", [0, 1, 1, 2]),
    "an optimizer, asynchronous: the call before last": ("CBCBCBCYC", [0, 0, 1, 2, 3]),
    "layer by layer after an asynchronous step": ("CACLCLCBCLC", [0, 0, 2, 3, 3, 5]),
}


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_call_computes_with_the_version_it_is_entitled_to(name: str, num_devices: int) -> None:
    program, versions = PROGRAMS[name]
    for optimizer_class in (torch.optim.SGD, optim.SGD):
        seen: list[float] = []
        with watched_pool(num_devices, CpuChecks(delay_seed=num_devices)) as pool:
            with RoundPipe(build(seen), devices=pool, model_run_config=CONFIG) as pipe:
                assert Play(pipe, seen, optimizer_class).run(program) == versions
        if not set(program) & set("LB"):
            break  # no optimizer stepped
    assert list(expected(program)) == versions


@settings(max_examples=20, deadline=None)
@given(program=st.text("CFEAASY", min_size=2, max_size=10))
def test_any_program_of_calls_and_steps(program: str) -> None:
    seen: list[float] = []
    with open_cpu_pool(2) as pool:
        with RoundPipe(build(seen), devices=pool, model_run_config=CONFIG) as pipe:
            assert Play(pipe, seen).run(program) == list(expected(program))


def test_a_call_runs_beside_the_step_before_it_and_sees_none_of_it() -> None:
    seen: list[float] = []
    gate = Gate()
    with watched_pool() as pool, RoundPipe(build(seen), devices=pool) as pipe:
        pipe.model_run_config = CONFIG

        def slow_step() -> None:
            advance(pipe)
            gate.stand()

        play = Play(pipe, seen)
        play.run("C")
        pipe.step(slow_step)
        gate.wait_reached()
        # The masters are version 1 already, and the step is not over; the call neither waits for
        # it nor sees it.
        assert play.run("C") == [0, 0]
        assert not gate.is_open
        gate.open()
        assert play.run("ACYC") == [0, 0, 1, 2]


def test_a_slow_step_changes_nothing_and_a_fast_one_neither() -> None:
    """The step is over long before the next call, or just before the next step: all the same."""
    trained: list[list[float]] = []
    for is_slow in (False, True):
        seen: list[float] = []
        gate = Gate()
        with open_cpu_pool(2) as pool:
            with RoundPipe(build(seen), devices=pool, model_run_config=CONFIG) as pipe:

                def gated_step(pipe: RoundPipe = pipe, gate: Gate = gate) -> None:
                    gate.stand()
                    advance(pipe)

                play = Play(pipe, seen)
                play.run("C")
                if not is_slow:
                    gate.open()
                pipe.step(gated_step)
                if not is_slow:
                    pipe._stepper._done.wait(1, "the test")
                play.run("C")
                gate.open()
                trained.append(list(play.run("ACAC")))
    assert trained == [[0, 0, 1, 2], [0, 0, 1, 2]]


def test_synchronize_puts_the_latest_version_into_the_users_model() -> None:
    seen: list[float] = []
    model = build(seen)
    with RoundPipe(model, devices="cpu:2", model_run_config=CONFIG) as pipe:
        Play(pipe, seen).run("CACA")
        pipe.synchronize()
        assert {value for p in model.parameters() for value in p.tolist()} == {2.0}


def test_gradients_of_calls_between_steps_add_up_and_belong_to_the_next_step() -> None:
    seen: list[float] = []
    sums: list[list[float]] = []

    def collect() -> None:
        sums.append([v for p in pipe.parameters() if p.grad is not None for v in p.grad.tolist()])
        advance(pipe)

    def call(scale: float) -> None:
        label = torch.full((4, 1), scale)
        pipe.forward_backward((torch.ones(4, 2),), label=label, loss_fn=scaled_sum)

    with watched_pool(2, CpuChecks(delay_seed=3)) as pool:
        with RoundPipe(build(seen), devices=pool, model_run_config=CONFIG) as pipe:
            call(1.0)
            call(10.0)
            pipe.step(collect)
            call(100.0)
            pipe.step(collect)
            pipe.step(collect, is_async=False)
            call(1000.0)
            pipe.step(collect, is_async=False)
    assert sums == [[44.0] * 6, [400.0] * 6, [], [4000.0] * 6]
