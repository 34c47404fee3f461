"""A fake ``torch.npu`` over the fake libascendcl: the names the backend uses, and nothing else.

Like torch_npu, it does not hand events and kernels to the device at once but through a host-side task queue, which
reading a stream's ``npu_stream`` handle empties.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import torch


class FakeNpu:
    def __init__(self, library: Path) -> None:
        self.library = lib = ctypes.CDLL(str(library))
        pointer = ctypes.c_void_p
        for name in ("fake_stream_create", "fake_event_create"):
            getattr(lib, name).restype = pointer
        for name in ("fake_stream_destroy", "fake_stream_idle", "fake_event_destroy", "fake_event_query"):
            getattr(lib, name).argtypes = [pointer]
        lib.fake_stream_hold.argtypes = [pointer, ctypes.c_int]
        lib.fake_fill.argtypes = [pointer, pointer, ctypes.c_int, ctypes.c_size_t]
        lib.fake_copy.argtypes = [pointer, pointer, pointer, ctypes.c_size_t]
        lib.fake_event_record.argtypes = lib.fake_event_wait.argtypes = [pointer, pointer]
        lib.fake_event_ms.argtypes, lib.fake_event_ms.restype = [pointer], ctypes.c_double
        lib.fake_pinned_bytes.restype = ctypes.c_size_t
        self.tasks: list[tuple] = []
        self.streams: list[FakeStream] = []
        # What a test can take away.
        self.handle_empties_queue = True
        self.ignores_waits: str | None = None  # "compute" or "copy": the streams whose waits are dropped
        self.compute = FakeStream(self, "compute")
        self._current = self.compute

    def Stream(self, device: torch.device | None = None) -> FakeStream:
        return FakeStream(self, "copy")

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def empty_task_queue(self) -> None:
        while self.tasks:
            function, *arguments = self.tasks.pop(0)
            function(*arguments)

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """A kernel on the compute stream that overwrites ``tensor``."""
        assert tensor.is_contiguous()
        self.tasks.append((self.library.fake_fill, self.compute.handle, tensor.data_ptr(), value, tensor.nbytes))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A kernel on the compute stream that reads ``tensor`` into the returned one."""
        assert tensor.is_contiguous()
        out = torch.zeros_like(tensor)
        self.tasks.append(
            (self.library.fake_copy, self.compute.handle, out.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        )
        return out

    def close(self) -> None:
        for stream in self.streams:
            stream.hold(False)
        self.empty_task_queue()
        self.settle()
        for stream in self.streams:
            self.library.fake_stream_destroy(stream.handle)

    def settle(self, seconds: float = 10.0) -> bool:
        """Let the streams run until none has work left, or the time is over; whether none has."""
        self.empty_task_queue()
        deadline = time.monotonic() + seconds
        while not all(self.library.fake_stream_idle(s.handle) for s in self.streams):
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True


class FakeStream:
    def __init__(self, npu: FakeNpu, role: str) -> None:
        self._npu, self.role = npu, role
        self.handle = npu.library.fake_stream_create()
        npu.streams.append(self)

    @property
    def npu_stream(self) -> int:
        if self._npu.handle_empties_queue:
            self._npu.empty_task_queue()
        return self.handle

    @property
    def cuda_stream(self) -> int:
        return self.npu_stream

    def wait_event(self, event: FakeEvent) -> None:
        if self._npu.ignores_waits != self.role:
            self._npu.tasks.append((self._npu.library.fake_event_wait, event.handle, self.handle))

    def hold(self, held: bool = True) -> None:
        self._npu.library.fake_stream_hold(self.handle, held)


class FakeEvent:
    def __init__(self, npu: FakeNpu) -> None:
        self._npu = npu
        self.handle = npu.library.fake_event_create()

    def record(self, stream: FakeStream) -> None:
        self._npu.tasks.append((self._npu.library.fake_event_record, self.handle, stream.handle))

    def query(self) -> bool:
        self._npu.empty_task_queue()  # the queue's own thread would have by now
        status = self._npu.library.fake_event_query(self.handle)
        if status > 1:
            raise RuntimeError(f"NPU function error, error code is {status}")
        return bool(status)

    def elapsed_time(self, end: FakeEvent) -> float:
        return self._npu.library.fake_event_ms(end.handle) - self._npu.library.fake_event_ms(self.handle)
