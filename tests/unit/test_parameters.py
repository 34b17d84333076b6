"""The parameter store: who may read or write when, one test for each of its rules."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe
from roundpipe.devices.base import Event
from roundpipe.errors import Cancelled
from roundpipe.parameters import GradientSlot, ParameterStore
from roundpipe.workers import Scope
from support.cases import Scale
from support.faults import InjectedError, watched_pool
from support.waits import Waits, start, watched_waits


class ManualEvent(Event):
    """An event that the test lets pass, and that knows when somebody waits for it."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self._passed = threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self.waited_for.set()
        self._passed.wait()

    def let_pass(self) -> None:
        self._passed.set()


@pytest.fixture
def waits() -> Iterator[Waits]:
    with watched_waits() as seen:
        yield seen


def store_of(*weights: float) -> ParameterStore:
    layers = [Scale(weight) for weight in weights]
    names = {id(layer.weight): f"{index}.weight" for index, layer in enumerate(layers)}
    store = ParameterStore(layers, names, None)
    for layer in layers:
        store.master_of(layer.weight)
    return store


def value_of(store: ParameterStore, index: int) -> float:
    return float(store.layers[index].parameters[0].parameter.item())


def set_masters(store: ParameterStore, value: float) -> None:
    for record in store.records():
        assert record.master is not None
        nn.init.constant_(record.master, value)
    store.mark_all_dirty()


def test_publishing_waits_for_the_reads_announced_before_it(waits: Waits) -> None:
    # Without it an upload could take half old and half new bytes.
    store = store_of(1.0, 1.0)
    store.declare_reads([0, 1])
    declared = store.declared_reads()
    set_masters(store, 2.0)
    published = start(waits, lambda: store.publish(1, declared))
    assert waits.blocked_on("reads of layer 0")
    assert value_of(store, 0) == 1.0
    event = ManualEvent()
    store.read_issued(0, event)
    event.waited_for.wait(30)
    assert (value_of(store, 0), store.readable(0, 1)) == (1.0, False)
    event.let_pass()
    store.read_issued(1, None)
    published.result(30)
    assert [value_of(store, index) for index in (0, 1)] == [2.0, 2.0]


def test_publishing_does_not_wait_for_reads_announced_after_it(waits: Waits) -> None:
    store = store_of(1.0)
    declared = store.declared_reads()
    store.declare_reads([0])
    set_masters(store, 2.0)
    start(waits, lambda: store.publish(1, declared)).result(30)
    assert value_of(store, 0) == 2.0


def test_a_read_waits_for_the_version_it_is_entitled_to(waits: Waits) -> None:
    store = store_of(1.0)

    def wait_and_read() -> float:
        store.wait_readable(0, 1, "a test", Scope())
        return value_of(store, 0)

    read = start(waits, wait_and_read)
    assert waits.blocked_on("published version of layer 0")
    set_masters(store, 2.0)
    store.publish(1, store.declared_reads())
    assert read.result(30) == 2.0


def test_a_read_that_waits_ends_with_its_run(waits: Waits) -> None:
    store, scope = store_of(1.0), Scope()
    read = start(waits, lambda: store.wait_readable(0, 1, "a test", scope))
    assert waits.blocked_on("published version of layer 0")
    scope.fail(InjectedError("elsewhere"))
    with pytest.raises(Cancelled, match="the run was ended by a failure elsewhere"):
        read.result(30)


def test_folding_waits_for_the_gradients_copy(waits: Waits) -> None:
    store, event = store_of(1.0), ManualEvent()
    record = next(store.records())
    gradient = torch.full((), float("nan"))  # what the buffer holds until the copy has run
    record.slot((0, 0)).put(gradient, event)
    ((taken, contributions),) = store.take_gradients()
    fold = start(waits, lambda: store.fold(taken, contributions))
    event.waited_for.wait(30)
    gradient.fill_(5.0)
    event.let_pass()
    fold.result(30)
    assert record.master is not None
    assert record.master.grad is not None
    assert record.master.grad.item() == 5.0


