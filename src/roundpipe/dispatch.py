"""Running a plan over the devices: who runs what, in which order, and how it ends.

    tasks of a call     position 0   1   2   3   4   5     (forward stages, then backward stages)
    device              (cursor + position) mod devices
    one device          its tasks in order of position; in each task microbatches 0, 1, ..., M-1
    one microbatch      may enter position p when it has left position p-1

The caller makes the schedule, hands every device its list and waits. Each worker then needs only
the microbatches' progress counters. While a task runs, the weights of its device's next one arrive.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from .calls import Call, Phase, StageTask
from .compute import StageCompute, describe_held
from .costs import CostMeter, RunNotes
from .devices import DevicePool
from .devices.base import Device, Event
from .errors import Cancelled, Where, add_note, add_where
from .habits import LayerHabits
from .parameters import ParameterStore
from .plan import ModelExecutePlan
from .random_state import LayerRandomness
from .stage_state import Place, StageRun
from .stage_weights import StageWeights
from .trace import EventLog, clock_ns
from .transfer import Value
from .workers import Counter, Scope, Uninterrupted

OUT_OF_MEMORY_ADVICE = (
    "to lower what a device must hold, in this order: a larger num_microbatch; "
    'recompute_grain="layer"; a plan with smaller stages (ModelExecutePlan.auto with a lower '
    "model_memory_limit); a smaller batch or shorter sequences"
)


@dataclass(frozen=True)
class Engine:
    """What all runs of one model share.

    Attributes:
        name: the model's name.
        pool: the devices.
        store: the parameters.
        randomness: which layers draw random numbers.
        log: where spans go.
        accumulate_dtype: dtype in which gradients accumulate on a device.
        meter: where measured costs go.
        habits: what was learned of the layers by watching them.
    """

    name: str
    pool: DevicePool
    store: ParameterStore
    randomness: LayerRandomness
    log: EventLog
    accumulate_dtype: torch.dtype | None
    meter: CostMeter = field(default_factory=CostMeter)
    habits: LayerHabits = field(default_factory=LayerHabits)


@dataclass(frozen=True)
class _Stage:
    phase: Phase
    layers: range
    replicas: int


def forward_stages(plan: ModelExecutePlan, run_type: str, first_trainable: int) -> list[_Stage]:
    """The stages that a call runs at once: all of them but a later, user-driven backward."""
    replicas = plan.fwd_replicas or [1] * len(plan.fwd_plan)
    stages = [
        _Stage(Phase.FORWARD, layers, count)
        for layers, count in zip(plan.fwd_plan, replicas, strict=True)
    ]
    if run_type == "fused":
        fused, *rest = backward_stages(plan, first_trainable)
        stages += [_Stage(Phase.FUSED, fused.layers, fused.replicas), *rest]
    return stages


def backward_stages(plan: ModelExecutePlan, first_trainable: int) -> list[_Stage]:
    """The stages of the backward plan that have, or lie behind, something trainable."""
    replicas = plan.bwd_replicas or [1] * len(plan.bwd_plan)
    return [
        _Stage(Phase.BACKWARD, layers, count)
        for position, (layers, count) in enumerate(zip(plan.bwd_plan, replicas, strict=True))
        # Below the first trainable layer nobody wants a gradient. The fused stage stays: its
        # forward has not been run by anybody else.
        if position == 0 or layers.stop > first_trainable
    ]


def schedule(
    stages: Sequence[_Stage], cursor: int, num_devices: int, num_microbatch: int
) -> tuple[list[StageTask], int]:
    """Deal the stages to devices, round-robin.

    Args:
        stages: in the order in which microbatches visit them.
        cursor: index of the device that takes the first one.
        num_devices: how many there are.
        num_microbatch: microbatches of the call.

    Returns:
        The tasks by position, and the cursor for the next call.
    """
    homes: list[tuple[int, ...]] = []
    for stage in stages:
        width = min(stage.replicas, num_devices, num_microbatch)
        homes.append(tuple((cursor + r) % num_devices for r in range(width)))
        cursor = (cursor + width) % num_devices
    tasks = []
    for position, (stage, home) in enumerate(zip(stages, homes, strict=True)):
        following = homes[position + 1] if position + 1 < len(homes) else ()
        tasks += [
            StageTask(
                position=position,
                phase=stage.phase,
                layers=stage.layers,
                device=device,
                replica=replica,
                microbatches=range(replica, num_microbatch, len(home)),
                next_devices=following,
            )
            for replica, device in enumerate(home)
        ]
    return tasks, cursor


class Run:
    """One schedule being executed."""

    def __init__(self, engine: Engine, call: Call, tasks: Sequence[StageTask]) -> None:
        self.engine = engine
        self.call = call
        self.scope = Scope()
        self.tasks = tasks
        self.progress = [
            Counter(f"the progress of microbatch {chain.index} of {engine.name}")
            for chain in call.chains
        ]
        self._jobs: dict[int, _Job] = {}
        self._done = Counter(f"the devices running {engine.name}")
        self.record = engine.meter.open_run(
            call.keeps_grad, devices=len({task.device for task in tasks})
        )
        self._kept: list[tuple[Value, Device]] = []
        self._kept_lock = threading.Lock()

    def execute(self) -> None:
        """Run everything; returns when the devices are done. Called from the user's thread.

        Raises:
            BaseException: the first failure, the same object, after everybody has stopped.
        """
        try:
            self.start()
            self.wait()
        except BaseException as error:
            self.end(error)
            raise

    def start(self) -> None:
        """Hand every device its list. What it raises has to be given to :meth:`end`."""
        engine = self.engine
        by_device: dict[int, list[StageTask]] = {}
        for task in self.tasks:
            by_device.setdefault(task.device, []).append(task)
        devices = engine.pool.devices
        jobs = {
            d: _Job(_DeviceRun(self, devices[d], tasks), self._done)
            for d, tasks in by_device.items()
        }
        with Uninterrupted():  # a publish waits for every read that was announced
            for task in self.tasks:
                engine.store.declare_reads(task.layers)
            self._jobs = jobs
            engine.pool.submit(jobs)

    def wait(self) -> None:
        """Block until the devices are done.

        Raises:
            BaseException: the first failure, the same object, after everybody has stopped.
        """
        try:
            self._done.wait(len(self._jobs), self._caller)
        except BaseException as error:  # noqa: BLE001 - Ctrl-C in the caller; raised again below
            self.end(error)
        self._drop_copies()
        if self.scope.error is not None:
            raise self.scope.error

    def wait_first(self) -> None:
        """Block until the first microbatch has left the last stage.

        Raises:
            BaseException: the first failure, the same object, after everybody has stopped.
        """
        try:
            self.progress[0].wait(self.tasks[-1].position + 1, self._caller, self.scope)
        except Cancelled:
            self.wait()

    def end(self, error: BaseException) -> None:
        """Begin nothing more, because of ``error``; returns when the devices have stopped."""
        self.scope.fail(error)
        # Some may never have been submitted, and waiting for them would never end.
        for job in self._jobs.values():
            _shielded(job.call_off)
        _shielded(lambda: self._done.wait(len(self._jobs), self._caller))
        self._drop_copies()

    @property
    def _caller(self) -> str:
        return f"the caller of {self.engine.name}"

    def _drop_copies(self) -> None:
        for value, device in self._kept:
            value.drop(device)

    def keep(self, value: Value, device: Device) -> None:
        """A copy of ``value`` stays on ``device`` until the run is over at the latest."""
        with self._kept_lock:
            self._kept.append((value, device))


def _shielded(function: Callable[[], None]) -> None:
    """Finish although Ctrl-C is pressed again: workers still use what would be torn down."""
    while True:
        try:
            function()
        except KeyboardInterrupt:
            continue
        return


class _Job:
    """A device's part of a run, which is either run by the worker or called off by the caller."""

    def __init__(self, device_run: _DeviceRun, done: Counter) -> None:
        self._device_run = device_run
        self._done = done
        self._free = threading.Lock()  # held by whoever takes the job, for good

    def __call__(self) -> None:
        if self._free.acquire(blocking=False):
            try:
                self._device_run.main()
            finally:
                self._done.advance()

    def call_off(self) -> None:
        """Nobody shall begin it any more; nothing if somebody has."""
        if self._free.acquire(blocking=False):
            self._device_run.call_off()
            self._done.advance()


