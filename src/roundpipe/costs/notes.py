"""What one device's worker notes during a run: moments and bytes, made sense of when it is over.

    stage ─▶ begin ─▶ [entered] ─▶ layer, layer, .. ─▶ loss ─▶ backward: reached, reached, .. ─▶ end
    (once)   (for each microbatch of the stage)

Reading a clock, or recording an event on a device's stream, is all that happens while layers run.
Backward of a stage is one walk through one graph, but each layer's output has a hook that fires
when its gradient arrives: there the backward of the layer begins, and that of the layer behind it
has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from roundpipe.devices.base import Device, HostMoment, Moment, Stream
from roundpipe.microbatch.tree import flatten
from roundpipe.trace import EventLog, Span, clock_ns

FORWARD, RECOMPUTE, BACKWARD, LOSS = "forward", "recompute", "backward", "loss"

_LEAST_WAIT_NS = 20_000  # shorter waits are those of asking


class LayerSample(NamedTuple):
    """One layer's time on one microbatch.

    Attributes:
        what: ``forward``, ``recompute``, ``backward`` or ``loss``.
        layer: index of the layer.
        microbatch: index of the microbatch.
        time_ms: how long it took.
    """

    what: str
    layer: int
    microbatch: int
    time_ms: float


class SizeSample(NamedTuple):
    """Bytes of one layer on one microbatch.

    Attributes:
        what: ``output``, ``forward`` (held while it runs forward) or ``activation`` (held until its
            backward).
        layer: index of the layer.
        nbytes: how many.
    """

    what: str
    layer: int
    nbytes: int


@dataclass
class RunSamples:
    """What a run's devices measured.

    Attributes:
        times: layers' times.
        sizes: layers' bytes.
        spans: stages, transfers and waits.
    """

    times: list[LayerSample] = field(default_factory=list)
    sizes: list[SizeSample] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class _Timed(NamedTuple):
    what: str
    layer: int
    microbatch: int
    begin: Moment
    end: Moment


class _Interval(NamedTuple):
    phase: str
    position: int
    layers: range
    microbatch: int
    begin: Moment
    end: Moment
    nbytes: int = 0


@dataclass
class _Pass:
    """Backward of one stage on one microbatch.

    Attributes:
        microbatch: index of the microbatch.
        layers: those whose outputs have a hook, in order.
        begin: when backward was started.
        arrivals: layers whose hook fired, in order, and when.
        end: when it was over.
    """

    microbatch: int
    layers: list[int]
    begin: Moment
    arrivals: list[tuple[int, Moment]] = field(default_factory=list)
    end: Moment | None = None


class RunNotes:
    """Notes of one device's part of a run. Used by the device's worker only.

    Args:
        device: the device.
        call: number of the call within the model.
        iteration: steps that the model was given before the call.
        measures_sizes: whether to look at bytes, too, which costs more than a clock.
    """

    def __init__(self, device: Device, call: int, iteration: int, measures_sizes: bool) -> None:
        self._device = device
        self._call = call
        self._iteration = iteration
        self._measures_sizes = measures_sizes
        self._phase, self._position, self._layers = "", -1, range(0)
        self._microbatch = -1
        self._is_first = False
        self._times: list[_Timed] = []
        self._passes: list[_Pass] = []
        self._sizes: list[SizeSample] = []
        self._intervals: list[_Interval] = []
        self._marked: list[int] = []
        self._begin: Moment = HostMoment(0)

    def now(self) -> Moment:
        """The moment that the device's compute reaches here."""
        return self._device.moment(Stream.COMPUTE)

    # --- a stage and its microbatches --------------------------------------------------------

    def stage(self, phase: str, position: int, layers: range) -> None:
        """What follows belongs to this stage."""
        self._phase, self._position, self._layers = phase, position, layers
        self._is_first = True

    def begin(self, microbatch: int) -> None:
        """The stage begins with a microbatch."""
        self._microbatch = microbatch
        self._marked.clear()
        self._begin = self.now()

    def entered(self) -> None:
        """The microbatch's state is there: until now, compute may have waited for it."""
        if not self._device.shares_host_memory:
            self._begin = self.now()

    def recomputed(self, end: Moment) -> None:
        """Recompute ended at ``end``; since then, compute may have waited for gradients."""
        if not self._device.shares_host_memory:
            self._interval(RECOMPUTE, self._begin, end)
            self._begin = self.now()

    def end(self) -> None:
        """The stage has ended with the microbatch."""
        if self._phase != BACKWARD or self._device.shares_host_memory:
            self._interval(self._phase, self._begin, self.now())
        self._is_first = False

    def _interval(self, phase: str, begin: Moment, end: Moment) -> None:
        self._intervals.append(
            _Interval(phase, self._position, self._layers, self._microbatch, begin, end)
        )

    # --- layers ------------------------------------------------------------------------------

    def ran(self, layer: int, begin: Moment) -> None:
        """A layer's forward, or in a backward stage its recompute, has run since ``begin``."""
        what = RECOMPUTE if self._phase == BACKWARD else FORWARD
        self._times.append(_Timed(what, layer, self._microbatch, begin, self.now()))

    def ran_loss(self, begin: Moment) -> None:
        """The loss function has run since ``begin``; it counts as a part of the last layer."""
        last = self._layers[-1]
        self._times.append(_Timed(LOSS, last, self._microbatch, begin, self.now()))

    def marked(self, layer: int) -> None:
        """The layer's output has a hook, which will call :meth:`reached`."""
        self._marked.append(layer)

    def backward(self) -> None:
        """Backward of what was marked begins."""
        self._passes.append(_Pass(self._microbatch, list(self._marked), self.now()))
        self._marked.clear()

    def reached(self, layer: int) -> None:
        """Backward has arrived at the output of a layer."""
        if self._passes:
            self._passes[-1].arrivals.append((layer, self.now()))

    def backward_ended(self) -> None:
        """Backward is over."""
        end = self._passes[-1].end = self.now()
        if self._phase == BACKWARD and not self._device.shares_host_memory:
            self._interval(BACKWARD, self._begin, end)

    # --- bytes -------------------------------------------------------------------------------

    @property
    def wants_sizes(self) -> bool:
        """Whether bytes of the stage's layers are looked at on this microbatch."""
        return self._measures_sizes and self._is_first

    def held_bytes(self) -> int:
        """Bytes on the device now, where it knows; else 0."""
        return self._device.memory().allocated_bytes

    def sizes(self, layer: int, given: object, output: object, grown_bytes: int) -> None:
        """Note a layer's bytes.

        Args:
            layer: index of the layer.
            given: its arguments.
            output: what it returned; what it only passed through needs no room of its own.
            grown_bytes: how much more the device holds than before the layer ran.
        """
        known = {id(leaf) for leaf in flatten(given)[0]}
        new = {id(leaf): leaf for leaf in flatten(output)[0] if id(leaf) not in known}
        nbytes = sum(
            leaf.numel() * leaf.element_size()
            for leaf in new.values()
            if isinstance(leaf, torch.Tensor)
        )
        what = FORWARD if self._phase == FORWARD else "activation"
        self._sizes.append(SizeSample("output", layer, nbytes))
        self._sizes.append(SizeSample(what, layer, max(grown_bytes, 0)))

    # --- transfers and waits -----------------------------------------------------------------

    def transferred(
        self, position: int, layers: range, kind: str, nbytes: int, begin: Moment, end: Moment
    ) -> None:
        """Weights were uploaded (``upload``), or gradients downloaded (``download``)."""
        if nbytes > 0:
            self._intervals.append(_Interval(kind, position, layers, -1, begin, end, nbytes))

    def waited_for_step(self, position: int, layers: range, begin_ns: int) -> None:
        """The device has waited since ``begin_ns`` for parameters to be published."""
        end_ns = clock_ns()
        if end_ns - begin_ns >= _LEAST_WAIT_NS:
            begin, end = HostMoment(begin_ns), HostMoment(end_ns)
            self._intervals.append(_Interval("step_wait", position, layers, -1, begin, end))

    # --- the end -----------------------------------------------------------------------------

    def write_spans(self, log: EventLog) -> list[Span]:
        """Put the spans noted so far into the log; they are over, or are waited for."""
        spans = [
            Span(
                each.phase, self._device.name, self._call, each.position, each.microbatch,
                each.begin.ns(), each.end.ns(), self._iteration, each.layers, each.nbytes,
            )
            for each in self._intervals
        ]  # fmt: skip
        self._intervals.clear()
        for span in spans:
            log.add(span)
        return spans

    def samples(self, log: EventLog) -> RunSamples:
        """What the run has shown, once it is over; spans also go into the log."""
        times = [
            LayerSample(each.what, each.layer, each.microbatch, _ms(each.begin, each.end))
            for each in self._times
        ]
        forward = {(each.microbatch, each.layer): each.time_ms for each in times}
        for each in self._passes:
            times += _backward_samples(each, forward)
        self._times.clear()
        self._passes.clear()
        return RunSamples(times, self._sizes, self.write_spans(log))


