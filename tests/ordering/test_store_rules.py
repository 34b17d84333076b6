"""The parameter store's six rules: each test fails if the wait it is named after is taken out.

A test never hopes that a thread is late. Either it keeps the thread at a gate until the wait in
question begins, or what the wait is for happens within the wait and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe
from roundpipe.devices import CheckedPool
from roundpipe.devices.base import Event
from roundpipe.gradients import GradientSlot
from roundpipe.parameters import ParameterStore
from roundpipe.records import ParameterRecord
from roundpipe.workers import Counter, Scope
from support.faults import InjectedError, watched_pool
from support.versions import CONFIG, Gate, Play, advance, build, scaled_sum

Contributions = Any


class LazyEvent(Event):
    """Something that is over only when somebody waits for it."""

    def __init__(self, happen: Callable[[], object]) -> None:
        self._happen = happen
        self.waited = 0

    def query(self) -> bool:
        return self.waited > 0

    def synchronize(self) -> None:
        self.waited += 1
        if self.waited == 1:
            self._happen()


class LazyCounter(Counter):
    """A counter that grows only when somebody waits for it."""

    def __init__(self, happen: Callable[[], object]) -> None:
        super().__init__("lazy")
        self._happen = happen

    def wait(self, value: int, who: str, scope: Scope | None = None) -> None:
        self._happen()
        self.advance_to(value)


class Single(nn.Module):
    """A layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))


def small_store() -> tuple[Single, ParameterStore]:
    layer = Single()
    return layer, ParameterStore([layer], {id(layer.weight): "0.weight"}, None)


def change_master(store: ParameterStore, layer: Single) -> None:
    with torch.no_grad():
        store.master_of(layer.weight).fill_(1.0)
    store.mark_all_dirty()


@contextlib.contextmanager
def trained(pool: CheckedPool) -> Iterator[tuple[RoundPipe, Play]]:
    seen: list[float] = []
    with RoundPipe(build(seen), devices=pool, model_run_config=CONFIG) as pipe:
        yield pipe, Play(pipe, seen)


# --- rule 1: all reads of one run see one version -------------------------------------------------


def test_1_weights_are_not_prefetched_while_their_version_is_still_being_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with watched_pool(1) as pool, trained(pool) as (pipe, play):
        play.run("CAC")
        store, gate = pipe._engine.store, Gate()
        last = store.layers[2].parameters[0]
        publish, wait = store._publish_parameter, store.wait_readable

        def publish_last_late(record: ParameterRecord, declared: Any) -> None:
            if record is last:
                gate.stand()
            publish(record, declared)

        def wait_readable(index: int, *rest: Any) -> None:
            # The stages before the last have run, with their version; now it is the last one's
            # turn, and nothing of it may be on the device yet.
            if index == 2:
                gate.open()
            wait(index, *rest)

        monkeypatch.setattr(store, "_publish_parameter", publish_last_late)
        monkeypatch.setattr(store, "wait_readable", wait_readable)
        try:
            # An evaluation: a call with gradients would wait for the step to fold those before.
            assert play.run("AE") == [0, 0, 1]
        finally:
            gate.open()


def test_1_a_run_refuses_a_step_that_would_change_its_version() -> None:
    refused: list[str] = []

    def loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
        for change in (lambda: pipe.step(advance, True, pipe), pipe.synchronize):
            with pytest.raises(RuntimeError, match="while another call of it is running") as caught:
                change()
            refused.append(str(caught.value))
        return output.sum()

    with watched_pool() as pool, trained(pool) as (pipe, play):
        play.run("CA")
        pipe.forward_backward((torch.ones(4, 2),), loss_fn=loss)
        assert len(refused) == 4  # two microbatches
        assert play.run("CYC") == [0, 0, 1]


# --- rule 2: publishing waits for the reads announced before --------------------------------------


