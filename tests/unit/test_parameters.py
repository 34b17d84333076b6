"""The parameter store: sums, failures, and what it forgets; its waits are under ordering."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe
from roundpipe.devices.base import Event
from roundpipe.gradients import GradientSlot
from roundpipe.parameters import ParameterStore
from support.cases import Scale
from support.faults import InjectedError, watched_pool


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


def test_a_fold_that_fails_does_not_keep_later_calls_waiting() -> None:
    class FailedEvent(Event):
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            raise InjectedError("the copy failed")

    store = store_of(1.0)
    slot = next(store.records()).slot((0, 0))
    slot.put(torch.tensor(1.0), FailedEvent())
    ((taken, contributions),) = store.take_gradients()
    with pytest.raises(InjectedError):
        store.fold(taken, contributions)
    slot.wait_buffer_free("a test", None)


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
