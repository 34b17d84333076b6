"""Packed data handed on: the second model is at work while the first one still is.

In each test the first model's last microbatch is held back, on its way to the device, until the
second model has run its first microbatch. If a call waited for the one before, nobody would let the
microbatch go; then the helper does, after a while, and the test fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.devices.base import Stream
from roundpipe.microbatch import RoundPipePackedData
from support.duo import COUNT, PACKED, PATIENCE_S, Duo, Layer, X, loss_of, one_stage
from support.faults import watched_pool


@pytest.fixture(params=["one pool", "two pools"])
def duo(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with watched_pool(2) as pool, watched_pool(1) as other:
        made = Duo(pool, pool if request.param == "one pool" else other)
        yield made
        made.close()


def test_the_second_model_begins_before_the_first_has_ended(duo: Duo) -> None:
    want = torch.cat([duo.plain()(piece) for piece in X.tensor_split(COUNT)])
    with torch.no_grad(), duo.last_microbatch_held():
        packed = duo.front(X, roundpipe_run_config=PACKED)
        assert isinstance(packed, RoundPipePackedData)
        assert packed.in_flight
        assert len(duo.layers[0].rows) < COUNT
        got = duo.back(packed)
    assert duo.overlapped
    assert torch.equal(got, want)
    # The second call has ended the first; and now the values can be read.
    assert torch.equal(torch.cat(list(packed)), torch.cat([duo.layers[0](p) for p in
                                                           X.tensor_split(COUNT)]))  # fmt: skip
    assert not packed.in_flight


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_flow_back_through_a_chain_that_did_not_wait(duo: Duo, fused: bool) -> None:
    model, label = duo.plain(), X.flip(0)
    want_x, x = X.clone().requires_grad_(), X.clone().requires_grad_()
    pieces = zip(want_x.tensor_split(COUNT), label.tensor_split(COUNT), strict=True)
    losses = [loss_of(model(piece), part) for piece, part in pieces]
    for loss in losses:
        loss.backward()
    with duo.last_microbatch_held():
        packed = duo.front(x, roundpipe_run_config=PACKED)
        if fused:
            got = duo.back.forward_backward((packed,), label=label, loss_fn=loss_of,
                                            run_config=one_stage(fused=True))  # fmt: skip
        else:
            out = duo.back(packed, roundpipe_run_config=RoundPipeRunConfig(merge_output=list))
    assert duo.overlapped
    if not fused:
        parts = zip(out, label.tensor_split(COUNT), strict=True)
        by_microbatch = [loss_of(piece, part) for piece, part in parts]
        got = by_microbatch[0] + by_microbatch[1] + by_microbatch[2]
        got.backward()
    assert torch.equal(got.detach(), (losses[0] + losses[1] + losses[2]).detach())
    assert x.grad is not None
    assert want_x.grad is not None
    assert torch.equal(x.grad, want_x.grad)
    for pipe, layer, twin in zip((duo.front, duo.back), duo.layers, model, strict=True):
        pipe.synchronize()
        for mine, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)


def test_a_chain_of_three_waits_for_nobody_until_its_end() -> None:
    """The last microbatch of the first model is held until the third has run its first one."""
    with watched_pool(3) as pool:
        duo = Duo(pool, pool)
        duo.layers.append(Layer())
        third = RoundPipe(nn.Sequential(duo.layers[2]), devices=pool, name="third",
                          model_run_config=one_stage())  # fmt: skip
        want = torch.cat([duo.plain()(piece) for piece in X.tensor_split(COUNT)])
        with pool.hold(Stream.INWARD, device=0, after=COUNT - 1) as hold:
            results: list[bool] = []

            def let_go() -> None:
                results.append(duo.layers[2].arrived.wait(PATIENCE_S))
                hold.release()

            helper = threading.Thread(target=let_go)
            helper.start()
            packed = duo.back(duo.front(X, roundpipe_run_config=PACKED),
                              roundpipe_run_config=PACKED)  # fmt: skip
            out = third(packed)
            helper.join()
        assert results == [True]
        assert torch.equal(out, want)
        x = out.square().sum()
        x.backward()
        for pipe in (duo.front, duo.back, third):
            pipe.synchronize()
            assert all(p.grad is not None for p in pipe.model.parameters())
            pipe.close()


LOOKS: dict[str, Callable[[RoundPipePackedData], Any]] = {
    "index": lambda packed: packed[0],
    "slice": lambda packed: packed[:1],
    "iterate": lambda packed: next(iter(packed)),
    "list": list,
    "star": lambda packed: [*packed],
    "contains": lambda packed: None in packed,
    "repr": repr,
    "equal": lambda packed: packed == [],
    "synchronize": lambda packed: packed.synchronize(),
    "reversed": lambda packed: next(reversed(packed)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_at_packed_data_waits(look: str) -> None:
    with watched_pool(2) as pool:
        duo = Duo(pool, pool)
        with torch.no_grad(), pool.hold(Stream.INWARD, device=0, after=COUNT - 1) as hold:
            packed = duo.front(X, roundpipe_run_config=PACKED)
            assert len(packed) == COUNT  # does not wait
            assert "call synchronize()" in repr(list.__getitem__(packed, 0))
            before: list[int] = []

            def let_go() -> None:
                hold.wait_reached()
                before.append(len(duo.layers[0].rows))
                hold.release()

            helper = threading.Thread(target=let_go)
            helper.start()
            LOOKS[look](packed)
            assert len(duo.layers[0].rows) == COUNT
            assert not packed.in_flight
            helper.join()
        assert before[0] < COUNT
        duo.close()
