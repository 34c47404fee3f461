"""Server-sent events, cut at their ends so that a stream never breaks off in the middle of one."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")
DONE = b"[DONE]"


async def split_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Whole events, each with its closing blank line, from bytes cut anywhere. An unfinished last one is dropped."""
    buffer = bytearray()
    searched = 0
    async for chunk in chunks:
        buffer += chunk
        while match := _EVENT_END.search(buffer, searched):
            yield bytes(buffer[: match.end()])
            del buffer[: match.end()]
            searched = 0
        searched = max(0, len(buffer) - 3)  # the longest end is 4 bytes: 3 of them may be here already


def event_data(event: bytes) -> bytes | None:
    """The event's data; None for a comment (vLLM's keep-alive) or an event without data."""
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event_error(event: bytes) -> dict[str, Any] | None:
    """The error object of an event that carries one as vLLM does, `{"error": {...}}`; else None."""
    data = event_data(event)
    if not data or not data.startswith(b'{"error"'):
        return None
    try:
        body = json.loads(data)
    except ValueError:
        return None
    error = body.get("error")
    return error if isinstance(error, dict) else None
