"""What the proxy asks of servers, and how each request can fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from pd_integration.proxy import bodies
from pd_integration.proxy._timeout import timeout
from pd_integration.proxy.backends import DP_RANK_HEADER, Backend, Side
from pd_integration.proxy.config import ProxyConfig
from pd_integration.proxy.errors import ProxyError, Unreachable, bad_upstream, error_from_event, from_upstream
from pd_integration.proxy.guard import REQUEST_ID_HEADER
from pd_integration.proxy.sse import DONE, event_data, event_error, split_events


@dataclass(frozen=True)
class Call:
    """What both requests share: the route and the headers that go along (Authorization, X-Request-Id)."""

    path: str
    headers: dict[str, str]

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")


@dataclass(frozen=True)
class Prefilled:
    """What Prefill has done.

    Attributes:
        transfer: the parameters with which Decode pulls the KV. None when Prefill ended with finish_reason "stop" (a
            model's default stop token, say): then it has freed the KV, a pull would wait for ever, and Decode has to
            compute the prompt itself. None also where Prefill's own word on it is missing.
        text: of its one token, for completions.
    """

    transfer: bodies.Body | None
    text: str


def open_session(config: ProxyConfig) -> aiohttp.ClientSession:
    """A session whose connections serve one request each.

    vLLM closes an idle connection after 5 s. A request sent at that moment is lost, and one that may have begun must
    not be sent twice. Nothing of one client, cookies included, may reach the request of another.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout),
        headers={"Accept-Encoding": "identity"},
    )


