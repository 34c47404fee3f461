"""Cutting a byte stream into events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st

from pd_integration.proxy.sse import event_data, event_error, split_events


def split(chunks: list[bytes]) -> list[bytes]:
    async def feed() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def collect() -> list[bytes]:
        return [event async for event in split_events(feed())]

    return asyncio.run(collect())


@settings(deadline=None)
@given(
    st.lists(st.text("ab:é ", min_size=1, max_size=8).map(lambda t: b"data: " + t.encode()), max_size=6),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    st.integers(1, 9),
)
def test_events_do_not_depend_on_how_the_bytes_are_cut(lines: list[bytes], end: bytes, size: int) -> None:
    events = [line + end for line in lines]
    content = b"".join(events) + b"data: unfinished"
    assert split([content[i : i + size] for i in range(0, len(content), size)]) == events


def test_data_of_events() -> None:
    assert event_data(b"data: a\n\n") == b"a"
    assert event_data(b"event: x\r\ndata:a\r\ndata: b\r\n\r\n") == b"a\nb"
    assert event_data(b": keep-alive\n\n") is None


def test_only_vllm_s_error_object_is_an_error() -> None:
    assert event_error(b'data: {"error": {"message": "m", "code": 500}}\n\n') == {"message": "m", "code": 500}
    assert event_error(b'data: {"choices": [{"text": "{\\"error\\": {}}"}]}\n\n') is None
    assert event_error(b'data: {"error": null}\n\n') is None
    assert event_error(b'data: {"error": \n\n') is None
    assert event_error(b"data: [DONE]\n\n") is None
