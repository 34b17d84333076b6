"""A model's measured costs, smoothed over its calls."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from roundpipe.plan import LayerCost, LayerCosts, Machine
from roundpipe.trace import Span

from .notes import BACKWARD, FORWARD, LOSS, RECOMPUTE, RunSamples
from .smoothing import RunningMax, RunningMedian, median

_LEAST_BYTES = 1 << 16  # smaller transfers tell of latency, not of bandwidth
_SIZES_AT_FIRST, _SIZES_LATER = 4, 64
_OPEN = 8  # runs and steps not taken in yet; those that failed never are, and make room

Key = tuple[bool, str, int]
"""(whether gradients are kept, what, layer)."""


class RunRecord:
    """What the devices of one run bring in.

    Attributes:
        wants_sizes: whether they shall look at bytes, too.
        keeps_grad: whether layers run with gradients.
    """

    def __init__(self, keeps_grad: bool, devices: int, wants_sizes: bool) -> None:
        self.keeps_grad = keeps_grad
        self.wants_sizes = wants_sizes
        self._expected = devices
        self._parts: list[RunSamples] = []

    def add(self, part: RunSamples) -> None:
        """A device is done. Called by its worker."""
        self._parts.append(part)

    @property
    def parts(self) -> list[RunSamples] | None:
        """All devices' parts; None as long as one is missing, which after a failure stays so."""
        return self._parts if len(self._parts) == self._expected else None


class CostMeter:
    """What a model's layers, transfers and steps were seen to cost.

    One figure of a run is the median over its microbatches; the meter keeps the running median of
    the runs. The very first time that a layer does something is dropped: memory is then allocated,
    kernels are loaded and chosen. Used by the caller's thread, but for what a docstring says.

    Attributes:
        runs: how many were taken in.
    """

    def __init__(self) -> None:
        self.runs = 0
        self._times: dict[Key, RunningMedian] = defaultdict(RunningMedian)
        self._sizes: dict[tuple[str, int], RunningMax] = defaultdict(RunningMax)
        self._rates: dict[str, RunningMedian] = defaultdict(RunningMedian)
        self._hop = RunningMedian()
        self._stage = RunningMedian()
        self._step = RunningMedian()
        self._steps = 0
        self._begun: set[Key] = set()
        self._open: list[RunRecord] = []
        self._step_spans: deque[Span] = deque(maxlen=_OPEN)

    def open_run(self, keeps_grad: bool, devices: int) -> RunRecord:
        """A run on so many devices begins. It looks at bytes at first, and now and then."""
        self.settle()
        wants_sizes = self.runs < _SIZES_AT_FIRST or self.runs % _SIZES_LATER == 0
        record = RunRecord(keeps_grad, devices, wants_sizes)
        self._open = [*self._open[1 - _OPEN :], record]
        return record

    def hear(self, span: Span) -> None:
        """A listener for the event log, which picks out the steps. On any thread."""
        if span.phase == "step":
            self._step_spans.append(span)

    def settle(self) -> None:
        """Take in the runs and steps that are over by now."""
        for record in list(self._open):
            parts = record.parts
            if parts is not None:
                self._open.remove(record)
                self.add_run(record.keeps_grad, parts)
        while self._step_spans:
            span = self._step_spans.popleft()
            self.add_step((span.end_ns - span.begin_ns) / 1e6)

    def add_run(self, keeps_grad: bool, samples: Sequence[RunSamples]) -> None:
        """Take in what the devices of a run have measured."""
        self.runs += 1
        times: dict[Key, list[float]] = defaultdict(list)
        for part in samples:
            for each in sorted(part.times, key=lambda sample: sample.microbatch):
                key = (keeps_grad, each.what, each.layer)
                if key in self._begun:
                    times[key].append(each.time_ms)
                else:
                    self._begun.add(key)
            for size in part.sizes:
                self._sizes[size.what, size.layer].add(size.nbytes)
        for key, values in times.items():
            self._times[key].add(median(values))
        spans = [span for part in samples for span in part.spans]
        self._add_rates(spans)
        overheads = [time_ms for part in samples for time_ms in _overheads(part)]
        if overheads:
            self._stage.add(median(overheads))
        hops = list(_hops(spans))
        if hops:
            # The fastest: the others also waited for a core, or for the interpreter.
            self._hop.add(min(hops))

    def add_step(self, time_ms: float) -> None:
        """Take in how long an optimizer step took; the first, which makes its state, is dropped."""
        self._steps += 1
        if self._steps > 1:
            self._step.add(time_ms)

    def _add_rates(self, spans: Iterable[Span]) -> None:
        rates: dict[str, list[float]] = defaultdict(list)
        for span in spans:
            time_ns = span.end_ns - span.begin_ns
            if span.nbytes >= _LEAST_BYTES and time_ns > 0:
                rates[span.phase].append(1e6 * span.nbytes / time_ns)
        for kind, values in rates.items():
            self._rates[kind].add(median(values))

    def layer_costs(self, estimated: LayerCosts, run_type: str) -> LayerCosts | None:
        """Measured costs of all layers; None until every one has run.

        Args:
            estimated: bytes of weights and gradients, and the model's name.
            run_type: of the calls; ``"infer"`` may also be told from training.
        """
        for keeps_grad in (False, True) if run_type == "infer" else (True,):
            count = range(len(estimated))
            if all(self._ms(keeps_grad, FORWARD, layer) is not None for layer in count):
                costs = [
                    self._layer_cost(keeps_grad, layer, given)
                    for layer, given in enumerate(estimated.layers)
                ]
                return replace(estimated, layers=tuple(self._with_steps(costs)))
        return None

    def _layer_cost(self, keeps_grad: bool, layer: int, given: LayerCost) -> LayerCost:
        loss_ms = self._ms(keeps_grad, LOSS, layer) or 0.0
        backward_ms = self._ms(keeps_grad, BACKWARD, layer)
        recompute_ms = self._ms(keeps_grad, RECOMPUTE, layer)
        if keeps_grad and backward_ms is None and recompute_ms is None:
            recompute_ms = 0.0  # nothing in front of it wants a gradient: no backward stage runs it
        return replace(
            given,
            forward_ms=(self._ms(keeps_grad, FORWARD, layer) or 0.0) + loss_ms,
            backward_ms=backward_ms or 0.0,
            recompute_ms=recompute_ms,
            saved_input_bytes=0 if layer == 0 else self._bytes("output", layer - 1),
            forward_bytes=self._bytes("forward", layer),
            activation_bytes=self._bytes("activation", layer),
        )

    def _with_steps(self, costs: Sequence[LayerCost]) -> list[LayerCost]:
        """An optimizer's time is shared out by the bytes that it updates."""
        step_ms, whole = self._step.value, sum(cost.gradient_bytes for cost in costs)
        if step_ms is None or not whole:
            return list(costs)
        return [replace(cost, optimizer_ms=step_ms * cost.gradient_bytes / whole) for cost in costs]

    def machine(self, machine: Machine) -> Machine:
        """The machine with what was seen of its transfers."""
        devices = tuple(
            replace(
                device,
                upload_bytes_per_ms=self._rates["upload"].value,
                download_bytes_per_ms=self._rates["download"].value,
            )
            for device in machine.devices
        )
        return replace(
            machine,
            devices=devices,
            hop_ms=self._hop.value or 0.0,
            stage_ms=self._stage.value or 0.0,
        )

    def _ms(self, keeps_grad: bool, what: str, layer: int) -> float | None:
        found = self._times.get((keeps_grad, what, layer))
        return None if found is None else found.value

    def _bytes(self, what: str, layer: int) -> int:
        found = self._sizes.get((what, layer))
        return 0 if found is None else found.value or 0