def _ms(begin: Moment, end: Moment) -> float:
    return (end.ns() - begin.ns()) / 1e6


def _backward_samples(
    walk: _Pass, forward_ms: dict[tuple[int, int], float]
) -> Sequence[LayerSample]:
    """The layers' shares of a backward.

    From one layer's arrival to the next one's, as long as they come in the order of backward. A
    tensor that several layers hand on unchanged has the hooks of all of them, which then fire at
    once; the time of the whole is then shared out as forward's was.
    """
    if walk.end is None or not walk.layers:
        return []
    order = [layer for layer, _ in walk.arrivals]
    if order == walk.layers[::-1]:
        edges = [walk.begin, *(moment for _, moment in walk.arrivals[1:]), walk.end]
        return [
            LayerSample(BACKWARD, layer, walk.microbatch, _ms(begin, end))
            for layer, begin, end in zip(order, edges[:-1], edges[1:], strict=True)
        ]
    weights = [max(forward_ms.get((walk.microbatch, layer), 0.0), 1e-6) for layer in walk.layers]
    whole_ms = _ms(walk.begin, walk.end)
    return [
        LayerSample(BACKWARD, layer, walk.microbatch, whole_ms * weight / sum(weights))
        for layer, weight in zip(walk.layers, weights, strict=True)
    ]
