"""Pictures: what ran where and when, predicted beside measured, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from roundpipe.errors import InvalidValueError, StateError
from roundpipe.plan import BubbleAccount, Timeline
from roundpipe.plan.bubbles import CAUSES
from roundpipe.plan.timeline import COMPUTE, TRANSFERS, Span

_HATCHES = {"forward": "", "fused": "xx", "recompute": "..", "backward": "//"}
_OTHERS = {"upload": ("tab:gray", 0.6), "download": ("tab:brown", 0.6), "step": ("black", 1.0)}
_PAIR = 2.1  # distance between a device's pair of rows and the next
_IDLE = "#f2dede"
_CAUSE_COLOURS = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#fd8d3c", "#e6550d")
_TALLEST_INCHES = 40.0


def plot_timeline(*timelines: Timeline) -> Any:
    """Draw timelines above each other, on one time axis that begins at 0 for each.

    Devices are rows and microbatches are colours; hatches tell forward, fused, recompute and
    backward apart. Transfers and optimizer steps are below, idle time is tinted. A simulated and a
    measured timeline are compared by giving both.

    Args:
        timelines: at least one, with spans.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        InvalidValueError: no timelines, or one in which nothing ran.
        StateError: matplotlib is not installed.
    """
    if not timelines:
        raise InvalidValueError("got no timelines; expected at least one to draw")
    _check_ran(*timelines)
    rows = [len(timeline.devices) + 2 for timeline in timelines]
    height = min(1.6 + 0.35 * sum(rows), _TALLEST_INCHES)
    figure = _figure(14.0, height)
    axes = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows}
    )
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw_timeline(axis, timeline)
    axes[-1, 0].set_xlabel("ms")
    _finish(figure)
    return figure


def plot_overlay(predicted: Timeline, measured: Timeline) -> Any:
    """Draw a predicted and a measured timeline over each other, both beginning at 0.

    Each device has a pair of rows, the predicted one above the measured one; so have transfers and
    steps, where one of the two has any.

    Args:
        predicted: from the simulator.
        measured: from a profile of as many iterations.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        InvalidValueError: a timeline in which nothing ran, or another number of devices.
        StateError: matplotlib is not installed.
    """
    _check_ran(predicted, measured)
    if len(predicted.devices) != len(measured.devices):
        raise InvalidValueError(
            f"predicted for {len(predicted.devices)} devices, measured on "
            f"{len(measured.devices)}; expected the same machine"
        )
    both = (predicted, measured)
    extras = [kinds for kinds in (TRANSFERS, ("step",)) if any(_has(t, *kinds) for t in both)]
    groups = [*measured.devices, *("transfers" if e == TRANSFERS else "step" for e in extras)]
    figure = _figure(14.0, min(1.8 + 0.75 * len(groups), _TALLEST_INCHES))
    axis = figure.subplots()
    length = max(t.end_ms - t.begin_ms for t in both)
    ticks: dict[float, str] = {}
    for which, timeline in enumerate(both):
        name = ("predicted", "measured")[which]
        positions = [_PAIR * group + which * 0.85 for group in range(len(groups))]
        for row, group in zip(positions, groups, strict=True):
            ticks[row] = f"{group} {name}"
            axis.barh(row, length, color=_IDLE, height=0.8, zorder=0)
        for kind in COMPUTE:
            spans = [span for span in timeline.spans if span.kind == kind]
            _draw_bars(axis, spans, timeline.begin_ms, positions)
        for row, kinds in zip(positions[len(measured.devices) :], extras, strict=True):
            for kind in kinds:
                _draw_host_row(axis, timeline, kind, row)
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.invert_yaxis()
    axis.margins(x=0.005)
    axis.set_xlabel("ms")
    axis.set_title(measured.title or predicted.title, loc="left", fontsize=10)
    _finish(figure)
    return figure


def plot_account(accounts: Mapping[str, BubbleAccount]) -> Any:
    """Draw bubble accounts as bars of percent of the devices' time, one for each name.

    Args:
        accounts: at least one.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        InvalidValueError: no accounts.
        StateError: matplotlib is not installed.
    """
    if not accounts:
        raise InvalidValueError("got no bubble accounts; expected at least one to draw")
    figure = _figure(9.0, 1.8 + 0.5 * len(accounts))
    axis = figure.subplots()
    names = list(accounts)
    lefts = [0.0] * len(names)
    for cause, colour in zip(CAUSES, _CAUSE_COLOURS, strict=True):
        shares = [accounts[name].percent(cause) for name in names]
        axis.barh(names, shares, left=lefts, color=colour, edgecolor="white", label=cause)
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    for row, total in enumerate(lefts):
        axis.text(total, row, f" {total:.2f}%", va="center")
    axis.invert_yaxis()
    axis.set_xlim(0, max(1.15 * max(lefts), 1.0))
    axis.set_xlabel("idle, percent of the devices' time")
    figure.legend(loc="lower center", ncols=len(CAUSES), frameon=False)
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    return figure


def save_picture(figure: Any, path: str | PathLike[str]) -> None:
    """Write a figure; the ending of the path decides the format.

    Args:
        figure: what a function of this module returned.
        path: where to; ``.png``, ``.svg`` and ``.pdf`` are among what matplotlib knows.

    Raises:
        InvalidValueError: matplotlib knows no such ending.
    """
    known = figure.canvas.get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in known:
        raise InvalidValueError(
            f"{Path(path)} would be a picture of unknown kind; expected a name that ends in one of "
            f"{', '.join(f'.{name}' for name in sorted(known))}"
        )
    figure.savefig(path, dpi=110)


def _figure(width: float, height: float) -> Any:
    """An empty figure, outside pyplot: no window, no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StateError(
            "pictures need matplotlib, which is not installed; expected it from "
            "'pip install roundpipe[plot]'"
        ) from error
    return Figure(figsize=(width, height))