class _DeviceRun:
    """One device's part of a run. Lives on the device's worker."""

    def __init__(self, run: Run, device: Device, tasks: Sequence[StageTask]) -> None:
        self._run = run
        self._device = device
        self._tasks = tasks
        self._place = Place()
        self._task = tasks[0]
        self._resident: list[StageWeights] = []
        self._begun = 0
        self._notes = RunNotes(
            device, run.call.number, run.engine.store.submitted_version, run.record.wants_sizes
        )
        self._homecoming: list[tuple[StageTask, Sequence[Event]]] = []

    def main(self) -> None:
        """Run all tasks; failures end the run and are kept for the caller."""
        try:
            with self._device.random_sandbox():
                self._device.start_clock()
                self._run_tasks()
        except Cancelled:
            self._give_up()
        except BaseException as error:  # noqa: BLE001 - raised by the caller of the run
            self._report(error)
            self._give_up()

    def _run_tasks(self) -> None:
        weights: StageWeights | None = None
        for index, task in enumerate(self._tasks):
            self._task = task
            weights = weights or self._begin(task)
            following = self._tasks[index + 1] if index + 1 < len(self._tasks) else None
            weights = self._run_task(task, weights, following)
        for task, events in self._homecoming:
            self._task, self._place = task, Place(phase="download")
            for event in events:
                event.synchronize()
        self._run.record.add(self._notes.samples(self._run.engine.log))

    def _run_task(
        self, task: StageTask, weights: StageWeights, following: StageTask | None
    ) -> StageWeights | None:
        """Run a task's microbatches. Returns the next task's weights, if they are on their way."""
        run, call = self._run, self._run.call
        self._at_upload()
        weights.arrive()
        compute = StageCompute(
            StageRun(
                call, task, self._device, weights, self._place, self._notes,
                run.engine.randomness, run.engine.habits,
                keep=lambda value: run.keep(value, self._device), check=run.scope.check,
            )
        )  # fmt: skip
        self._notes.stage(task.phase.value, task.position, task.layers)
        who = f"{self._device.name}, stage {task.label}"
        upcoming: StageWeights | None = None
        count = len(task.microbatches)
        for done, index in enumerate(task.microbatches):
            upcoming = self._prefetch(following, upcoming, 1 / (count - done))
            run.progress[index].wait(task.position, who, run.scope)
            run.scope.check()
            chain = call.chains[index]
            if chain.entry is not None:
                self._at_upload()
                self._place.microbatch = index
                chain.entry.arrive(who, run.scope, run.engine.pool)
            self._notes.begin(index)
            compute.run(chain)
            self._notes.end()
            run.progress[index].advance_to(task.position + 1)
            if done == 0 and task.phase is not Phase.FORWARD:
                weights.account_gradients()
        if task.phase is not Phase.FORWARD:
            self._place.phase, self._place.layer, self._place.microbatch = "download", None, None
            self._homecoming.append((task, weights.send_gradients(who, run.scope)))
        for transfer in weights.transfers:
            self._notes.transferred(task.position, task.layers, *transfer)
        weights.release()
        self._resident.remove(weights)
        return upcoming

    def _prefetch(
        self, following: StageTask | None, upcoming: StageWeights | None, share: float
    ) -> StageWeights | None:
        """Enqueue a share of the next task's weights behind the activations enqueued so far."""
        if following is None:
            return None
        if upcoming is None:
            store, version = self._run.engine.store, self._run.call.version
            if not all(store.readable(index, version) for index in following.layers):
                # Its parameters are still being published: this task need not wait for that.
                return None
            upcoming = self._make(following)
        upcoming.issue(int(upcoming.remaining_bytes * share))
        return upcoming

    def _begin(self, task: StageTask) -> StageWeights:
        """Start the upload of a task's weights once they may be read."""
        run = self._run
        self._at_upload()
        who = f"{self._device.name}, stage {task.label}"
        begin_ns = clock_ns()
        for index in task.layers:
            run.engine.store.wait_readable(index, run.call.version, who, run.scope)
        self._notes.waited_for_step(task.position, task.layers, begin_ns)
        return self._make(task)

    def _make(self, task: StageTask) -> StageWeights:
        engine, before, running = self._run.engine, replace(self._place), self._task
        self._task = task
        self._at_upload()
        weights = StageWeights(
            self._device, engine.store, task.layers, task.replica,
            keeps_grad=task.phase is not Phase.FORWARD, accumulate_dtype=engine.accumulate_dtype,
        )  # fmt: skip
        self._resident.append(weights)
        self._begun += 1
        self._task = running
        self._place.phase, self._place.layer = before.phase, before.layer
        self._place.microbatch = before.microbatch
        return weights

    def _at_upload(self) -> None:
        self._place.phase, self._place.layer, self._place.microbatch = "upload", None, None

    # --- failures ----------------------------------------------------------------------------

    def _report(self, error: BaseException) -> None:
        engine, place = self._run.engine, self._place
        layer = None if place.layer is None else engine.store.layers[place.layer].label
        stage, device = place.origin or (self._task.label, self._device.name)
        where = Where(
            model=engine.name, layer=layer, stage=stage, microbatch=place.microbatch,
            phase=place.phase, device=device,
        )  # fmt: skip
        if self._run.scope.fail(error):
            add_where(error, where)
            if isinstance(error, torch.OutOfMemoryError):
                held = describe_held(self._resident) or "no weights"
                add_note(error, f"{self._device.name} held {held}. {OUT_OF_MEMORY_ADVICE}")
                # The locals of the frames it came through hold the graph, and so the weights: while
                # somebody keeps the error, there would be no room for another try.
                traceback.clear_frames(error.__traceback__)

    def _give_up(self) -> None:
        """Let copies drain, drop what the device holds, and call off the reads not made."""
        try:
            self._device.synchronize()
            self._notes.write_spans(self._run.engine.log)
        except BaseException as error:  # noqa: BLE001 - the run has failed already
            self._run.scope.fail(error)
        for weights in self._resident:
            weights.release()
        self._resident.clear()
        self.call_off()

    def call_off(self) -> None:
        """The reads that were announced and not begun will not be made."""
        for task in self._tasks[self._begun :]:
            for index in task.layers:
                self._run.engine.store.read_issued(index, None)
