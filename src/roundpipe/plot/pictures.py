"""Two pictures: what ran where and when, and where the devices' time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roundpipe.errors import InvalidValueError, StateError
from roundpipe.plan import BubbleAccount, Timeline
from roundpipe.plan.bubbles import CAUSES
from roundpipe.plan.timeline import COMPUTE, HOST, Span

_HATCHES = {"forward": "", "fused": "xx", "recompute": "..", "backward": "//"}
_TRANSFERS = {"upload": "tab:gray", "download": "tab:brown"}
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
    for index, timeline in enumerate(timelines):
        if timeline.end_ms <= timeline.begin_ms:
            raise InvalidValueError(f"timeline {index} has no spans; expected something that ran")
    rows = [len(timeline.devices) + 2 for timeline in timelines]
    height = min(1.6 + 0.35 * sum(rows), _TALLEST_INCHES)
    figure = _figure(14.0, height)
    axes = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows}
    )
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw_timeline(axis, timeline)
    axes[-1, 0].set_xlabel("ms")
    handles = _legend()
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0.6 / height, 1, 1))
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


def save_picture(figure: Any, path: str | Path) -> None:
    """Write a figure; the ending of the path decides the format.

    Args:
        figure: what a function of this module returned.
        path: where to; ``.png``, ``.svg`` and ``.pdf`` are among what matplotlib knows.
    """
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


def _draw_timeline(axis: Any, timeline: Timeline) -> None:
    begin, length = timeline.begin_ms, timeline.end_ms - timeline.begin_ms
    devices = len(timeline.devices)
    for device in range(devices):
        axis.barh(device, length, color=_IDLE, height=0.8, zorder=0)
    for kind in COMPUTE:
        _draw_bars(axis, [span for span in timeline.spans if span.kind == kind], begin)
    for kind, colour in _TRANSFERS.items():
        moved = [span for span in timeline.spans if span.kind == kind]
        bars = [(span.begin_ms - begin, span.end_ms - span.begin_ms) for span in moved]
        axis.broken_barh(bars, (devices - 0.4, 0.8), facecolors=colour, alpha=0.6)
    steps = timeline.of(HOST, "step")
    bars = [(span.begin_ms - begin, span.end_ms - span.begin_ms) for span in steps]
    axis.broken_barh(bars, (devices + 0.6, 0.8), facecolors="black")
    axis.set_yticks(range(devices + 2), [*timeline.devices, "transfers", "step"])
    axis.invert_yaxis()
    axis.margins(x=0.005)
    axis.set_title(timeline.title, loc="left", fontsize=10)


def _draw_bars(axis: Any, spans: Sequence[Span], begin: float) -> None:
    """Spans of one kind; colours are microbatches, and come round again after twenty."""
    if not spans:
        return
    axis.barh(
        [span.device for span in spans],
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
    others = [Patch(facecolor=colour, label=kind) for kind, colour in _TRANSFERS.items()]
    return [*kinds, Patch(facecolor=_IDLE, label="idle"), *others,
            Patch(facecolor="black", label="step")]  # fmt: skip
