"""The table of docs/modules.md: every row names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_row_names_tests_that_exist() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    assert len(rows()) > 40
    for row in rows():
        assert len(row) == 4, row
        named = re.findall(r"`(test_\w+)`", row[3])
        assert named, row
        assert [name for name in named if name not in defined] == [], row
