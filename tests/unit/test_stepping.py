"""The optimizer thread: one for each model, and what a step function sees."""

from __future__ import annotations

import threading

import torch
from torch import nn

from roundpipe.parameters import ParameterStore
from roundpipe.stepping import FunctionStep, StepContext, Stepper, masters_visible
from support.faults import no_thread_left


def store_of(layer: nn.Module) -> ParameterStore:
    return ParameterStore([layer], {}, None)


def test_the_thread_is_born_with_the_first_step_and_runs_all_of_them() -> None:
    names: list[str] = []
    with no_thread_left():
        before = threading.active_count()
        stepper = Stepper(store_of(nn.Linear(1, 1)), "net")
        assert threading.active_count() == before
        for _ in range(3):
            stepper.submit(
                FunctionStep(lambda: names.append(threading.current_thread().name)), True
            )
        stepper.wait()
        assert not stepper.on_own_thread()
        stepper.close()
        stepper.close()
    assert names == ["roundpipe-optimizer-net"] * 3


def test_a_model_that_never_stepped_closes_and_publishes_nothing() -> None:
    store = store_of(nn.Linear(1, 1))
    stepper = Stepper(store, "net")
    stepper.publish_latest()
    stepper.close()
    assert (store.submitted_version, store.entitled_version) == (0, 0)


def test_versions_count_submitted_steps() -> None:
    store = store_of(nn.Linear(1, 1))
    stepper = Stepper(store, "net")
    stepper.submit(FunctionStep(lambda: None), True)
    assert (store.submitted_version, store.entitled_version) == (1, 0)
    stepper.submit(FunctionStep(lambda: None), True)
    assert (store.submitted_version, store.entitled_version) == (2, 1)
    stepper.submit(FunctionStep(lambda: None), False)
    assert (store.submitted_version, store.entitled_version) == (3, 3)
    assert store.layers[0].published.value == 3
    stepper.close()


def test_masters_are_visible_inside_a_step_function_only() -> None:
    depths: list[int] = []
    stepper = Stepper(store_of(nn.Linear(1, 1)), "net")
    stepper.submit(FunctionStep(lambda: depths.append(masters_visible.depth)), False)
    stepper.close()
    assert depths == [1]
    assert masters_visible.depth == 0


def test_a_context_belongs_to_its_thread() -> None:
    context, depths = StepContext(), list[int]()
    with context, context:
        thread = threading.Thread(target=lambda: depths.append(context.depth))
        thread.start()
        thread.join()
        depths.append(context.depth)
    assert [*depths, context.depth] == [0, 2, 0]


def test_a_closed_stepper_has_finished_what_it_was_given() -> None:
    layer = nn.Linear(1, 1, bias=False)
    ran: list[torch.Tensor] = []
    stepper = Stepper(store_of(layer), "net")
    stepper.submit(FunctionStep(lambda: ran.append(torch.ones(1))), True)
    stepper.close()
    assert len(ran) == 1
