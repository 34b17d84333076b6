"""The ordering tests that need no script of copies, on an accelerator: versions, held streams."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from roundpipe import RoundPipe
from roundpipe.devices.base import Stream
from support.backends import Accelerator
from support.versions import CONFIG, Play, advance, build, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="no accelerator on this machine"
    ),
]

PROGRAMS = ["CACACACA", "CSCSCS", "CCACCACC", "CAYCACYC", "CACSCAC", "ECAECYE", "FAFAFSFF"]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_call_computes_with_the_version_it_is_entitled_to(program: str, count: int) -> None:
    seen: list[float] = []
    with Accelerator().open(count) as pool, Accelerator().late(count):
        with RoundPipe(build(seen), devices=pool, model_run_config=CONFIG) as pipe:
            assert Play(pipe, seen).run(program) == list(expected(program))


@pytest.mark.parametrize("stream", [Stream.WEIGHTS, Stream.INWARD, Stream.OUTWARD])
def test_a_step_that_runs_while_a_copy_is_held_back_is_not_seen(stream: Stream) -> None:
    backend = Accelerator()
    if not backend.is_fake:
        pytest.skip("streams of a real accelerator cannot be held back")
    seen: list[float] = []
    with backend.open(2) as pool:
        with RoundPipe(build(seen), devices=pool, model_run_config=CONFIG) as pipe:
            play, go = Play(pipe, seen), threading.Event()
            play.run("C")
            issued = pipe._engine.store.layers[0].reads_issued
            before = issued.value

            def step() -> None:
                go.wait()
                advance(pipe)

            holds = contextlib.ExitStack()
            for device in pool.devices:
                hold = backend.hold(device, stream)
                assert hold is not None
                holds.enter_context(hold)

            def let_the_step_run_first() -> None:
                with holds:
                    issued.wait(before + 1, "the test")  # the second call's copies stand
                    go.set()
                    pipe._stepper._done.wait(1, "the test")

            helper = threading.Thread(target=let_the_step_run_first)
            pipe.step(step)
            helper.start()
            assert play.run("C") == [0, 0]
            helper.join()
            assert play.run("AC") == [0, 0, 1]
            pipe.synchronize()
            assert {v for p in pipe.model.parameters() for v in torch.flatten(p).tolist()} == {2.0}
