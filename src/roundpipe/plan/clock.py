"""The arithmetic of a pipeline: when each stage of a call has finished each microbatch.

    stage k of a call       device (cursor + k) mod N; a wide stage takes r devices in a row
    a device                its stages in order; in each its microbatches in order
    microbatch m, stage k   after stage k-1 has finished m, plus a hop if that was another device
    a stage's weights       upload begins when the device has finished the stage before the last
                            one (two neighbours fit), and when the parameters may be read

Microbatches are alike, so a stage nearly always finishes them at even intervals. Such a row is kept
as (first, spacing) and costs the same for any number of microbatches; where a stage waits now and
then, the row is spelled out. Both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from roundpipe.plan.channels import Channel
from roundpipe.plan.cost_tables import BACKWARD, FORWARD, CostTables, StageStep
from roundpipe.plan.costs import Machine

# Differences of running sums are only as even as floating point is.
_SAME = 1e-12
_ABOVE = 1 + _SAME
_BEFORE = float("-inf")


class Row(NamedTuple):
    """When the microbatches of a stage are finished, and where.

    Attributes:
        first: end of microbatch 0.
        spacing: time between ends, where ``times`` is None.
        last: end of the microbatch that ends last.
        device: of replica 0.
        replicas: microbatch m is on device ``(device + m % replicas) % N``.
        times: all ends, where they are not evenly spaced or the stage is wide.
    """

    first: float
    spacing: float
    last: float
    device: int
    replicas: int = 1
    times: list[float] | None = None


class StageRecord(NamedTuple):
    """What a recorder is told about one replica of a stage; times in ms.

    Attributes:
        step: the stage.
        position: of the stage in its call.
        device: index of the device.
        microbatches: those of the replica.
        begin_ms: when device and weights were ready.
        early_ms: length of what may start before the input is there.
        main_ms: length of the rest.
        ends_ms: end of each microbatch.
        saved_ms: when the saved input of each microbatch of the call was there; None if there is
            nothing to wait for.
    """

    step: StageStep
    position: int
    device: int
    microbatches: range
    begin_ms: float
    early_ms: float
    main_ms: float
    ends_ms: list[float]
    saved_ms: list[float] | None


class Recorder(Protocol):
    """Listens to a clock."""

    def stage(self, record: StageRecord) -> None:
        """A replica of a stage has run."""

    def transfer(
        self, kind: str, device: int, position: int, begin_ms: float, end_ms: float
    ) -> None:
        """Weights were uploaded, or gradients downloaded."""


class _Call:
    """A call on its way through the machine.

    Attributes:
        begin: when the stage that is to be run may begin, where that is already known.
        row: when the latest stage finished its microbatches.
        forward_rows: the same of each forward stage, with its first layer.
    """

    def __init__(
        self,
        tables: CostTables,
        steps: Sequence[StageStep],
        microbatches: int,
        published: float | Sequence[float],
    ) -> None:
        self.tables = tables
        self.steps = steps
        self.microbatches = microbatches
        self.published = published
        self.begin: float | None = None
        self.row: Row | None = None
        self.forward_rows: list[tuple[int, Row]] = []

    def readable(self, step: StageStep) -> float:
        """From when the parameters of a stage may be read."""
        if isinstance(self.published, float):
            return self.published
        return max(self.published[step.start : step.stop])

    def saved_row(self, step: StageStep) -> Row | None:
        """The row of the forward stage whose output, or a part of it, a recompute starts from."""
        if step.phase != BACKWARD or step.start == 0 or not self.forward_rows:
            return None
        return next(row for start, row in reversed(self.forward_rows) if start < step.start)


class PipelineClock:
    """Runs calls on a machine, in arithmetic only.

    Args:
        machine: the devices.
        recorder: told about every stage and transfer.
        by_layer: keep ``homecomings``.

    Attributes:
        cursor: the device that takes the next stage.
        free: when each device has finished all it was given.
        gradients_home: when the last download that takes time has ended.
        homecomings: when the gradients of each backward stage were home: (ms, start, stop).
    """

    def __init__(
        self, machine: Machine, recorder: Recorder | None = None, *, by_layer: bool = False
    ) -> None:
        self.cursor = 0
        self.free = [0.0] * len(machine)
        self.gradients_home = 0.0
        self.homecomings: list[tuple[float, int, int]] | None = [] if by_layer else None
        self._hop = machine.hop_ms
        self._recorder = recorder
        self._older = [0.0] * len(machine)
        self._up = Channel(machine, [device.upload_bytes_per_ms for device in machine.devices])
        self._down = Channel(machine, [device.download_bytes_per_ms for device in machine.devices])

    @property
    def now(self) -> float:
        """End of everything that was run, downloads included."""
        return max(self.gradients_home, *self.free)

    def state(self) -> list[float]:
        """Every time that a later stage may wait for, devices in the order of their turns."""
        devices = len(self.free)
        turns = [(self.cursor + turn) % devices for turn in range(devices)]
        rows = (self.free, self._older, self._up.free, self._down.free)
        links = (*self._up.link_free.values(), *self._down.link_free.values())
        return [*(row[turn] for row in rows for turn in turns), *links]

    def run_call(
        self,
        tables: CostTables,
        steps: Sequence[StageStep],
        microbatches: int,
        published: float | Sequence[float] = 0.0,
    ) -> None:
        """Run a call.

        Args:
            tables: the model.
            steps: its stages, in dispatch order.
            microbatches: how many go through each stage.
            published: from when the parameters may be read; of all layers or of each.
        """
        call = _Call(tables, steps, microbatches, published)
        position = 0
        while position < len(steps):
            if self._recorder is None:
                position = self._run_even_stages(call, position)
            if position < len(steps):
                self._run_stage(call, position)
                position += 1

    def _run_even_stages(self, call: _Call, position: int) -> int:
        """Run stages from ``position`` on, as long as each finishes its microbatches evenly.

        A stage and its arrivals are both rows with a spacing. If the arrivals are the denser row,
        only the first can be waited for. If they are the wider one, the stage waits for each, for
        none (it began late enough), or for some; the last, and whatever else is uneven, is left
        to :meth:`_run_stage`. The planner spends its time here: hence one long loop.

        Returns:
            Position of the first stage that was not run.
        """
        row, published = call.row, call.published
        if row is not None and row.times is not None:
            return position
        early_sums, main_sums, later = call.tables.early, call.tables.main, call.microbatches - 1
        free, older, hop, devices = self.free, self._older, self._hop, len(self.free)
        device = self.cursor
        stage_ms = call.tables.stage_ms
        first, pace, home = (_BEFORE, 0.0, device) if row is None else (row[0], row[1], row[3])
        forward_end = call.forward_rows[-1][1].last + hop if call.forward_rows else _BEFORE
        readable = published if isinstance(published, float) else None
        gradients_matter = self.homecomings is not None or self._down.is_timed
        for step in call.steps[position:]:
            phase, start, stop, replicas = step
            if replicas != 1:
                break
            begin = free[device]
            if readable is None or self._up.is_timed:
                begin = call.begin = self._begin(call, step, position, device)
            elif readable > begin:
                begin = readable
            early, main = early_sums[phase][device], main_sums[phase][device]
            early_ms = early[stop] - early[start]
            main_ms = main[stop] - main[start] + stage_ms
            ready, spacing = begin + early_ms, early_ms + main_ms
            arrival = first if home == device else first + hop
            if pace > spacing * _ABOVE:
                if ready <= arrival:
                    spacing = pace
                elif (ready + later * spacing) * _ABOVE < arrival + later * pace:
                    break
            if phase == BACKWARD and begin < forward_end and start > 0:
                break
            first = (arrival if arrival > ready else ready) + main_ms
            pace, home = spacing, device
            older[device] = free[device]
            free[device] = last = first + later * spacing
            if phase == FORWARD:
                call.forward_rows.append((start, Row(first, spacing, last, device)))
                forward_end = last + hop
            elif gradients_matter:
                self._send_gradients(call, step, position, device)
            call.begin = None
            device = device + 1 if device + 1 < devices else 0
            position += 1
        self.cursor = device
        if first != _BEFORE:
            call.row = Row(first, pace, first + later * pace, home)
        return position

    def _run_stage(self, call: _Call, position: int) -> None:
        """Run one stage, microbatch by microbatch: microbatch m on replica m mod r."""
        step, count = call.steps[position], call.microbatches
        base = self.cursor
        width = min(step.replicas, len(self.free), count)
        self.cursor = (base + width) % len(self.free)
        saved_row = call.saved_row(step)
        merged = [0.0] * count
        for replica in range(width):
            device = (base + replica) % len(self.free)
            begin = call.begin
            if begin is None:
                begin = self._begin(call, step, position, device)
            call.begin = None
            early, main = call.tables.times(step, device)
            arrivals = None if call.row is None else self._spelled(call.row, device, count)
            saved = None if saved_row is None else self._spelled(saved_row, device, count)
            time = begin
            mine = range(replica, count, width)
            for index in mine:
                if saved is not None and saved[index] > time:
                    time = saved[index]
                time += early
                if arrivals is not None and arrivals[index] > time:
                    time = arrivals[index]
                time += main
                merged[index] = time
            self._older[device] = self.free[device]
            self.free[device] = time
            if step.phase != FORWARD:
                self._send_gradients(call, step, position, device)
            if self._recorder is not None:
                ends = merged[replica::width]
                self._recorder.stage(
                    StageRecord(step, position, device, mine, begin, early, main, ends, saved)
                )
        spacing = early + main
        is_even = width == 1 and (
            abs(merged[-1] - merged[0] - (count - 1) * spacing) <= _SAME * merged[-1]
        )
        times = None if is_even else merged
        call.row = Row(merged[0], spacing, max(merged), base, width, times)
        if step.phase == FORWARD:
            call.forward_rows.append((step.start, call.row))

    def _spelled(self, row: Row, device: int, microbatches: int) -> list[float]:
        """When the microbatches of ``row`` are on ``device``, hops included."""
        times = row.times
        if times is None:
            first = row.first if row.device == device else row.first + self._hop
            return [first + index * row.spacing for index in range(microbatches)]
        here = (device - row.device) % len(self.free)
        return [
            time if index % row.replicas == here else time + self._hop
            for index, time in enumerate(times)
        ]

    def _begin(self, call: _Call, step: StageStep, position: int, device: int) -> float:
        """From when a device may compute a stage: it is free and the weights are there."""
        ready = call.readable(step)
        if self._up.rates[device] is not None:
            weights = call.tables.weights
            size = weights[step.stop] - weights[step.start]
            ready = max(ready, self._older[device])
            ready = self._transfer("upload", self._up, size, position, device, ready)
        return max(self.free[device], ready)

    def _send_gradients(self, call: _Call, step: StageStep, position: int, device: int) -> None:
        """Bring the gradients of a stage home once the device has finished it."""
        home = self.free[device]
        if self._down.rates[device] is not None:
            gradients = call.tables.gradients
            size = gradients[step.stop] - gradients[step.start]
            home = self._transfer("download", self._down, size, position, device, home)
        self.gradients_home = max(self.gradients_home, home)
        if self.homecomings is not None:
            self.homecomings.append((home, step.start, step.stop))

    def _transfer(
        self, kind: str, channel: Channel, size: float, position: int, device: int, ready: float
    ) -> float:
        """End of a transfer that may begin at ``ready``; nothing to send takes no time."""
        if not size or channel.rates[device] is None:
            return ready
        begin, end = channel.send(device, size, ready)
        if self._recorder is not None:
            self._recorder.transfer(kind, device, position, begin, end)
        return end