class Upstream:
    """Sends requests to Prefill and Decode servers. Leaving any call early closes its connection: vLLM aborts then.

    Every method raises `Unreachable` when nothing was sent, and `ProxyError` with the client's status for the rest.
    """

    def __init__(self, session: aiohttp.ClientSession, config: ProxyConfig) -> None:
        self._session = session
        self._config = config
        self._rank_turns = itertools.count()

    async def prefill(self, backend: Backend, call: Call, body: bodies.Body) -> Prefilled:
        """Compute on `backend` the prompt of `body`, which asks for one token, and have its KV kept there."""
        with _failures("prefill", f"prefill_timeout of {self._config.prefill_timeout:g} s"):
            async with timeout(self._config.prefill_timeout):
                engine, headers = await self._engine(backend, call)
                transfer_id = uuid.uuid4().hex
                request = {**body, "kv_transfer_params": bodies.kept_params(transfer_id)}
                async with self._post(backend, call.path, headers, request) as response:
                    answer = await _json_answer(response, "prefill")
        try:
            choice = answer["choices"][0]
            finish_reason = choice["finish_reason"]
        except (KeyError, IndexError, TypeError):
            raise bad_upstream("prefill", "its answer has no choices[0].finish_reason") from None
        text = choice.get("text") or ""
        if finish_reason == "stop":
            return Prefilled(None, text)
        if engine is None or backend.bootstrap is None:
            return Prefilled(_transfer_in(answer), text)
        return Prefilled(bodies.transfer_params(transfer_id, backend.bootstrap, engine), text)

    async def decode(self, backend: Backend, call: Call, body: bodies.Body) -> bodies.Body:
        """Decode's whole answer to a request that does not stream.

        Nothing arrives before the last token, so only the total time-out, which the caller keeps, bounds it.
        """
        with _failures("decode", "time-out"):
            async with self._post(backend, call.path, call.headers, body) as response:
                return await _json_answer(response, "decode")

    @asynccontextmanager
    async def decode_events(
        self, backend: Backend, call: Call, body: bodies.Body
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Decode's stream, event by event up to [DONE]; entering raises if the first event is missing or an error."""
        limit = self._config.first_byte_timeout
        async with AsyncExitStack() as stack:
            with _failures("decode", f"first_byte_timeout of {limit:g} s"):
                async with timeout(limit):
                    response = await stack.enter_async_context(self._post(backend, call.path, call.headers, body))
                    if response.status != HTTPStatus.OK:
                        raise from_upstream("decode", response.status, await response.read(), response.headers)
                    events = split_events(response.content.iter_any())
                    stack.push_async_callback(events.aclose)
                    first = await anext(events, None)
            if first is not None and (error := event_error(first)) is not None:
                raise error_from_event("decode", error)
            rest = self._until_done(first, events)
            stack.push_async_callback(rest.aclose)
            if first is None:
                raise bad_upstream("decode", "its stream ended before the first event")
            yield rest

    async def detokenize(self, backend: Backend, call: Call, model: Any, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens written out."""
        answer = await self._aside(backend, call, "/detokenize", {"model": model, "tokens": list(token_ids)})
        if not isinstance(answer.get("prompt"), str):
            raise bad_upstream(backend.side, "its answer to /detokenize has no prompt")
        return answer["prompt"]

    async def letter(self, backend: Backend, call: Call, model: Any) -> int:
        """The id of a token whose text ends with a letter and has nothing but whole characters."""
        body = {"model": model, "prompt": "a", "add_special_tokens": False}
        answer = await self._aside(backend, call, "/tokenize", body)
        try:
            return int(answer["tokens"][-1])
        except (KeyError, IndexError, TypeError, ValueError):
            raise bad_upstream(backend.side, "its answer to /tokenize has no tokens") from None

    async def has_chat_parser(self, backend: Backend, call: Call, model: Any) -> bool | None:
        """Whether a reasoning or a tool parser makes `backend`'s chat answers of the model's text; None: unknown.

        Without a tool parser vLLM refuses a request that must call a tool; with a reasoning parser it counts reasoning
        tokens. Costs `backend` one or two generated tokens.
        """
        body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 1}
        tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}
        try:
            await self._aside(backend, call, call.path, {**body, "tools": [tool], "tool_choice": "required"})
        except Unreachable:
            raise
        except ProxyError as refusal:
            if refusal.status != HTTPStatus.BAD_REQUEST:
                return None
        else:
            return True
        try:
            usage = (await self._aside(backend, call, call.path, body))["usage"]
        except Unreachable:
            raise
        except (ProxyError, KeyError):
            return None
        return bool(usage.get("completion_tokens_details"))

    async def models(self, backend: Backend, headers: dict[str, str]) -> bytes:
        """The answer to GET /v1/models, a JSON object, as bytes."""
        limit = self._config.health_timeout
        with _failures(backend.side, f"health_timeout of {limit:g} s"):
            async with timeout(limit):
                url = f"{backend.url}/v1/models"
                async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                    await _json_answer(response, backend.side)
                    return await response.read()

    async def _until_done(
        self, event: bytes | None, events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        limit = self._config.idle_timeout
        while event is not None:
            yield event
            if event_data(event) == DONE:
                return
            with _failures("decode", f"idle_timeout of {limit:g} s"):
                async with timeout(limit):
                    event = await anext(events, None)
        raise bad_upstream("decode", "its stream ended before [DONE]")

    async def _aside(self, backend: Backend, call: Call, path: str, body: bodies.Body) -> bodies.Body:
        """The answer to a small question about a request, which has an id of its own for the server's log."""
        limit = self._config.aside_timeout
        headers = {**call.headers, REQUEST_ID_HEADER: f"{call.headers[REQUEST_ID_HEADER]}-aside"}
        with _failures(backend.side, f"aside_timeout of {limit:g} s"):
            async with timeout(limit), self._post(backend, path, headers, body) as response:
                return await _json_answer(response, backend.side)

    async def _engine(self, backend: Backend, call: Call) -> tuple[str | None, dict[str, str]]:
        """The engine of `backend` that is to compute, None where its answer will say, and headers that lead there."""
        if backend.bootstrap is None:
            return None, call.headers
        # Asked every time: a Prefill that was restarted has another engine id.
        engines = await self._engine_ids(backend)
        rank = sorted(engines)[next(self._rank_turns) % len(engines)]
        # With several data-parallel ranks the KV must be where we tell Decode to look for it.
        headers = {**call.headers, DP_RANK_HEADER: str(rank)} if len(engines) > 1 else call.headers
        return engines[rank], headers

    async def _engine_ids(self, backend: Backend) -> dict[int, str]:
        """Engine id of every data-parallel rank, from Prefill's bootstrap server."""
        async with self._session.get(f"{backend.bootstrap}/query", allow_redirects=False) as response:
            answer = await _json_answer(response, "prefill")
        try:
            engines = {int(rank): str(entry["engine_id"]) for rank, entry in answer.items()}
        except (ValueError, KeyError, TypeError):
            raise bad_upstream("prefill", "its bootstrap server answered something else than engine ids") from None
        if not engines:
            raise bad_upstream("prefill", "no engine has registered with its bootstrap server yet")
        return engines

    def _post(
        self, backend: Backend, path: str, headers: dict[str, str], body: bodies.Body
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.post(
            f"{backend.url}{path}",
            data=json.dumps(body).encode(),
            headers={**headers, "Content-Type": "application/json"},
            allow_redirects=False,
        )


@contextmanager
def _failures(side: Side, limit: str) -> Iterator[None]:
    """Turn what the HTTP client raises into what the client is told."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise Unreachable(
            HTTPStatus.BAD_GATEWAY, f"no connection to the {side} server", kind="no connection", side=side
        ) from None
    except asyncio.TimeoutError:
        message = f"the {side} server did not answer within the proxy's {limit}"
        raise ProxyError(HTTPStatus.GATEWAY_TIMEOUT, message, kind="timed out", side=side) from None
    except (aiohttp.ClientError, OSError) as error:
        raise bad_upstream(side, f"the connection broke ({type(error).__name__})") from None


def _transfer_in(answer: bodies.Body) -> bodies.Body | None:
    """Prefill's own word on where its KV is; None where it kept nothing (a prompt of less than a block, say)."""
    transfer = answer.get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, dict):
        raise bad_upstream("prefill", "the kv_transfer_params of its answer are not a JSON object")
    return transfer or None


async def _json_answer(response: aiohttp.ClientResponse, side: Side) -> dict[str, Any]:
    """The JSON object that a successful response holds."""
    content = await response.read()
    if response.status != HTTPStatus.OK:
        raise from_upstream(side, response.status, content, response.headers)
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise bad_upstream(side, "its answer is not a JSON object")
    return answer
