"""What a test wants to happen to copies: held back, late, or failing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from .base import Stream
from .clocks import StreamKey


@dataclass(frozen=True)
class CopyInfo:
    """A copy that is about to run.

    Attributes:
        device: index of the device whose stream it is on.
        stream: the stream.
        number: how many copies ran on this stream before, since the pool was opened.
        shape: of the target.
    """

    device: int
    stream: Stream
    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CpuChecks:
    """How checked CPU devices behave.

    Attributes:
        limit_bytes: memory of each device; ``None`` for no limit.
        delay_seed: delay each copy by a random time, drawn from this seed; ``None``: no delays.
        max_delay_s: the longest such delay, in seconds.
        on_copy: called on the copy thread before each copy. It may block (the copy is late) or
            raise (the copy fails with that exception).
    """

    limit_bytes: int | None = None
    delay_seed: int | None = None
    max_delay_s: float = 0.002
    on_copy: Callable[[CopyInfo], None] | None = None


class Hold:
    """A stream held back before a copy. Releases at the end of a ``with`` block."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._released = threading.Event()

    @property
    def is_reached(self) -> bool:
        """Whether a copy stands at the hold, or stood."""
        return self._reached.is_set()

    def wait_reached(self) -> None:
        """Block until a copy stands at the hold."""
        self._reached.wait()

    def release(self) -> None:
        """Let the stream go on."""
        self._released.set()

    def stand(self) -> None:
        """Called by the copy thread: block until the hold is released."""
        self._reached.set()
        self._released.wait()

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


@dataclass
class _Rule:
    device: int | None
    stream: Stream
    copies_before: int
    action: Hold | BaseException


class CopyScript:
    """The script of a pool's copies. Any thread may add to it; copy threads follow it."""

    def __init__(self, checks: CpuChecks) -> None:
        self._checks = checks
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._numbers: dict[StreamKey, int] = {}
        self._random: dict[StreamKey, random.Random] = {}
        self._holds: list[Hold] = []
        self._is_closed = False

    def hold(self, stream: Stream, device: int | None, after: int) -> Hold:
        """Hold ``stream`` back once ``after`` more copies ran on it; no device means any."""
        hold = Hold()
        with self._lock:
            self._holds.append(hold)
            if self._is_closed:
                hold.release()
        self._add(_Rule(device, stream, after, hold))
        return hold

    def fail(self, error: BaseException, stream: Stream, device: int | None, after: int) -> None:
        """Let one copy on ``stream`` fail with ``error`` once ``after`` more copies ran on it."""
        self._add(_Rule(device, stream, after, error))

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def before_copy(self, stream: StreamKey, shape: tuple[int, ...]) -> None:
        """Called by the copy thread before each copy: blocks or raises as the script says."""
        with self._lock:
            number = self._numbers.get(stream, 0)
            self._numbers[stream] = number + 1
            due = [rule for rule in self._rules if self._is_due(rule, stream)]
            self._rules = [rule for rule in self._rules if rule not in due]
        if self._checks.delay_seed is not None:
            time.sleep(self._delay_s(stream, self._checks.delay_seed))
        if self._checks.on_copy is not None:
            self._checks.on_copy(CopyInfo(stream.device, stream.stream, number, shape))
        for rule in due:
            if isinstance(rule.action, Hold):
                rule.action.stand()
        for rule in due:
            if isinstance(rule.action, BaseException):
                raise rule.action

    def _is_due(self, rule: _Rule, stream: StreamKey) -> bool:
        if rule.stream is not stream.stream or rule.device not in (None, stream.device):
            return False
        rule.copies_before -= 1
        return rule.copies_before < 0

    def _delay_s(self, stream: StreamKey, seed: int) -> float:
        # One generator per stream, used by that stream's thread alone: the k-th copy of a stream
        # has the same delay in every run.
        generator = self._random.get(stream)
        if generator is None:
            generator = self._random[stream] = random.Random(f"{seed} {stream}")
        return generator.uniform(0.0, self._checks.max_delay_s)

    def close(self) -> None:
        """Release every hold, those to come too: closing streams must run dry."""
        with self._lock:
            self._is_closed = True
            for hold in self._holds:
                hold.release()