_PARTS = {
    "forward": (FORWARD,),
    "fused": (FORWARD, LOSS, BACKWARD),
    "recompute": (RECOMPUTE,),
    "backward": (RECOMPUTE, BACKWARD),
}
"""What the layers do in a span. Where the recompute has a span of its own, it is not counted."""


def _overheads(part: RunSamples) -> Iterable[float]:
    """How much longer stages took than their layers, in ms, one microbatch at a time."""
    times: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for each in part.times:
        times[each.what, each.microbatch][each.layer] = each.time_ms
    recomputes = {(span.stage, span.microbatch) for span in part.spans if span.phase == RECOMPUTE}
    for span in part.spans:
        parts = _PARTS.get(span.phase, ())
        if span.phase == BACKWARD and (span.stage, span.microbatch) in recomputes:
            parts = (BACKWARD,)
        if parts:
            busy_ms = sum(
                times[what, span.microbatch].get(layer, 0.0)
                for what in parts
                for layer in span.layers
            )
            yield max((span.end_ns - span.begin_ns) / 1e6 - busy_ms, 0.0)


def _hops(spans: Iterable[Span]) -> Iterable[float]:
    """Milliseconds that microbatches took to the next stage, on another device that waited."""
    computed = sorted(
        (span for span in spans if span.microbatch >= 0), key=lambda span: span.begin_ns
    )
    free: dict[str, int] = {}
    left: dict[tuple[int, int], Span] = {}
    for span in computed:
        before = left.get((span.stage - 1, span.microbatch))
        if before is not None and before.device != span.device:
            idle_since = free.get(span.device)
            if idle_since is not None and idle_since < before.end_ns <= span.begin_ns:
                yield (span.begin_ns - before.end_ns) / 1e6
        free[span.device] = span.end_ns
        left[span.stage, span.microbatch] = span
