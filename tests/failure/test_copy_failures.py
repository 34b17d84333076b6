"""Copies that fail: weights and activations on their way up, activations, losses, buffers and
gradients on their way home.

Where the failure surfaces depends on who needs the copy; what comes out does not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from roundpipe import RoundPipe
from roundpipe.devices import CheckedPool, CopyInfo, CpuChecks
from roundpipe.devices.base import Stream
from support.faults import (
    CONFIG,
    InjectedError,
    Switch,
    assert_equal,
    batch,
    build,
    fresh_result,
    loss_of,
    no_thread_left,
    notes_of,
    train_once,
    watched_pool,
)

PHASES = {Stream.WEIGHTS: "upload", Stream.INWARD: "upload", Stream.OUTWARD: "download"}


class Copies:
    """Counts the copies of each stream."""

    def __init__(self) -> None:
        self.counts: Counter[Stream] = Counter()
        self._lock = threading.Lock()

    def __call__(self, copy: CopyInfo) -> None:
        with self._lock:
            self.counts[copy.stream] += 1


COPIES = Copies()


@pytest.fixture(scope="module")
def pool() -> Iterator[CheckedPool]:
    with no_thread_left(), watched_pool(2, CpuChecks(on_copy=COPIES)) as opened:
        yield opened


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], ids=lambda s: f"{s:.0%}")
@pytest.mark.parametrize("stream", PHASES, ids=lambda stream: stream.value)
def test_a_copy_that_fails_comes_home(stream: Stream, share: float, pool: CheckedPool) -> None:
    switch = Switch()
    with RoundPipe(build(switch), model_run_config=CONFIG, devices=pool, name="net") as pipe:
        COPIES.counts.clear()
        train_once(pipe, switch)
        total = COPIES.counts[stream]
        assert total > 10
        before = {key: value.clone() for key, value in pipe.model.state_dict().items()}
        error = InjectedError(stream.value)
        pool.fail_copy(error, stream, after=round(share * (total - 1)))
        inputs, label = batch()
        with pytest.raises(InjectedError) as caught:
            pipe.forward_backward(inputs, None, label, loss_of(switch))
        assert caught.value is error
        place = notes_of(error)[0]
        assert place.startswith("roundpipe: model net, ")
        assert f"phase {PHASES[stream]}, device cpu:" in place
        assert "stage " in place
        assert ", layer " not in place  # a stage is on its way, whatever layer ran last

        after = pipe.model.state_dict()
        assert all((after[key] == before[key]).all() for key in before)
        want = fresh_result(pipe)
        assert_equal(train_once(pipe, switch), want)
