"""Gradients between slot and step: who may write a buffer, and when."""

from __future__ import annotations

import torch

from roundpipe.devices.base import Event
from roundpipe.gradients import GradientSlot


class Passed(Event):
    """An event that notes whether somebody waited for it."""

    def __init__(self) -> None:
        self.waits = 0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits += 1


def filled_slot() -> tuple[GradientSlot, Passed]:
    """A slot whose content lies in its buffer."""
    slot, ready = GradientSlot("weight"), Passed()
    slot.buffer = torch.ones(3)
    slot.put(slot.buffer, ready)
    return slot, ready


def test_a_content_is_complete_when_it_was_waited_for() -> None:
    slot, ready = filled_slot()
    taken = slot.take()
    assert taken is not None
    assert slot.take() is None
    assert taken.wait().tolist() == [1, 1, 1]
    taken.wait()
    assert ready.waits == 1


def test_a_buffer_is_free_when_all_that_was_taken_is_released() -> None:
    slot, _ = filled_slot()
    buffer, first = slot.buffer, slot.take()
    assert first is not None
    assert (slot.taken, slot.folded.value) == (1, 0)
    first.release()
    first.release()
    assert slot.folded.value == 1
    slot.wait_buffer_free("a test", None)
    assert slot.buffer is buffer


def test_a_buffer_with_another_user_is_given_up() -> None:
    slot, _ = filled_slot()
    taken = slot.take()
    assert taken is not None
    kept = taken.content.detach()
    taken.release()
    assert slot.buffer is None
    assert kept.tolist() == [1, 1, 1]


def test_a_content_of_its_own_never_concerns_the_buffer() -> None:
    slot, _ = filled_slot()
    slot.put(torch.zeros(3), None)
    taken, buffer = slot.take(), slot.buffer
    assert taken is not None
    assert not taken.is_buffer
    taken.release()
    assert slot.buffer is buffer
