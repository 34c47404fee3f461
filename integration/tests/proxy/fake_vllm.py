"""Fake Prefill and Decode servers with a real tokenizer and vLLM's answer formats; Decode gives requests up as told.

The fake model's output is a fixed list of tokens. Text is made of it with `tokenizers`' DecodeStream, as vLLM does, so
that characters spread over tokens behave as they do there.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from proxy_fakes import FakePrefill, FakeServer, Received, sse, stream
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BROKEN = "\ufffd"
LOGPROB = -0.5


def tokenizer() -> Tokenizer:
    """A token per byte, merged tokens that hold one character and part of the next, and a special token (id 0)."""
    of_byte = _byte_symbols()
    vocab = {"</s>": 0}
    for symbol in sorted(of_byte.values()):
        vocab[symbol] = len(vocab)
    merges = []
    for left, right in ((b" ", b"\xe2"), (b"x", b"\xe2"), (b"\xac", b"y"), (b"o", b"k")):
        pair = tuple("".join(of_byte[b] for b in part) for part in (left, right))
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


def _byte_symbols() -> dict[int, str]:
    """The visible symbol that byte-level BPE writes for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


@dataclass
class FakeModel:
    """What the model says to its one prompt, whatever the sampling parameters.

    Attributes:
        cuts: how many tokens Decode generates each time before it gives the request up; then it goes on to the end.
        per_event: tokens in one streamed event.
        late_end: a streamed request that was given up ends with an event of its own; else with its last tokens.
    """

    text: str
    cuts: list[int] = field(default_factory=list)
    per_event: int = 1
    late_end: bool = True
    prompt: str = "say: "
    tokenizer: Tokenizer = field(default_factory=tokenizer)
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = self.ids or self.tokenizer.encode(self.text, add_special_tokens=False).ids
        self.prompt_ids = [0, *self.tokenizer.encode(self.prompt, add_special_tokens=False).ids]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def texts(self, prompt: list[int], ids: list[int]) -> list[str]:
        """The text that each token brings out after `prompt`."""
        decoder = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
        return [decoder.step(self.tokenizer, token_id) or "" for token_id in ids]

    def name(self, token_id: int, context: list[int]) -> str:
        """The token's name in logprobs."""
        alone = self.decode([token_id])
        if not alone.endswith(BROKEN):
            return alone
        for n in range(1, min(4, len(context)) + 1):
            whole = self.decode([*context[-n:], token_id])
            if not whole.endswith(BROKEN):
                clean = context[-n:]
                while clean and self.decode(clean[-1:]).endswith(BROKEN):
                    clean = clean[:-1]
                return whole[len(self.decode(clean)) :] if clean else whole
        return ""


