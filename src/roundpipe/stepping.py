"""The optimizer thread: what steps run on, and when their results may be seen.

    caller              optimizer thread
    ------              ----------------
    step(f, async) ──▶  publish θ_n · fold the gradients taken by step n+1 · f() makes θ_n+1
    call reads θ_n      (runs beside this)
    step(f, async) ──▶  waits for the job above; then publish θ_n+1 · ...

An asynchronous step's result is published when the next step is submitted (or on `synchronize`),
not when it is ready: what a call computes with never depends on how fast the optimizer was.

    step(optimizer) ─▶  layer by layer: fold, update, publish θ_n+1
    call reads θ_n+1    (its first stage starts when its layers are published)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .errors import StateError, Where, add_where
from .parameters import ParameterStore, Submission
from .trace import EventLog, Span, clock_ns, logger
from .workers import Counter, Uninterrupted, Worker

_LEAST_WAIT_NS = 20_000  # shorter waits are those of asking


class StepContext(threading.local):
    """Whether this thread is inside a step function or an ``OptimizerCtx``."""

    depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_exc: object) -> None:
        self.depth -= 1


# Thread-local, so that a step function on an optimizer thread changes nothing for the caller.
masters_visible = StepContext()


class Ticket:
    """One submitted step, as the thread that submitted it and the one that runs it see it.

    Args:
        number: how many steps its thread has submitted, this one included.
        is_async: whether it may still run when :meth:`RoundPipe.step` has returned.
        done: the optimizer thread's counter of finished jobs.
        jobs: what the counter says when this step is over.
    """

    def __init__(self, number: int, is_async: bool, done: Counter, jobs: int) -> None:
        self.number = number
        self.is_async = is_async
        self._done = done
        self._jobs = jobs

    @property
    def is_over(self) -> bool:
        """Whether the step is done, or failed."""
        return self._done.value >= self._jobs

    def wait(self, who: str) -> None:
        """Block until the step is over."""
        self._done.wait(self._jobs, who)


class StepsOfThread(threading.local):
    """The steps that a thread has submitted, and the one it is running.

    Attributes:
        submitted: how many it has submitted, of all models.
        last_async: the number of the latest one that is asynchronous.
        in_flight: those that may not be over yet.
        running: what an optimizer thread is at; ``None`` on other threads.
    """

    submitted: int = 0
    last_async: int = 0
    running: Ticket | None = None

    def __init__(self) -> None:
        self.in_flight: list[Ticket] = []

    def submit(self, is_async: bool, done: Counter, jobs: int) -> Ticket:
        """Note one more."""
        self.submitted += 1
        if is_async:
            self.last_async = self.submitted
        ticket = Ticket(self.submitted, is_async, done, jobs)
        self.in_flight = [*(t for t in self.in_flight if not t.is_over), ticket]
        return ticket


# Thread-local like `masters_visible`: a gradient scaler that belongs to no model finds out from it
# which iteration a step belongs to.
steps_of_thread = StepsOfThread()


class Step(Protocol):
    """What a step does on the optimizer thread."""

    @property
    def lag(self) -> int:
        """How many versions later calls are behind the one it makes: 0 if it publishes itself."""

    def run(self, store: ParameterStore, submission: Submission) -> None:
        """Publish what the masters hold and make the next version of them."""


class FunctionStep:
    """A step by the user's function. Its result is published by the next step."""

    lag = 1

    def __init__(self, step_fn: Callable[[], Any]) -> None:
        self._step_fn = step_fn

    def run(self, store: ParameterStore, submission: Submission) -> None:
        """Publish, fold the gradients, run the function."""
        contributions = [c for _, group in submission.gradients for c in group]
        try:
            store.publish(submission.version, submission.declared)
            while submission.gradients:
                # Not in a loop's variable: what was copied into a master is freed at once.
                store.fold(*submission.gradients.pop(0))
            contributions = [c for c in contributions if not c.is_released]
            self._step_fn()
        finally:
            for contribution in contributions:
                contribution.release()
            # Also after a failure: it may have changed any master before.
            store.mark_all_dirty()


class _Publication:
    """No step: only publishes."""

    lag = 0

    def run(self, store: ParameterStore, submission: Submission) -> None:
        store.publish(submission.version, submission.declared)


class _Job:
    """What the thread does next, and how it ended."""

    def __init__(self, step: Step, submission: Submission, ticket: Ticket | None) -> None:
        self.step = step
        self.submission = submission
        self.ticket = ticket
        self.error: BaseException | None = None


