"""A second simulator, written from the rules alone: it knows nothing of the package's clock.

Time goes from event to event. After each one, whatever can start is started: a recompute, the rest
of a microbatch, a transfer, a step. Slow, and plain enough to be believed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from roundpipe.plan import StagePlan, Workload


@dataclass
class Transfer:
    """Weights or gradients on their way."""

    size: float
    ready: Callable[[], bool]
    begun: bool = False
    done: bool = False
    end: float = 0.0


@dataclass
class Task:
    """A replica of a stage on its device."""

    iteration: int
    call: int
    position: int
    phase: str
    layers: range
    device: int
    microbatches: range
    early_ms: float
    main_ms: float
    upload: Transfer
    download: Transfer | None
    at: int = 0
    state: str = "idle"
    done: bool = False


@dataclass
class Lane:
    """A way for transfers in one direction: of one device, or of all devices on a link."""

    queue: list[tuple[int, Transfer]] = field(default_factory=list)
    busy: bool = False


class EventByEvent:
    """Simulates iterations of one model.

    Attributes:
        ends: when microbatch m of (iteration, call, position) was finished.
    """

    def __init__(
        self, workload: Workload, plan: StagePlan, per_round: int, iterations: int
    ) -> None:
        self.workload = workload
        self.per_round = per_round
        self.rounds = workload.microbatches // per_round
        self.iterations = iterations
        self.now = 0.0
        self.ends: dict[tuple[int, int, int], dict[int, float]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._devices = len(workload.machine)
        self._homes: dict[tuple[int, int, int], list[int]] = {}
        self._stages: dict[int, list[tuple[str, range]]] = {}
        self._queues: list[list[Task]] = [[] for _ in range(self._devices)]
        self._tasks: list[Task] = []
        self._steps_done: dict[int, float] = {}
        self._step_running = False
        self._layers_done: list[set[int]] = [set() for _ in range(iterations)]
        self._layer_homes: list[dict[int, float]] = [{} for _ in range(iterations)]
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._device_lane_busy: set[tuple[str, int]] = set()
        self._deal(plan)

    # --- setting up ------------------------------------------------------------------------

    def _calls(self, plan: StagePlan) -> list[list[tuple[str, range, int]]]:
        forward = [
            ("forward", stage, width)
            for stage, width in zip(plan.fwd_plan, plan.fwd_replicas, strict=True)
        ]
        backward = [
            ("backward", stage, width)
            for stage, width in zip(plan.bwd_plan, plan.bwd_replicas, strict=True)
        ]
        if self.workload.run_type == "infer":
            return [forward]
        if self.workload.run_type == "train":
            return [forward, backward]
        _, stage, width = backward[0]
        return [[*forward, ("fused", stage, width), *backward[1:]]]

    def _deal(self, plan: StagePlan) -> None:
        cursor = 0
        for iteration in range(self.iterations):
            call = 0
            for _ in range(self.rounds):
                for stages in self._calls(plan):
                    for position, (phase, layers, width) in enumerate(stages):
                        width = min(width, self._devices, self.per_round)
                        homes = [(cursor + r) % self._devices for r in range(width)]
                        cursor = (cursor + width) % self._devices
                        key = (iteration, call, position)
                        self._homes[key] = homes
                        self.ends[key] = {}
                        for replica, device in enumerate(homes):
                            self._add(key, phase, layers, device, replica, width)
                    call += 1

    def _add(
        self,
        key: tuple[int, int, int],
        phase: str,
        layers: range,
        device: int,
        replica: int,
        width: int,
    ) -> None:
        spec = self.workload.machine.devices[device]
        costs = [self.workload.costs_on(device).layers[layer] for layer in layers]
        forward = sum(cost.forward_ms for cost in costs) / spec.speed
        again = sum(cost.again_ms for cost in costs) / spec.speed
        backward = sum(cost.backward_ms for cost in costs) / spec.speed
        rules = self.workload.rules
        early, main = 0.0, forward
        if phase == "fused":
            early, main = (
                (forward, backward) if rules.early_fused_forward else (0.0, forward + backward)
            )
        elif phase == "backward":
            early, main = (again, backward) if rules.early_recompute else (0.0, again + backward)
        main += self.workload.machine.stage_ms
        mine = [self.workload.costs.layers[layer] for layer in layers]
        weights = sum(cost.weight_bytes for cost in mine)
        gradients = sum(cost.gradient_bytes for cost in mine)
        upload, download = Transfer(weights, lambda: False), None
        if phase != "forward":
            download = Transfer(gradients, lambda: False)
        task = Task(
            *key,
            phase,
            layers,
            device,
            range(replica, self.per_round, width),
            early,
            main,
            upload,
            download,
        )
        place = len(self._queues[device])
        queue = self._queues[device]
        upload.ready = lambda: self._readable(task) and (place < 2 or queue[place - 2].done)
        if weights == 0 or spec.upload_bytes_per_ms is None:
            # Nothing has to move, so only the parameters are waited for.
            upload.size = 0
            upload.ready = lambda: self._readable(task)
        self._lane("up", device).queue.append((device, upload))
        if download is not None:
            download.ready = lambda: task.done
            if gradients == 0 or spec.download_bytes_per_ms is None:
                download.size = 0
            self._lane("down", device).queue.append((device, download))
        self._queues[device].append(task)
        self._tasks.append(task)

    def _lane(self, direction: str, device: int) -> Lane:
        link = self.workload.machine.devices[device].link
        return self._lanes.setdefault((direction, link or f"only {device}"), Lane())

    # --- rules -----------------------------------------------------------------------------

    def _all_done(self, wanted: Callable[[Task], bool]) -> bool:
        return all(
            task.done and (task.download is None or task.download.done)
            for task in self._tasks
            if wanted(task)
        )

    def _readable(self, task: Task) -> bool:
        """Whether the parameters of a task may be read."""
        workload = self.workload
        own = (task.iteration, task.call)
        follows = workload.run_type == "train" and task.call % 2 == 1
        waits_for_calls = follows or not workload.rules.overlap_calls
        if waits_for_calls and not self._all_done(
            lambda other: (other.iteration, other.call) < own
        ):
            return False
        if workload.run_type == "infer":
            return workload.mode != "sync" or self._all_done(
                lambda other: other.iteration < task.iteration
            )
        if workload.mode == "layerwise":
            return task.iteration == 0 or set(task.layers) <= self._layers_done[task.iteration - 1]
        awaited = task.iteration - (2 if workload.mode == "async" else 1)
        return awaited < 0 or awaited in self._steps_done

    def _input_there(self, task: Task, microbatch: int) -> bool:
        key = (task.iteration, task.call, task.position - 1)
        return task.position == 0 or self._there(key, microbatch, task.device)

    def _there(self, key: tuple[int, int, int], microbatch: int, device: int) -> bool:
        end = self.ends[key].get(microbatch)
        if end is None:
            return False
        homes = self._homes[key]
        is_here = homes[microbatch % len(homes)] == device
        return end + (0.0 if is_here else self.workload.machine.hop_ms) <= self.now

    def _saved_input_there(self, task: Task, microbatch: int) -> bool:
        if task.phase != "backward" or task.layers.start == 0:
            return True
        for other in self._tasks:
            is_same_call = (other.iteration, other.call) == (task.iteration, task.call)
            is_forward = other.phase == "forward"
            if is_same_call and is_forward and task.layers.start - 1 in other.layers:
                key = (other.iteration, other.call, other.position)
                return self._there(key, microbatch, task.device)
        return True  # a forward of its own call, which ended before this one began

    # --- going on --------------------------------------------------------------------------

    def run(self) -> EventByEvent:
        """Run everything."""
        while True:
            while self._start_something():
                pass
            if not self._events:
                break
            self.now, _, then = heapq.heappop(self._events)
            then()
        assert all(task.done for task in self._tasks), "somebody waits forever"
        return self

    def _at(self, time: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, then))

    def _start_something(self) -> bool:
        started = False
        for queue in self._queues:
            for task in queue:
                if not task.done:
                    started |= self._start_task(task)
                    break
        for (direction, _), lane in self._lanes.items():
            started |= self._start_transfer(direction, lane)
        return self._start_step() or started

    def _start_task(self, task: Task) -> bool:
        microbatch = task.microbatches[task.at]
        if task.state == "idle" and task.upload.done and self._saved_input_there(task, microbatch):
            task.state = "early"
            self._at(self.now + task.early_ms, lambda: setattr(task, "state", "ready"))
            return True
        if task.state == "ready" and self._input_there(task, microbatch):
            task.state = "main"
            self._at(self.now + task.main_ms, lambda: self._finish(task, microbatch))
            return True
        return False

    def _finish(self, task: Task, microbatch: int) -> None:
        self.ends[(task.iteration, task.call, task.position)][microbatch] = self.now
        self._at(self.now + self.workload.machine.hop_ms, lambda: None)
        task.state = "idle"
        task.at += 1
        task.done = task.at == len(task.microbatches)

    def _start_transfer(self, direction: str, lane: Lane) -> bool:
        # A transfer of nothing waits in no line.
        for _, transfer in lane.queue:
            if transfer.size == 0 and not transfer.done and transfer.ready():
                transfer.done, transfer.end = True, self.now
                return True
        waiting = [entry for entry in lane.queue if entry[1].size > 0 and not entry[1].begun]
        if lane.busy or not waiting:
            return False
        device, transfer = waiting[0]
        if (direction, device) in self._device_lane_busy or not transfer.ready():
            return False
        spec = self.workload.machine.devices[device]
        rate = spec.upload_bytes_per_ms if direction == "up" else spec.download_bytes_per_ms
        assert rate is not None
        end = self.now + transfer.size / rate
        transfer.begun = True
        self._device_lane_busy.add((direction, device))
        if spec.link is not None:
            carried = self.now + transfer.size / self.workload.machine.links[spec.link]
            end = max(end, carried)
            lane.busy = True
            self._at(carried, lambda: setattr(lane, "busy", False))

        def arrive() -> None:
            transfer.done, transfer.end = True, self.now
            self._device_lane_busy.discard((direction, device))

        self._at(end, arrive)
        return True

    def _start_step(self) -> bool:
        if self.workload.run_type == "infer":
            return False
        if self.workload.mode == "layerwise":
            return self._start_layer_step()
        if self._step_running:
            return False
        iteration = len(self._steps_done)
        if iteration == self.iterations or not self._all_done(
            lambda task: task.iteration == iteration
        ):
            return False

        def stepped() -> None:
            self._step_running = False
            self._steps_done[iteration] = self.now

        self._step_running = True
        self._at(self.now + self.workload.optimizer_ms, stepped)
        return True

    def _start_layer_step(self) -> bool:
        """Update one layer of the first iteration that still has one that was not updated."""
        for iteration in range(self.iterations):
            waiting = set(range(len(self.workload.costs))) - self._layers_done[iteration]
            if waiting:
                layer = self._next_layer(iteration, waiting)
                if layer is None or self._step_running:
                    return False
                self._update(iteration, layer)
                return True
        return False

    def _next_layer(self, iteration: int, waiting: set[int]) -> int | None:
        """The layer whose turn it is, if it is any's.

        Where calls overlap, that whose gradients were home first; of one stage, the last. Where
        they do not, the step is called after them, and takes the lowest layer.
        """
        if not self.workload.rules.overlap_calls:
            has_turn = not self._step_running and self._all_done(
                lambda task: task.iteration == iteration
            )
            return min(waiting) if has_turn else None
        # Also while another layer is updated, or the time of coming home would be wrong.
        self._note_homes(iteration)
        homes = self._layer_homes[iteration]
        return min(waiting & set(homes), key=lambda layer: (homes[layer], -layer), default=None)

    def _note_homes(self, iteration: int) -> None:
        homes = self._layer_homes[iteration]
        for layer in range(len(self.workload.costs)):
            if layer not in homes and self._is_home(iteration, layer):
                homes[layer] = self.now

    def _is_home(self, iteration: int, layer: int) -> bool:
        return self._all_done(
            lambda task: (
                task.iteration == iteration and task.phase != "forward" and layer in task.layers
            )
        )

    def _update(self, iteration: int, layer: int) -> None:
        def stepped() -> None:
            self._step_running = False
            self._layers_done[iteration].add(layer)

        self._step_running = True
        self._at(self.now + self.workload.costs.layers[layer].optimizer_ms, stepped)

    # --- results ---------------------------------------------------------------------------

    @property
    def iteration_ends(self) -> list[float]:
        """When all stages and downloads of each iteration were done; in ``sync``, its step."""
        has_step = self.workload.mode == "sync" and self.workload.run_type != "infer"
        if has_step:
            return [self._steps_done[iteration] for iteration in range(self.iterations)]
        ends = []
        for iteration in range(self.iterations):
            last = 0.0
            for task in self._tasks:
                if task.iteration <= iteration:
                    stage_ends = self.ends[(task.iteration, task.call, task.position)]
                    home = 0.0 if task.download is None else task.download.end
                    last = max(last, home, *stage_ends.values())
            ends.append(last)
        return ends
