"""The byte ledger of one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.devices.base import Category
from roundpipe.devices.ledger import Ledger

bookings = st.lists(st.tuples(st.sampled_from(Category), st.integers(0, 100)), max_size=30)


@given(bookings)
def test_categories_add_up_and_peaks_are_the_highest_marks(
    added: list[tuple[Category, int]],
) -> None:
    ledger = Ledger("cpu:0")
    for category, nbytes in added:
        ledger.add(category, nbytes)
    full = ledger.report()
    assert full.allocated_bytes == sum(nbytes for _, nbytes in added)
    assert full.allocated_bytes == sum(full.by_category.values())
    for category, nbytes in added:
        ledger.remove(category, nbytes)
    empty = ledger.report()
    assert empty.allocated_bytes == 0
    assert set(empty.by_category.values()) == {0}
    assert empty.peak_bytes == full.allocated_bytes
    assert empty.peak_by_category == full.by_category


def test_moving_changes_the_category_and_not_the_total() -> None:
    ledger = Ledger("cpu:0")
    ledger.add(Category.TEMPORARIES, 10)
    ledger.move(Category.TEMPORARIES, Category.GRADIENTS, 10)
    report = ledger.report()
    assert report.by_category[Category.GRADIENTS] == 10
    assert report.by_category[Category.TEMPORARIES] == 0
    assert report.peak_by_category[Category.GRADIENTS] == 10
    assert report.allocated_bytes == report.peak_bytes == 10


def test_a_new_peak_starts_from_what_is_held() -> None:
    ledger = Ledger("cpu:0")
    ledger.add(Category.WEIGHTS, 7)
    ledger.add(Category.WEIGHTS, 5)
    ledger.remove(Category.WEIGHTS, 5)
    ledger.reset_peak()
    report = ledger.report()
    assert report.peak_bytes == 7
    assert report.peak_by_category[Category.WEIGHTS] == 7
    assert report.peak_by_category[Category.GRADIENTS] == 0


def test_the_limit_holds_and_says_what_is_in_the_way() -> None:
    ledger = Ledger("cpu:3", limit_bytes=100)
    ledger.add(Category.WEIGHTS, 60)
    ledger.add(Category.ACTIVATIONS, 30)
    assert ledger.fits(10)
    assert not ledger.fits(11)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"cpu:3 is out of memory: 11 bytes of gradients were asked for, 90 of 100 bytes are "
        r"in use \(weights 60, gradients 0, activations 30, temporaries 0\)",
    ):
        ledger.add(Category.GRADIENTS, 11)
    assert ledger.report().allocated_bytes == 90
    ledger.add(Category.GRADIENTS, 10)
    assert ledger.report().total_bytes == 100
