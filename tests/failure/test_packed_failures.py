"""Packed data whose call fails, is interrupted, or is never asked for again."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from failure.test_interrupts import CtrlC
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.devices.base import Stream
from roundpipe.dispatch import Run
from roundpipe.errors import InvalidValueError, StateError
from roundpipe.microbatch import RoundPipePackedData
from support.duo import COUNT, PACKED, Duo, X, loss_of, one_stage
from support.faults import InjectedError, no_thread_left, notes_of, watched_pool


@pytest.fixture(params=["one pool", "two pools"])
def duo(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with no_thread_left(), watched_pool(2) as pool, watched_pool(1) as other:
        made = Duo(pool, pool if request.param == "one pool" else other)
        yield made
        made.close()


def accumulate(pipe: RoundPipe) -> None:
    pipe.forward_backward((X,), label=X, loss_fn=loss_of, run_config=one_stage(fused=True))


def gradients(pipe: RoundPipe) -> list[torch.Tensor | None]:
    pipe.synchronize()
    return [parameter.grad for parameter in pipe.model.parameters()]


USES: dict[str, Callable[[Duo, RoundPipePackedData], Any]] = {
    "the second model": lambda duo, packed: duo.back(packed),
    "the second model's training": lambda duo, packed: duo.back.forward_backward(
        (packed,), label=X, loss_fn=loss_of, run_config=one_stage(fused=True)
    ),
    "an element": lambda _duo, packed: packed[0],
    "synchronize of the data": lambda _duo, packed: packed.synchronize(),
    "synchronize of the model": lambda duo, _packed: duo.front.synchronize(),
    "another call": lambda duo, _packed: duo.front(X),
    "a step": lambda duo, _packed: duo.front.step(lambda: None),
    "its own data": lambda duo, packed: duo.front(packed),
}


@pytest.mark.parametrize("use", USES)
def test_a_failure_in_flight_is_raised_by_whatever_comes_next(duo: Duo, use: str) -> None:
    accumulate(duo.front)
    duo.layers[0].rows.clear()
    error = duo.layers[0].faults[COUNT - 1] = InjectedError("the last microbatch")
    visits = duo.layers[0].visits.clone()
    released = threading.Event()
    with duo.held_until(released.wait):
        packed = duo.front(X, roundpipe_run_config=PACKED)
        released.set()
        with pytest.raises(InjectedError) as caught:
            USES[use](duo, packed)
    assert caught.value is error
    place, *_, dropped = notes_of(error)
    for part in ("model front", "layer 0 (Layer)", f"microbatch {COUNT - 1}", "phase forward"):
        assert part in place
    assert "gradients accumulated since the last step were dropped" in dropped
    # The data do not exist, however often one asks.
    with pytest.raises(InjectedError) as again:
        packed.synchronize()
    assert again.value is error
    # Nothing has taken effect, it is told once, and the next calls are like those of new models.
    assert gradients(duo.front) == [None, None]
    assert torch.equal(duo.layers[0].visits, visits)
    duo.layers[0].faults.clear()
    want = torch.cat([duo.plain()(piece) for piece in X.tensor_split(COUNT)])
    assert torch.equal(duo.back(duo.front(X, roundpipe_run_config=PACKED)), want)
    assert torch.equal(duo.layers[0].visits, visits + COUNT)


def test_a_failure_of_the_first_microbatch_is_raised_at_once(duo: Duo) -> None:
    accumulate(duo.front)
    duo.layers[0].rows.clear()
    error = duo.layers[0].faults[0] = InjectedError("the first microbatch")
    with pytest.raises(InjectedError) as caught:
        duo.front(X, roundpipe_run_config=PACKED)
    assert caught.value is error
    assert "model front" in notes_of(error)[0]
    assert gradients(duo.front) == [None, None]
    duo.layers[0].faults.clear()
    assert len(duo.front(X, roundpipe_run_config=PACKED)) == COUNT


def test_a_failure_of_the_second_model_leaves_the_first_ones_data(duo: Duo) -> None:
    accumulate(duo.back)
    duo.layers[1].rows.clear()
    error = duo.layers[1].faults[0] = InjectedError("the second model")
    with duo.last_microbatch_held():
        packed = duo.front(X, roundpipe_run_config=PACKED)
        duo.layers[1].arrived.set()
        with pytest.raises(InjectedError) as caught:
            duo.back(packed)
    assert caught.value is error
    assert "model back" in notes_of(error)[0]
    assert "model front" not in "".join(notes_of(error))
    assert gradients(duo.back) == [None, None]
    duo.layers[1].faults.clear()
    want = torch.cat([duo.plain()(piece) for piece in X.tensor_split(COUNT)])
    assert torch.equal(duo.back(packed), want)
    duo.front.synchronize()
    assert duo.layers[0].visits == COUNT


@pytest.mark.parametrize("use", ["the second model", "an element", "synchronize of the model"])
def test_a_value_that_fails_on_its_way_home(duo: Duo, use: str) -> None:
    error = InjectedError("download")
    duo.pool.fail_copy(error, Stream.OUTWARD, device=0, after=COUNT)  # one before each: the buffer
    with torch.no_grad(), pytest.raises(InjectedError) as caught:
        USES[use](duo, duo.front(X, roundpipe_run_config=PACKED))
    assert caught.value is error
    assert any("phase download" in note for note in notes_of(error))
    with torch.no_grad():
        assert torch.equal(duo.front(X), torch.cat([duo.layers[0](X)]))


def test_ctrl_c_ends_both_calls(duo: Duo) -> None:
    key = CtrlC()
    accumulate(duo.front)
    accumulate(duo.back)
    visits = [layer.visits.clone() for layer in duo.layers]
    duo.layers[1].arrived.clear()

    def press() -> None:
        duo.layers[1].arrived.wait()
        key.press()

    with key.caught(), duo.held_until(press):
        packed = duo.front(X, roundpipe_run_config=PACKED)
        with pytest.raises(KeyboardInterrupt):
            duo.back(packed)
    with pytest.raises(StateError, match="the call of front that makes these packed data was inte"):
        packed.synchronize()
    for pipe, layer, before in zip((duo.front, duo.back), duo.layers, visits, strict=True):
        assert gradients(pipe) == [None, None]
        assert torch.equal(layer.visits, before)
    want = torch.cat([duo.plain()(piece) for piece in X.tensor_split(COUNT)])
    assert torch.equal(duo.back(duo.front(X, roundpipe_run_config=PACKED)), want)


@pytest.mark.parametrize("waiter", ["an element", "synchronize of the model", "another call"])
def test_ctrl_c_while_somebody_waits_for_packed_data(
    duo: Duo, waiter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, waiting = CtrlC(), threading.Event()

    def press() -> None:
        waiting.wait()
        key.press()

    with key.caught(), duo.held_until(press):
        packed = duo.front(X, roundpipe_run_config=PACKED)
        wait = Run.wait

        def noticed(run: Run) -> None:
            waiting.set()
            wait(run)

        monkeypatch.setattr(Run, "wait", noticed)
        with pytest.raises(KeyboardInterrupt):
            USES[waiter](duo, packed)
    with pytest.raises(StateError, match="that makes these packed data was interrupted; call the"):
        packed.synchronize()
    assert duo.front(X).shape == X.shape


# --- lifetime -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["close", "with", "forget", "forget data only"])
def test_a_model_that_ends_with_a_call_in_flight(ending: str) -> None:
    with no_thread_left(), watched_pool(2) as pool:
        duo = Duo(pool, pool)
        released = threading.Event()
        with duo.held_until(released.wait):
            packed = duo.front(X, roundpipe_run_config=PACKED)
            assert packed.in_flight
            gone = weakref.ref(duo.front)
            helper = threading.Timer(0, released.set)
            helper.start()
            if ending == "close":
                duo.front.close()
            elif ending == "with":
                with duo.front:
                    pass
            elif ending == "forget":
                del packed, duo.front
                gc.collect()
                assert gone() is None
            else:
                del packed
                gc.collect()
                duo.front.synchronize()
            helper.join()
        assert duo.layers[0].visits == COUNT
        if ending in ("close", "with"):
            assert len(list(packed)) == COUNT
        duo.back.close()


def test_a_failure_that_nobody_asked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with watched_pool(2) as pool:
        duo = Duo(pool, pool)
        duo.layers[0].faults[COUNT - 1] = InjectedError("nobody asked")
        duo.front(X, roundpipe_run_config=PACKED)
        with caplog.at_level(logging.ERROR, logger="roundpipe"):
            duo.close()
    assert "a call of front that left its outputs packed failed" in caplog.text
    assert "nobody asked" in caplog.text


def test_a_pool_that_is_closed_finishes_the_call_in_flight() -> None:
    with watched_pool(2) as pool:
        duo = Duo(pool, pool)
        with torch.no_grad(), duo.hold_last():
            packed = duo.front(X, roundpipe_run_config=PACKED)
            pool.close()  # releases what is held
        assert torch.equal(torch.cat(list(packed)), duo.layers[0](X).detach())
        duo.close()


def test_nothing_is_kept_of_packed_data_that_were_used() -> None:
    with watched_pool(2) as pool:
        duo = Duo(pool, pool)
        with torch.no_grad():
            packed = duo.front(X, roundpipe_run_config=PACKED)
            duo.back(packed)
        value = weakref.ref(packed[0])
        del packed
        gc.collect()
        assert value() is None
        duo.close()


# --- what must not be done while a call is in flight ------------------------------------------


def test_inputs_modified_in_flight_are_found_out(duo: Duo) -> None:
    x = X.clone()
    released = threading.Event()
    with torch.no_grad(), duo.held_until(released.wait):
        packed = duo.front(x, roundpipe_run_config=PACKED)
        x.add_(1.0)
        released.set()
        with pytest.raises(StateError, match="an input of front was modified in place while the"):
            duo.back(packed)
    assert duo.layers[0].visits == 0


def test_changes_of_the_model_wait_for_the_call_in_flight(duo: Duo) -> None:
    modes: list[bool] = []
    duo.layers[0].register_forward_pre_hook(lambda module, _args: modes.append(module.training))
    changes: list[Callable[[], Any]] = [
        duo.front.eval,
        duo.front.train,
        duo.front.requires_grad_,
        lambda: setattr(duo.front, "note", 1),
        lambda: delattr(duo.front, "note"),
    ]
    for change in changes:
        duo.layers[0].rows.clear()
        released = threading.Event()
        with torch.no_grad(), duo.held_until(released.wait):
            duo.front(X, roundpipe_run_config=PACKED)
            helper = threading.Timer(0, released.set)
            helper.start()
            change()
            assert len(duo.layers[0].rows) == COUNT
            helper.join()
    assert modes == [True] * COUNT + [False] * COUNT + [True] * COUNT * 3


def test_a_step_between_forward_and_backward_is_refused_as_ever(duo: Duo) -> None:
    packed = duo.front(X, roundpipe_run_config=PACKED)
    out = duo.back(packed)
    duo.front.step(lambda: None)
    duo.front.step(lambda: None)
    with pytest.raises(StateError, match="stepped or synchronized between forward and backward"):
        out.sum().backward()


class Uneven(nn.Module):
    """As many rows as went in for the first microbatch, one fewer for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun[0] += 1
        return x[: len(x) - (self.begun[0] > 1)]


