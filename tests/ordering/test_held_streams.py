"""A copy stream that stands still while a step runs, and the version its call computes with."""

from __future__ import annotations

import threading

import pytest
import torch

from roundpipe import RoundPipe
from roundpipe.devices.base import Stream
from support.faults import watched_pool
from support.versions import CONFIG, Play, advance, build


@pytest.mark.parametrize("stream", [Stream.WEIGHTS, Stream.INWARD, Stream.OUTWARD])
def test_a_step_that_runs_while_a_copy_is_held_back_is_not_seen(stream: Stream) -> None:
    seen: list[float] = []
    with watched_pool() as pool:
        with RoundPipe(build(seen), devices=pool, model_run_config=CONFIG) as pipe:
            play, go = Play(pipe, seen), threading.Event()
            play.run("C")

            def step() -> None:
                go.wait()
                advance(pipe)

            with pool.hold(stream) as hold:

                def let_the_step_run_first() -> None:
                    hold.wait_reached()  # a copy of the second call stands
                    go.set()
                    pipe._stepper._done.wait(1, "the test")
                    hold.release()

                helper = threading.Thread(target=let_the_step_run_first)
                pipe.step(step)
                helper.start()
                assert play.run("C") == [0, 0]
                helper.join()
            assert play.run("AC") == [0, 0, 1]
            pipe.synchronize()
            assert {v for p in pipe.model.parameters() for v in torch.flatten(p).tolist()} == {2.0}