class Stepper:
    """Runs steps of one model, at most one in flight.

    All methods are called from the user's thread.

    Args:
        store: the parameter store.
        model_name: for notes on errors.
        log: where steps, and waits for them, are noted.
    """

    def __init__(self, store: ParameterStore, model_name: str, log: EventLog | None = None) -> None:
        self._log = log
        self.store = store
        self._name = model_name
        self._worker: Worker | None = None
        self._job: _Job | None = None
        self._submitted = 0
        self._is_closed = False
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._done = Counter(f"steps done of {model_name}")

    def submit(self, step: Step, is_async: bool) -> None:
        """Start a step; see :meth:`RoundPipe.step` for what it promises.

        Args:
            step: what to do.
            is_async: whether to return before it is done and, if it has a lag, published.

        Raises:
            BaseException: what an earlier, or (synchronous) this step raised.
            StateError: the model was closed, or see :meth:`ParameterStore.follow_user_writes`.
        """
        if self._is_closed:
            raise StateError(f"step was called after {self._name} was closed; make a new RoundPipe")
        self.wait()
        store = self.store
        store.follow_user_writes()
        # Taken now and not when the thread gets to it: gradients of a later call belong to the
        # next step (rule 5 of the store).
        store.adopt_user_gradients()
        with Uninterrupted():  # a version that is counted must be made, and gradients taken used
            version = store.submitted_version
            submission = Submission(version, store.declared_reads(), store.take_gradients())
            store.submitted_version = version + 1
            store.entitled_version = version + 1 - step.lag
            ticket = steps_of_thread.submit(is_async, self._done, self._submitted + 1)
            self._start(_Job(step, submission, ticket))
        if not is_async:
            self.publish_latest()

    def guard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make ``optimizer.state_dict()`` wait for the step in flight, from now on."""
        if optimizer in self._guarded:
            return
        self._guarded.add(optimizer)
        mine = weakref.ref(self)

        def wait(_optimizer: torch.optim.Optimizer) -> None:
            stepper = mine()
            if stepper is not None and not stepper.on_own_thread():
                stepper._done.wait(stepper._submitted, "state_dict() of an optimizer")

        optimizer.register_state_dict_pre_hook(wait)

    def _start(self, job: _Job) -> None:
        if self._worker is None and not self._is_closed:
            self._worker = Worker(f"roundpipe-optimizer-{self._name}")
        self._job = job
        self._submitted += 1
        if self._worker is None or self._is_closed:
            self._run(job)  # closed, and only to publish: `submit` refuses steps
        else:
            self._worker.submit(lambda: self._run(job))

    def wait(self) -> None:
        """Wait for the step in flight.

        Raises:
            BaseException: what it raised; once, the same object.
        """
        self.settle()
        self.raise_failure()

    def settle(self) -> None:
        """Wait for the step in flight, however it ends."""
        begin_ns = clock_ns()
        self._done.wait(self._submitted, f"the caller of {self._name}")
        if clock_ns() - begin_ns >= _LEAST_WAIT_NS:
            self._note("step_wait", self.store.submitted_version, begin_ns)

    def _note(self, phase: str, version: int, begin_ns: int) -> None:
        if self._log is not None:
            self._log.add(Span(phase, self._name, -1, -1, -1, begin_ns, clock_ns(), version))

    def raise_failure(self) -> None:
        """Raise what the last step raised, if it is over and nobody was told yet."""
        job = self._job
        if job is not None and self._done.value >= self._submitted:
            self._job = None
            if job.error is not None:
                raise job.error

    def publish_latest(self) -> None:
        """Wait for the step in flight and make its result what calls read.

        Raises:
            BaseException: what the step raised.
            StateError: see :meth:`ParameterStore.report_lost_writes`.
        """
        store = self.store
        try:
            self.wait()
        finally:
            # Also after a failure: the masters are then whatever the step function left, and the
            # model's parameters follow them. Not if Ctrl-C ended the wait: the step is still at it.
            version = store.submitted_version
            is_over = self._done.value >= self._submitted
            if is_over:
                store.take_user_writes()
            if is_over and store.entitled_version < version:
                # On the thread, not here: Ctrl-C in the middle would leave layers of two versions.
                with Uninterrupted():
                    store.entitled_version = version
                    submission = Submission(version, store.declared_reads(), [])
                    self._start(_Job(_Publication(), submission, None))
                self.wait()
        store.synchronized_version = version
        # Not before: a failed step is told first.
        store.report_lost_writes()

    def on_own_thread(self) -> bool:
        """Whether the calling thread is the one that runs the step functions."""
        return self._worker is not None and self._worker.is_current()

    def close(self) -> None:
        """End the thread; a failure that nobody was told of is logged.

        ``synchronize()`` still publishes what the last step made.
        """
        self._is_closed = True
        if self._worker is not None:
            self._worker.close()
        job, self._job = self._job, None
        if job is not None and job.error is not None:
            logger.error(
                "an asynchronous step of %s failed and nothing was called afterwards that could "
                "raise the error", self._name, exc_info=job.error,
            )  # fmt: skip

    def _run(self, job: _Job) -> None:
        steps_of_thread.running = job.ticket
        begin_ns = clock_ns()
        try:
            with masters_visible:
                job.step.run(self.store, job.submission)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, raised there
            add_where(error, Where(model=self._name, phase="step"))
            job.error = error
        finally:
            steps_of_thread.running = None
            phase = "publish" if job.ticket is None else "step"
            # What is only published was made by the step before.
            made_by = job.submission.version - (phase == "publish")
            self._note(phase, max(made_by, 0), begin_ns)
            self._done.advance()