def test_a_buffer_is_not_written_before_its_content_was_folded(waits: Waits) -> None:
    store = store_of(1.0)
    record = next(store.records())
    slot = record.slot((0, 0))
    slot.buffer = torch.full((), 3.0)
    slot.put(slot.buffer, None)
    ((taken, contributions),) = store.take_gradients()

    def write() -> None:
        slot.wait_buffer_free("a test", None)
        assert slot.buffer is not None
        slot.buffer.fill_(100.0)

    written = start(waits, write)
    assert waits.blocked_on("folds of the gradient of 0.weight")
    store.fold(taken, contributions)
    written.result(30)
    assert record.master is not None
    assert record.master.grad is not None
    assert record.master.grad.item() == 3.0


def test_a_fold_that_fails_does_not_keep_later_calls_waiting() -> None:
    class FailedEvent(ManualEvent):
        def synchronize(self) -> None:
            raise InjectedError("the copy failed")

    store = store_of(1.0)
    slot = next(store.records()).slot((0, 0))
    slot.put(torch.tensor(1.0), FailedEvent())
    ((taken, contributions),) = store.take_gradients()
    with pytest.raises(InjectedError):
        store.fold(taken, contributions)
    slot.wait_buffer_free("a test", None)


def test_a_step_takes_what_was_there_when_it_was_submitted() -> None:
    store = store_of(1.0)
    record = next(store.records())
    record.slot((0, 0)).put(torch.full((), 1.0), None)
    ((taken, contributions),) = store.take_gradients()
    assert not store.holds_gradients()
    record.slot((0, 0)).put(torch.full((), 10.0), None)
    store.fold(taken, contributions)
    assert record.master is not None
    assert record.master.grad is not None
    assert record.master.grad.item() == 1.0
    assert store.holds_gradients()


def test_contributions_are_added_highest_layer_first() -> None:
    store = store_of(1.0)
    record = next(store.records())
    big, small = torch.full((), 1e8), torch.full((), 1.0)
    for layer, content in [(0, small), (2, -big), (1, big)]:
        record.slot((layer, 0)).put(content.clone(), None)
    ((taken, contributions),) = store.take_gradients()
    store.fold(taken, contributions)
    assert record.master is not None
    assert record.master.grad is not None
    assert record.master.grad.item() == 1.0  # (-big + big) + small; another order gives 0


def test_a_failed_publish_still_lets_runs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(1.0, 1.0)
    set_masters(store, 2.0)

    def fail(*_args: object) -> None:
        raise InjectedError("no copy")

    monkeypatch.setattr(ParameterStore, "_publish_parameter", fail)
    with pytest.raises(InjectedError):
        store.publish(1, store.declared_reads())
    assert all(store.readable(index, 1) for index in (0, 1))


def test_dropping_and_taking_empty_a_slot() -> None:
    store = store_of(1.0)
    assert not store.drop_gradients()
    assert not store.holds_gradients()
    slot = next(store.records()).slot((0, 0))
    assert slot.take() is None
    slot.put(torch.tensor(1.0), None)
    assert store.drop_gradients()
    assert slot.content is None
    assert isinstance(slot, GradientSlot)


def test_reads_do_not_pile_up_where_nothing_is_published() -> None:
    # Evaluation, and frozen layers: nobody ever publishes, so nobody ever collected the events.
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with watched_pool() as pool, RoundPipe(nn.Sequential(*layers), devices=pool) as pipe:
        for _ in range(30):
            with torch.no_grad():
                pipe(torch.ones(6, 2))
        assert all(len(layer.reads) < 10 for layer in pipe._engine.store.layers)


def test_a_parameter_of_no_layer_has_no_master() -> None:
    with pytest.raises(
        RuntimeError, match="belongs to none of its layers, so it cannot be trained"
    ):
        store_of(1.0).master_of(nn.Parameter(torch.ones(1)))