def test_2_publishing_waits_until_announced_reads_have_been_issued() -> None:
    layer, store = small_store()
    change_master(store, layer)
    read: list[float] = []
    store.layers[0].reads_issued = LazyCounter(lambda: read.append(layer.weight.item()))
    store.declare_reads([0])
    store.publish(1, store.declared_reads())
    assert read == [0.0]
    assert layer.weight.item() == 1.0


def test_2_publishing_waits_until_issued_reads_are_over() -> None:
    layer, store = small_store()
    change_master(store, layer)
    read: list[float] = []
    uploads = [LazyEvent(lambda: read.append(layer.weight.item())) for _ in range(2)]
    store.declare_reads([0, 0])
    for upload in uploads:
        store.read_issued(0, upload)
    store.publish(1, store.declared_reads())
    assert read == [0.0, 0.0]
    assert layer.weight.item() == 1.0


def test_2_publishing_a_shared_parameter_waits_for_the_reads_of_all_its_layers() -> None:
    first, second = Single(), Single()
    second.weight = first.weight
    store = ParameterStore([first, second], {}, None)
    change_master(store, first)
    read: list[float] = []
    store.declare_reads([1])
    store.read_issued(1, LazyEvent(lambda: read.append(first.weight.item())))
    store.publish(1, store.declared_reads())
    assert read == [0.0]


def test_2_publishing_does_not_wait_for_reads_announced_later() -> None:
    # They wait for the publish: both would wait for ever.
    layer, store = small_store()
    change_master(store, layer)
    declared = store.declared_reads()
    store.declare_reads([0])
    store.publish(1, declared)
    assert layer.weight.item() == 1.0


# --- rule 3: a read waits for the version its run is entitled to ----------------------------------


