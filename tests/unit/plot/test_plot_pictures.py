"""Pictures are drawn from neutral timelines, without a window and without global state."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roundpipe.errors import InvalidValueError, StateError
from roundpipe.plan import (
    DeviceSpec,
    LayerCost,
    LayerCosts,
    Machine,
    Simulation,
    StagePlan,
    Timeline,
    Workload,
    simulate,
)
from roundpipe.plot import plot_account, plot_overlay, plot_timeline, save_picture

PNG = b"\x89PNG"


def simulation(title: str = "simulated") -> Simulation:
    layer = LayerCost(2.0, 4.0, weight_bytes=10, gradient_bytes=10, optimizer_ms=1.0)
    like = DeviceSpec("gpu", upload_bytes_per_ms=10.0, download_bytes_per_ms=10.0)
    workload = Workload(LayerCosts((layer,) * 4), Machine.uniform(2, 0.5, like=like), 3)
    plan = StagePlan([range(2)], [range(2, 4), range(2)])
    return simulate(workload, plan, iterations=2, title=title)


def test_a_timeline_has_a_row_for_each_device_transfers_and_the_step(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plot_timeline(simulation().timeline)

    save_picture(figure, tmp_path / "timeline.png")

    (axis,) = figure.axes
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["gpu:0", "gpu:1", "transfers", "step"]
    assert axis.get_title(loc="left") == "simulated"
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)


def test_two_timelines_share_one_time_axis() -> None:
    pytest.importorskip("matplotlib")
    figure = plot_timeline(simulation().timeline, simulation("measured").timeline)

    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["simulated", "measured"]


def test_predicted_and_measured_lie_over_each_other_on_one_axis(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plot_overlay(simulation().timeline, simulation("measured").timeline)

    save_picture(figure, tmp_path / "overlay.png")

    (axis,) = figure.axes
    rows = {label.get_text(): label.get_position()[1] for label in axis.get_yticklabels()}
    groups = ("gpu:0", "gpu:1", "transfers", "step")
    assert list(rows) == [
        *(f"{group} predicted" for group in groups), *(f"{group} measured" for group in groups),
    ]  # fmt: skip
    for group in groups:
        assert 0 < rows[f"{group} measured"] - rows[f"{group} predicted"] < 1
    assert (tmp_path / "overlay.png").read_bytes().startswith(PNG)


def test_rows_that_neither_has_are_left_out_of_an_overlay() -> None:
    pytest.importorskip("matplotlib")
    workload = Workload(LayerCosts((LayerCost(2.0, 4.0),) * 4), Machine.uniform(2), 3)
    timeline = simulate(workload, StagePlan([range(2)], [range(2, 4), range(2)])).timeline

    (axis,) = plot_overlay(timeline, timeline).axes

    assert len(axis.get_yticklabels()) == 4


def test_an_overlay_is_of_one_machine() -> None:
    timeline = simulation().timeline
    with pytest.raises(InvalidValueError, match="predicted for 2 devices, measured on 1; expected"):
        plot_overlay(timeline, Timeline(("a",), timeline.spans))


def test_accounts_are_bars_with_their_totals(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    account = simulation().account()
    figure = plot_account({"before": account, "after": account})

    save_picture(figure, tmp_path / "account.png")

    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["before", "after"]
    assert [text.get_text() for text in axis.texts] == [f" {account.bubble_percent:.2f}%"] * 2
    assert (tmp_path / "account.png").read_bytes().startswith(PNG)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="got no timelines; expected at least one"):
        plot_timeline()
    with pytest.raises(InvalidValueError, match="timeline 0 has no spans; expected something"):
        plot_timeline(Timeline(("a",), ()))
    with pytest.raises(InvalidValueError, match="got no bubble accounts; expected at least one"):
        plot_account({})


def test_an_ending_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    figure = plot_timeline(simulation().timeline)
    with pytest.raises(InvalidValueError, match=r"a.doc would be a picture of unknown kind; .*png"):
        save_picture(figure, tmp_path / "a.doc")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(StateError, match=r"expected it from 'pip install roundpipe\[plot\]'"):
        plot_timeline(simulation().timeline)
