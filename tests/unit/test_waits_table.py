"""The table of waits says what the sources say, and `docs/design.md` says what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fakeacc.sites import find_sites
from support.fakeacc.teeth import TEETH, rows

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


def test_every_wait_of_the_package_has_an_entry_and_every_entry_a_wait() -> None:
    assert set(TEETH) == set(find_sites())


def test_the_back_ends_own_calls_of_torch_are_among_them() -> None:
    kinds = {site.kind for site in find_sites().values() if site.module == "devices.accelerator"}
    assert kinds == {"stream wait", "record_stream", "host wait"}


@pytest.mark.parametrize("row", list(rows()))
def test_the_table_is_kept_in_the_design(row: str) -> None:
    assert row in DESIGN.read_text().splitlines()