class OtherStructure(Uneven):
    """A tensor for the first microbatch, a tuple for the others."""

    def forward(self, x: torch.Tensor) -> Any:
        self.begun[0] += 1
        return (x, x) if self.begun[0] > 1 else x


@contextlib.contextmanager
def chain(first: nn.Module) -> Iterator[tuple[RoundPipe, RoundPipe]]:
    config = RoundPipeRunConfig(num_microbatch=COUNT)
    with watched_pool(2) as pool:
        front = RoundPipe(nn.Sequential(first), devices=pool, name="front", model_run_config=config)
        back = RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices=pool, name="back")
        with front, back:
            yield front, back


def test_rows_that_are_not_as_foretold_are_an_error_and_not_a_wrong_pair() -> None:
    with chain(Uneven()) as (front, back):
        packed = front(X, roundpipe_run_config=PACKED)
        with pytest.raises(InvalidValueError, match=r"(?s)packed data of front were still in flight"
                           r".*microbatch 1 has 1 rows where other .*cut for 2"):  # fmt: skip
            back.forward_backward((packed,), label=X, loss_fn=loss_of)
        # Nothing else was cut: then any rows will do.
        front.model[0].begun[0] = 0
        assert back(front(X, roundpipe_run_config=PACKED)).shape == (3 + 1 + 1, 2)
        # And the way out that the error names.
        front.model[0].begun[0] = 0
        packed = front(X, roundpipe_run_config=PACKED)
        packed.synchronize()
        loss = back.forward_backward(
            (packed,), label=X[:5], loss_fn=lambda out, label: (out * len(label)).sum()
        )
        assert loss.ndim == 0


def test_another_structure_for_another_microbatch_is_an_error() -> None:
    text = r"front returned \(\*, \*\) for microbatch 1 and \* for microbatch 0; return the same"
    with chain(OtherStructure()) as (front, back):
        for use in (back, list):
            front.model[0].begun[0] = 0
            packed = front(X, roundpipe_run_config=PACKED)
            with pytest.raises(InvalidValueError, match=text):
                use(packed)
