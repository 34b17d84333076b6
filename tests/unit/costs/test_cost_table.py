"""Costs are shown, saved and loaded; files of something else are refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundpipe.costs import ModelCosts
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.plan import DeviceSpec, EngineRules, LayerCost, LayerCosts, Machine

COSTS = ModelCosts(
    LayerCosts(
        (
            LayerCost(1.25, 2.5, weight_bytes=1 << 20, gradient_bytes=1 << 20, optimizer_ms=0.5),
            LayerCost(3.0, 6.0, 2.75, saved_input_bytes=1 << 19, activation_bytes=3 << 20),
        ),
        "net",
    ),
    Machine.uniform(
        2, 0.5, like=DeviceSpec("gpu", "cuda", upload_bytes_per_ms=float(1 << 19)), stage_ms=0.1
    ),
    microbatches=4,
    kind="cuda",
    source="measured",
    layer_names=("Embedding", "Block"),
    rules=EngineRules(early_recompute=True, overlap_calls=False),
)


def test_the_table_has_a_row_for_each_layer() -> None:
    headings, first, second = COSTS.rows()
    row = dict(zip(headings, first, strict=True))
    assert row["layer"] == "0 Embedding"
    assert (row["forward ms"], row["recompute ms"], row["backward ms"]) == (
        "1.250", "1.250", "2.500",
    )  # fmt: skip
    assert (row["weights MiB"], row["upload ms"]) == ("1.00", "2.000")
    assert (row["download ms"], row["activations MiB"]) == ("-", "-")  # not known
    assert dict(zip(headings, second, strict=True))["recompute ms"] == "2.750"


def test_printed_it_says_where_the_numbers_are_from() -> None:
    title, headings, *rows = str(COSTS).splitlines()
    assert title.startswith("net: measured costs of 2 layers per microbatch, 2 x cuda")
    assert headings.startswith("layer ")
    assert len(rows) == 2
    assert {len(row) for row in rows} == {len(headings)}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json")
    loaded = ModelCosts.load(tmp_path / "costs.json")
    assert loaded.source == "loaded"
    assert (loaded.layers, loaded.machine) == (COSTS.layers, COSTS.machine)
    assert (loaded.rules, loaded.layer_names) == (COSTS.rules, COSTS.layer_names)
    assert loaded.workload("sync") == COSTS.workload("sync")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not JSON: .*; expected a JSON object"),
        ("[]", "holds list; expected a JSON object"),
        ('{"layers": []}', "LayerCosts got no layers; expected at least one"),
        ('{"layers": 3}', "a costs document needs a list 'layers'; got int"),
        ('{"layers": [{"forward": 3}]}', r"layers\[0\] has 'forward'; known names are"),
        (
            '{"layers": [{"forward_ms": 3}], "layer_names": ["a", "b"]}',
            "expected a list with a name for each of the 1 layers",
        ),
        (
            '{"layers": [{"forward_ms": 3}], "rules": {"overlap_calls": 1}}',
            "rules.overlap_calls is 1; expected true or false",
        ),
    ],
)
def test_files_that_hold_no_costs(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        ModelCosts.load(path)


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ([1 << 20], "cuda", "these costs have 2 layers and the model has 1; load costs"),
        ([1 << 20, 5], "cuda", "layer 1 has 5 bytes of weights and 0 in these costs"),
        ([1 << 20, 0], "cpu", "are of cuda devices and the model runs on cpu; load costs"),
    ],
)
def test_costs_of_another_model_are_refused(sizes: list[int], kind: str, message: str) -> None:
    COSTS.check_fits([1 << 20, 0], "cuda")
    with pytest.raises(InvalidValueError, match=message):
        COSTS.check_fits(sizes, kind)


def test_a_costs_file_is_plain_json(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json")
    document: dict[str, Any] = json.loads((tmp_path / "costs.json").read_text(encoding="utf-8"))
    assert document["layers"][1]["recompute_ms"] == 2.75
    assert document["machine"]["stage_ms"] == 0.1
    assert document["rules"] == {"early_recompute": True, "overlap_calls": False}