def _check_ran(*timelines: Timeline) -> None:
    for index, timeline in enumerate(timelines):
        if timeline.end_ms <= timeline.begin_ms:
            raise InvalidValueError(f"timeline {index} has no spans; expected something that ran")


def _has(timeline: Timeline, *kinds: str) -> bool:
    return any(span.kind in kinds for span in timeline.spans)


def _finish(figure: Any) -> None:
    """Legend below everything."""
    handles = _legend()
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))


def _draw_timeline(axis: Any, timeline: Timeline) -> None:
    begin, length = timeline.begin_ms, timeline.end_ms - timeline.begin_ms
    devices = len(timeline.devices)
    for device in range(devices):
        axis.barh(device, length, color=_IDLE, height=0.8, zorder=0)
    for kind in COMPUTE:
        spans = [span for span in timeline.spans if span.kind == kind]
        _draw_bars(axis, spans, begin, range(devices))
    for kind in TRANSFERS:
        _draw_host_row(axis, timeline, kind, devices)
    _draw_host_row(axis, timeline, "step", devices + 1)
    axis.set_yticks(range(devices + 2), [*timeline.devices, "transfers", "step"])
    axis.invert_yaxis()
    axis.margins(x=0.005)
    axis.set_title(timeline.title, loc="left", fontsize=10)


def _draw_host_row(axis: Any, timeline: Timeline, kind: str, row: float) -> None:
    """Spans that are not a device's computing, of all devices in one row."""
    begin = timeline.begin_ms
    bars = [
        (span.begin_ms - begin, span.end_ms - span.begin_ms)
        for span in timeline.spans
        if span.kind == kind
    ]
    colour, alpha = _OTHERS[kind]
    axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, alpha=alpha)


def _draw_bars(axis: Any, spans: Sequence[Span], begin: float, rows: Sequence[float]) -> None:
    """Spans of one kind, each in its device's row.

    Colours are microbatches, and come round again after twenty.
    """
    if not spans:
        return
    axis.barh(
        [rows[span.device] for span in spans],
        [span.end_ms - span.begin_ms for span in spans],
        left=[span.begin_ms - begin for span in spans],
        height=0.8,
        color=[_colour(span.microbatch) for span in spans],
        hatch=_HATCHES[spans[0].kind],
        edgecolor=(1, 1, 1, 0.6),
        linewidth=0.3,
    )


def _colour(microbatch: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](microbatch % 20)


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    kinds = [
        Patch(facecolor="lightgray", edgecolor="dimgray", hatch=hatch, label=kind)
        for kind, hatch in _HATCHES.items()
    ]
    others = [
        Patch(facecolor=colour, alpha=alpha, label=kind)
        for kind, (colour, alpha) in _OTHERS.items()
    ]
    return [*kinds, Patch(facecolor=_IDLE, label="idle"), *others]