class FakeVllmPrefill(FakePrefill):
    def __init__(self, model: FakeModel) -> None:
        super().__init__(self._generate)
        self.model = model

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = "?"
        if isinstance(body.get("prompt"), list):
            (token_id,) = body.get("allowed_token_ids") or [self.model.ids[0]]
            (text,) = self.model.texts(body["prompt"], [token_id])
        return web.json_response({"id": "p", "choices": [{"index": 0, "text": text, "finish_reason": "length"}]})

    async def _aside(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asides.append(Received(request.path, request.headers, body))
        if request.path == "/tokenize":
            ids = self.model.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
            return web.json_response({"tokens": ids})
        return web.json_response({"prompt": self.model.decode(body["tokens"])})


class FakeVllmDecode(FakeServer):
    def __init__(self, model: FakeModel) -> None:
        super().__init__(self._generate)
        self.model = model
        self.tell(model.cuts)

    def tell(self, cuts: list[int]) -> None:
        """After how many tokens to give the next requests up."""
        self.cuts = iter(cuts)
        self.created = itertools.count(1000)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = self._prompt(request, body)
        done = len(prompt) - len(self.model.prompt_ids)
        assert prompt == [*self.model.prompt_ids, *self.model.ids[:done]]
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(self.model.ids)
        ids = self.model.ids[done : done + limit]
        cut = next(self.cuts, None)
        recomputed = cut is not None and cut < len(ids)
        if recomputed:
            ids = ids[:cut]
        end = ("stop", "recomputed") if recomputed else ("length", None)
        form = _Chat if "chat" in request.path else _Completion
        reply = form(self.model, body, prompt, ids, end, next(self.created), request.headers["X-Request-Id"])
        if not body.get("stream"):
            return web.json_response(reply.whole())
        await asyncio.sleep(0)
        return await stream(request, [*map(sse, reply.chunks()), b"data: [DONE]\n\n"])

    def _prompt(self, request: web.Request, body: dict[str, Any]) -> list[int]:
        if "chat" not in request.path:
            given = body["prompt"]
        else:
            given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        return given if isinstance(given, list) else self.model.prompt_ids


@dataclass
class _Reply:
    """What both routes share."""

    model: FakeModel
    body: dict[str, Any]
    prompt: list[int]
    ids: list[int]
    end: tuple[str, str | None]
    created: int
    request_id: str

    def __post_init__(self) -> None:
        self.texts = self.model.texts(self.prompt, self.ids)
        self.names = [self.model.name(t, self.ids[:i]) for i, t in enumerate(self.ids)]
        self.asked_ids = bool(self.body.get("return_token_ids"))
        options = self.body.get("stream_options") or {}
        self.include_usage = options.get("include_usage")
        self.continuous = options.get("continuous_usage_stats")

    def usage(self, generated: int, **details: Any) -> dict[str, Any]:
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": generated}
        return {**counts, "total_tokens": len(self.prompt) + generated, **details}

    def final_usage(self) -> dict[str, Any]:
        return self.usage(len(self.ids), prompt_tokens_details={"cached_tokens": len(self.prompt) - 1})

    def pieces(self) -> list[tuple[int, int]]:
        """(start, end) of each event's tokens."""
        n = self.model.per_event
        cut = [(start, min(start + n, len(self.ids))) for start in range(0, len(self.ids), n)]
        if self.end[1] == "recomputed":
            # vLLM does not stream an end before the first token.
            return [*cut, (len(self.ids), len(self.ids))] if cut and self.model.late_end else cut
        return cut

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": f"tiny-{self.created}"}

    def ids_or_none(self, ids: list[int]) -> list[int] | None:
        return ids if self.asked_ids else None

    def with_usage(self, chunks: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
        if self.include_usage:
            chunks.append({**self.head(kind), "choices": [], "usage": self.final_usage()})
        return chunks

    def choice_end(self, last: bool) -> dict[str, Any]:
        return {"finish_reason": self.end[0] if last else None, "stop_reason": self.end[1] if last else None}


class _Completion(_Reply):
    def logprobs(self, start: int, end: int) -> dict[str, Any] | None:
        if self.body.get("logprobs") is None:
            return None
        as_ids = self.body.get("return_tokens_as_token_ids")
        names = [f"token_id:{t}" for t in self.ids] if as_ids else self.names
        offsets = [sum(map(len, names[:i])) for i in range(start, end)]
        top = [{name: LOGPROB} for name in names[start:end]]
        return {
            "text_offset": offsets,
            "token_logprobs": [LOGPROB] * (end - start),
            "tokens": names[start:end],
            "top_logprobs": top,
        }

    def chunks(self) -> list[dict[str, Any]]:
        chunks = []
        pieces = self.pieces()
        for number, (start, end) in enumerate(pieces):
            choice = {"index": 0, "text": "".join(self.texts[start:end]), "logprobs": self.logprobs(start, end)}
            choice |= self.choice_end(number == len(pieces) - 1)
            choice["prompt_token_ids"] = self.ids_or_none(self.prompt) if number == 0 else None
            choice["token_ids"] = self.ids_or_none(self.ids[start:end])
            chunk = {**self.head("text_completion"), "choices": [choice]}
            if self.continuous:
                chunk["usage"] = self.usage(end)
            chunks.append(chunk)
        return self.with_usage(chunks, "text_completion")

    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "text": "".join(self.texts), "logprobs": self.logprobs(0, len(self.ids))}
        choice |= self.choice_end(True)
        choice["prompt_token_ids"], choice["token_ids"] = self.ids_or_none(self.prompt), self.ids_or_none(self.ids)
        choice["prompt_logprobs"] = [None, {"1": {"logprob": -1.0}}] if self.body.get("prompt_logprobs") else None
        return {**self.head("text_completion"), "choices": [choice], "usage": self.final_usage()}


class _Chat(_Reply):
    kind = "chat.completion.chunk"

    def logprobs(self, start: int, end: int) -> dict[str, Any] | None:
        if not self.body.get("logprobs"):
            return None
        entries = [
            {"token": name, "logprob": LOGPROB, "bytes": list(name.encode()), "top_logprobs": []}
            for name in self.names[start:end]
        ]
        return {"content": entries}

    def chunks(self) -> list[dict[str, Any]]:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        first = {**self.head(self.kind), "choices": [role], "prompt_token_ids": self.ids_or_none(self.prompt)}
        if self.continuous:
            first["usage"] = self.usage(0)
        chunks = [first]
        if self.body.get("echo"):
            echoed = {"index": 0, "delta": {"content": "last message, "}, "logprobs": None, "finish_reason": None}
            chunks.append({**self.head(self.kind), "choices": [echoed]})
        pieces = self.pieces()
        for number, (start, end) in enumerate(pieces):
            last = number == len(pieces) - 1
            choice = {"index": 0, "delta": {"content": "".join(self.texts[start:end])}}
            choice["logprobs"] = self.logprobs(start, end)
            choice |= self.choice_end(last)
            if not last:
                del choice["stop_reason"]
            choice["token_ids"] = self.ids_or_none(self.ids[start:end])
            chunk = {**self.head(self.kind), "choices": [choice]}
            if last and not self.include_usage:
                chunk["system_fingerprint"] = "fp"
            if self.continuous:
                chunk["usage"] = self.usage(end)
            chunks.append(chunk)
        return self.with_usage(chunks, self.kind)

    def whole(self) -> dict[str, Any]:
        echoed = "last message, " if self.body.get("echo") else ""
        message = {"role": "assistant", "content": echoed + "".join(self.texts), "tool_calls": [], "reasoning": None}
        choice = {"index": 0, "message": message, "logprobs": self.logprobs(0, len(self.ids))}
        choice |= self.choice_end(True)
        choice["token_ids"] = self.ids_or_none(self.ids)
        whole = {**self.head("chat.completion"), "choices": [choice], "usage": self.final_usage()}
        return {
            **whole,
            "prompt_token_ids": self.ids_or_none(self.prompt),
            "prompt_logprobs": None,
            "prompt_text": None,
        }
