"""The optimizer thread: fold gradients, run the user's step function, publish.

    caller              optimizer thread
    ------              ----------------
    step(f, async) ──▶  publish θ_n · fold the gradients taken by step n+1 · f() makes θ_n+1
    call reads θ_n      (runs beside this)
    step(f, async) ──▶  waits for the job above; then publish θ_n+1 · ...

An asynchronous step's result is published when the next step is submitted (or on `synchronize`),
not when it is ready: what a call computes with never depends on how fast the optimizer was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from .errors import Where, add_where
from .parameters import Contribution, ParameterRecord, ParameterStore
from .trace import logger
from .workers import Counter, Worker


class StepContext(threading.local):
    """Whether this thread is inside a step function or an ``OptimizerCtx``."""

    depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_exc: object) -> None:
        self.depth -= 1


# Thread-local, so that a step function on an optimizer thread changes nothing for the caller.
masters_visible = StepContext()


class _Job:
    """What the thread does next: publish a version and, but for ``synchronize``, run a step.

    Attributes:
        version: the version to publish, which the masters hold.
        declared: for each layer, the reads that publishing must wait for.
        step_fn: what makes the next version; None to only publish.
        gradients: what the step folds.
        error: how it ended, if it failed.
    """

    def __init__(
        self,
        version: int,
        declared: list[int],
        step_fn: Callable[[], Any] | None = None,
        gradients: Sequence[tuple[ParameterRecord, list[Contribution]]] = (),
    ) -> None:
        self.version = version
        self.declared = declared
        self.step_fn = step_fn
        self.gradients = gradients
        self.error: BaseException | None = None


class Stepper:
    """Runs steps of one model, at most one in flight.

    All methods are called from the user's thread.

    Args:
        store: the parameter store.
        model_name: for notes on errors.
    """

    def __init__(self, store: ParameterStore, model_name: str) -> None:
        self._store = store
        self._name = model_name
        self._worker: Worker | None = None
        self._job: _Job | None = None
        self._submitted = 0
        self._done = Counter(f"steps done of {model_name}")

    def submit(self, step_fn: Callable[[], Any], is_async: bool) -> None:
        """Start a step; see :meth:`RoundPipe.step` for what it promises.

        Raises:
            BaseException: what an earlier, or (synchronous) this step function raised.
        """
        self.wait()
        store = self._store
        # Taken now and not when the thread gets to it: gradients of a later call belong to the
        # next step (rule 5 of the store).
        store.adopt_user_gradients()
        version = store.submitted_version
        job = _Job(version, store.declared_reads(), step_fn, store.take_gradients())
        store.submitted_version = version + 1
        self._start(job)
        if not is_async:
            self.publish_latest()

    def _start(self, job: _Job) -> None:
        """Hand the job to the thread; calls from now on read what it publishes."""
        if self._worker is None:
            self._worker = Worker(f"roundpipe-optimizer-{self._name}")
        self._store.entitled_version = job.version
        self._job = job
        self._submitted += 1
        self._worker.submit(lambda: self._run(job))

    def wait(self) -> None:
        """Wait for the step in flight.

        Raises:
            BaseException: what its step function raised; once, the same object.
        """
        self._done.wait(self._submitted, f"the caller of {self._name}")
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what the last step raised, if it is over and nobody was told yet."""
        job = self._job
        if job is not None and self._done.value >= self._submitted:
            self._job = None
            if job.error is not None:
                raise job.error

    def publish_latest(self) -> None:
        """Wait for the step in flight and make its result what calls read."""
        store = self._store
        try:
            self.wait()
        finally:
            # Also after a failure: the masters are then whatever the step function left, and the
            # model's parameters follow them. Not if Ctrl-C ended the wait: the step is still at it.
            version = store.submitted_version
            is_over = self._done.value >= self._submitted
            if is_over and store.entitled_version < version:
                # On the thread, not here: Ctrl-C in the middle would leave layers of two versions.
                self._start(_Job(version, store.declared_reads()))
                self.wait()

    def on_own_thread(self) -> bool:
        """Whether the calling thread is the one that runs the step functions."""
        return self._worker is not None and self._worker.is_current()

    def close(self) -> None:
        """End the thread; a failure that nobody was told of is logged."""
        if self._worker is not None:
            self._worker.close()
        job, self._job = self._job, None
        if job is not None and job.error is not None:
            logger.error(
                "an asynchronous step of %s failed and nothing was called afterwards that could "
                "raise the error", self._name, exc_info=job.error,
            )  # fmt: skip

    def _run(self, job: _Job) -> None:
        try:
            self._store.publish(job.version, job.declared)
            if job.step_fn is not None:
                self._step(job.step_fn, job)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, raised there
            add_where(error, Where(model=self._name, phase="step"))
            job.error = error
        finally:
            self._done.advance()

    def _step(self, step_fn: Callable[[], Any], job: _Job) -> None:
        try:
            for record, contributions in job.gradients:
                self._store.fold(record, contributions)
            job.gradients = ()  # a step function that frees the masters' gradients frees them all
            with masters_visible:
                step_fn()
        finally:
            # Also after a failure: it may have changed any master before.
            self._store.mark_all_dirty()