@pytest.mark.parametrize("num_devices", [1, 2])
def test_3_a_run_waits_until_its_version_is_published(
    num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched_pool(num_devices) as pool, trained(pool) as (pipe, play):
        play.run("CAC")
        store, gate = pipe._engine.store, Gate()
        publish, wait = store.publish, store.wait_readable

        def publish_late(*args: Any) -> None:
            gate.stand()
            publish(*args)

        def wait_readable(*args: Any) -> None:
            gate.open()
            wait(*args)

        monkeypatch.setattr(store, "publish", publish_late)
        monkeypatch.setattr(store, "wait_readable", wait_readable)
        try:
            # An evaluation: a call with gradients would wait for the step to fold those before.
            assert play.run("AE") == [0, 0, 1]
        finally:
            gate.open()


# --- rule 4: folds wait for downloads, downloads for folds ----------------------------------------


def slot_in_flight(store: ParameterStore, layer: Single) -> LazyEvent:
    """A gradient of 5 on its way home; until then its memory holds NaN."""
    content = torch.full((1, 1), float("nan"))
    event = LazyEvent(lambda: content.fill_(5.0))
    slot = store.record(layer.weight).slot((0, 0))
    slot.buffer = content
    slot.put(content, event)
    return event


def test_4_a_fold_waits_for_the_download() -> None:
    layer, store = small_store()
    slot_in_flight(store, layer)
    for record, contributions in store.take_gradients():
        store.fold(record, contributions)
    assert store.master_of(layer.weight).grad == torch.tensor([[5.0]])


def test_4_showing_gradients_to_the_user_waits_for_the_download() -> None:
    layer, store = small_store()
    slot_in_flight(store, layer)
    store.expose_gradients()
    assert layer.weight.grad == torch.tensor([[5.0]])


def test_4_adding_a_gradient_of_the_users_waits_for_the_download() -> None:
    layer, store = small_store()
    slot_in_flight(store, layer)
    layer.weight.grad = torch.ones(1, 1)
    store.adopt_user_gradients()
    assert layer.weight.grad is None
    store.expose_gradients()
    assert layer.weight.grad == torch.tensor([[6.0]])


def call(pipe: RoundPipe, scale: float) -> None:
    label = torch.full((4, 1), scale)
    pipe.forward_backward((torch.ones(4, 2),), label=label, loss_fn=scaled_sum)


def collecting(pipe: RoundPipe, sums: list[set[float]]) -> Callable[[], None]:
    """A step function that notes the gradients it was given."""

    def collect() -> None:
        gradients = [p.grad for p in pipe.parameters()]
        sums.append({v for grad in gradients if grad is not None for v in grad.tolist()})
        advance(pipe)

    return collect


def test_4_a_download_waits_until_its_buffer_has_been_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums: list[set[float]] = []
    with watched_pool() as pool, trained(pool) as (pipe, _):
        store, gate = pipe._engine.store, Gate()
        fold, wait = store.fold, GradientSlot.wait_buffer_free

        def fold_late(record: ParameterRecord, contributions: Contributions) -> None:
            gate.stand()
            fold(record, contributions)

        def wait_buffer_free(slot: GradientSlot, who: str, scope: Scope | None) -> None:
            if slot.taken:
                gate.open()
            wait(slot, who, scope)

        monkeypatch.setattr(store, "fold", fold_late)
        monkeypatch.setattr(GradientSlot, "wait_buffer_free", wait_buffer_free)
        call(pipe, 1.0)
        try:
            pipe.step(collecting(pipe, sums))
            call(pipe, 10.0)
        finally:
            gate.open()
        pipe.step(collecting(pipe, sums))
    assert sums == [{4.0}, {40.0}]


# --- rule 5: a gradient belongs to the step that follows its call ---------------------------------


def test_5_a_step_that_begins_late_takes_nothing_of_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums: list[set[float]] = []
    # Devices that share host memory: nothing there has to wait for a buffer.
    with RoundPipe(build([]), devices="cpu:2", model_run_config=CONFIG) as pipe:
        store, gate = pipe._engine.store, Gate()
        publish = store.publish

        def publish_late(*args: Any) -> None:
            gate.stand()
            publish(*args)

        monkeypatch.setattr(store, "publish", publish_late)
        call(pipe, 1.0)
        try:
            pipe.step(collecting(pipe, sums))
            gate.wait_reached()
            call(pipe, 10.0)
        finally:
            gate.open()
        pipe.step(collecting(pipe, sums))
    assert sums == [{4.0}, {40.0}]


# --- rule 6: a failed run leaves no gradient, and the versions as they were -----------------------


def test_6_a_failed_run_drops_gradients_and_keeps_versions() -> None:
    sums: list[set[float]] = []
    error = InjectedError("in the loss")

    def failing_loss(_output: Any, _label: Any) -> torch.Tensor:
        raise error

    with watched_pool() as pool, trained(pool) as (pipe, play):
        play.run("CSCA")
        call(pipe, 1.0)
        with pytest.raises(InjectedError) as caught:
            pipe.forward_backward((torch.ones(4, 2),), loss_fn=failing_loss)
        assert caught.value is error
        assert not pipe._engine.store.holds_gradients()
        assert play.run("F") == [0, 1, 1]
        pipe.zero_grad()
        call(pipe, 10.0)
        pipe.step(collecting(pipe, sums))
        assert play.run("CYC") == [0, 1, 1, 2, 3]
    assert sums == [{40.0}]


# --- and at most one step is in flight ------------------------------------------------------------


@pytest.mark.parametrize("is_async", [True, False])
def test_the_next_step_waits_for_the_one_in_flight(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched_pool() as pool, trained(pool) as (pipe, play):
        order: list[str] = []
        gate = Gate()

        def slow_step() -> None:
            gate.stand()
            order.append("first step")

        play.run("C")
        pipe.step(slow_step)
        done = pipe._stepper._done
        wait = done.wait

        def wait_done(value: int, who: str, scope: Scope | None = None) -> None:
            gate.open()
            wait(value, who, scope)
            order.append("waited")

        monkeypatch.setattr(done, "wait", wait_done)
        try:
            pipe.step(lambda: order.append("second step"), is_async)
        finally:
            gate.open()
        pipe.synchronize()
        assert order[:2] == ["first step", "waited"]
        assert order.index("second step") > 1
