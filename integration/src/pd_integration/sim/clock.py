"""Virtual time: a clock, and streams whose operations run in order on each stream and in any order between them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from pd_integration.sim.errors import Violation

Action = Callable[[], None]
Part = tuple[float, Action]

HANG = 10_000.0
"""Virtual seconds after which a wait counts as a hang; no operation of the simulator takes a hundredth of it."""


class Clock:
    """Virtual seconds. Events due at the same time run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._planned = 0

    def after(self, delay: float, action: Action) -> None:
        """Plan `action` for `delay` virtual seconds from now."""
        self._planned += 1
        heapq.heappush(self._events, (self.now + delay, self._planned, action))

    def advance(self, seconds: float) -> None:
        """Let time pass, running what is due."""
        self._run_until(self.now + seconds)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Let time pass until `done()`; Violation when nothing can make it true any more."""
        limit = self.now + HANG
        while not done():
            if not self._events or self._events[0][0] > limit:
                raise Violation("hang", f"{what} never ends")
            self._run_until(self._events[0][0])

    def drain(self) -> None:
        """Run everything that is planned."""
        while self._events:
            self._run_until(self._events[0][0])

    def _run_until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            due, _, action = heapq.heappop(self._events)
            self.now = due
            action()
        self.now = time

    # What npu_copy.backends.stream takes from the module `time`.

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """A host that polls: let time pass to the next event, or by `seconds` when nothing is planned."""
        if self._events:
            self._run_until(self._events[0][0])
        else:
            self.now += seconds


class Event:
    """torch's stream event: `record` marks a place in a stream, `wait_event` waits for the last place marked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mark: _Mark | None = None

    def record(self, stream: Stream) -> None:
        self._mark = _Mark()
        stream.put_mark(self._mark)

    def query(self) -> bool:
        """Whether the mark is reached; raises what the device has to report there, like a CUDA event."""
        if self._mark is None or self._mark.reached is None:
            return self._mark is None
        if self._mark.error is not None:
            raise self._mark.error
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events that have been reached."""
        assert self._mark is not None
        assert end._mark is not None
        assert self._mark.reached is not None
        assert end._mark.reached is not None
        return 1e3 * (end._mark.reached - self._mark.reached)


class _Mark:
    def __init__(self) -> None:
        self.reached: float | None = None
        self.error: Exception | None = None
        self.waiting: list[Action] = []


class Stream:
    """A queue of operations: marks, waits for marks of other streams, and work in parts that take time each."""

    def __init__(self, clock: Clock, start_delay: Callable[[], float]) -> None:
        self._clock = clock
        self._start_delay = start_delay
        self._queue: deque[tuple[str, Any]] = deque()
        self._busy = False
        self.error: Exception | None = None
        """Set by failing work: the next mark reports it."""

    def put_work(self, parts: list[Part]) -> None:
        """Queue (seconds, action) parts; each action happens at the end of its seconds."""
        self._put("work", deque(parts))

    def put_mark(self, mark: _Mark) -> None:
        self._put("mark", mark)

    def wait_event(self, event: Event) -> None:
        if event._mark is not None:
            self._put("wait", event._mark)

    def _put(self, kind: str, what: Any) -> None:
        self._queue.append((kind, what))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._queue:
            kind, what = self._queue[0]
            if kind == "wait" and what.reached is None:
                self._busy = True
                what.waiting.append(self._next)
                return
            self._queue.popleft()
            if kind == "mark":
                what.reached = self._clock.now
                what.error, self.error = self.error, None
                for resume in what.waiting:
                    resume()
            elif kind == "work" and what:
                self._busy = True
                self._clock.after(self._start_delay(), partial(self._work, what))
                return

    def _work(self, parts: deque[Part]) -> None:
        seconds, action = parts.popleft()

        def finish() -> None:
            action()
            if parts:
                self._work(parts)
            else:
                self._next()

        self._clock.after(seconds, finish)


_Stream = Stream
"""The class, where DeviceModule's method of the same name hides it."""


class DeviceModule:
    """What torch.cuda and torch.npu offer, as far as npu_copy uses it: one device of virtual streams."""

    def __init__(self, clock: Clock, start_delay: Callable[[], float]) -> None:
        self._clock = clock
        self._start_delay = start_delay
        self.compute = Stream(clock, start_delay)

    def Stream(self, device: object = None) -> _Stream:
        return Stream(self._clock, self._start_delay)

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self._clock)

    def current_stream(self, device: object = None) -> _Stream:
        return self.compute

    def stream(self, stream: _Stream) -> _Nothing:
        """torch's context manager that makes a stream current; the copies here name theirs."""
        return _Nothing()


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
