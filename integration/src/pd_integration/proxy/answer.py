"""The client's one answer, joined from the parts in which Decode gives it.

A request has one part unless it is sent to Prefill again; each further part goes on where the one before it broke off.
The client sees one answer: the first part's id and prompt, the last part's end, counts and positions of the whole.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

from pd_integration.proxy import resend
from pd_integration.proxy.bodies import Body
from pd_integration.proxy.errors import bad_upstream
from pd_integration.proxy.mid_character import CONTEXT, Detokenize, token_name
from pd_integration.proxy.sse import DONE, event_data

_TOKEN_ID = "token_id:"  # how vLLM names a token under return_tokens_as_token_ids


class Answer:
    """What Decode has answered to one request so far.

    Attributes:
        local: why the request can't be sent to Prefill again; its answer is passed on as it comes.
        prompt: token ids of the client's prompt; empty until Decode has told them.
        generated: token ids of all parts.
        recomputed: the part read last ended for the request to be sent to Prefill again.
    """

    def __init__(self, body: Body, *, chat: bool) -> None:
        self.local: str | None = None
        self.prompt: list[int] = []
        self.generated: list[int] = []
        self.recomputed = False
        self._body = body
        self._chat = chat
        self._head: Body = {}
        self._role_sent = False
        self._prompt_details: Any = None
        self._text_offset = 0
        self._whole: Body = {}
        self._part = 0
        self._before = 0  # tokens generated before this part
        self._empty = True  # nothing has come of this part but, perhaps, its prompt
        self._repeated = ""
        self._detokenize: Detokenize | None = None

    def next_part(self) -> None:
        """A part begins whose prompt is the client's and all that was generated."""
        self._part += 1
        self._before = len(self.generated)
        self._empty = True
        self.recomputed = False
        self.goes_on("", None)

    def goes_on(self, repeated: str, detokenize: Detokenize | None) -> None:
        """How the part's text begins.

        Args:
            repeated: text that the client has, given once more.
            detokenize: present when the part begins in the middle of a character.
        """
        self._repeated = repeated
        self._detokenize = detokenize

    async def events(self, part: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """The events that the client gets for the events of one part."""
        async for event in part:
            data = event_data(event)
            chunk = _json_object(data)
            if data == DONE:
                # vLLM does not stream the end of a request that ended before its first token.
                self.recomputed |= self._empty and self.local is None
                if not self.recomputed:
                    yield event
            elif chunk is None:
                yield event
            elif "error" in chunk:
                self._empty = False
                yield event
            elif self.local is not None:
                self._refuse_recomputed(chunk)
                yield event
            elif (seen := await self._take(chunk)) is not None:
                yield b"data: " + _dump(seen) + b"\n\n"

    async def add(self, part: Body) -> None:
        """One part of an answer that is not streamed; when no more is to come, `whole` gives the answer."""
        if self.local is not None:
            self._refuse_recomputed(part)
        else:
            await self._take(part, streamed=False)
            if self._whole:
                _append(self._whole, part, chat=self._chat)
        self._whole = part

    def whole(self) -> bytes:
        """The answer that is not streamed, as JSON."""
        if self.local is None:
            self._strip_ids(self._whole)
        return _dump(self._whole)

    async def _take(self, chunk: Body, *, streamed: bool = True) -> Body | None:
        """Change a chunk, or a whole part, into what the client is to see; None: nothing in it is for the client."""
        self._one_head(chunk)
        self._count(chunk.get("usage"))
        choice = _choice(chunk)
        if choice is None:
            return None if self.recomputed or self._empty else chunk
        self._check_prompt(chunk if self._chat else choice)
        holder, key = self._text_in(choice)
        ids = choice.get("token_ids") or []
        recomputed = resend.is_recomputed(choice, self._body)
        if (recomputed or self._part) and holder.get(key) and choice.get("token_ids") is None:
            raise bad_upstream("decode", "it did not return the token ids that it was asked for")
        if self._repeated and holder.get(key):
            holder[key] = self._without_repeated(holder[key])
        await self._name_tokens(choice, ids)
        self._place(choice.get("logprobs"))
        self.generated += ids
        if ids or choice.get("finish_reason") or (holder.get(key) and not self._body.get("echo")):
            self._empty = False
        if recomputed:
            self.recomputed = True
            self._open_end(chunk, choice)
        begins_again = self._role_sent and "role" in holder
        self._role_sent |= "role" in holder
        if streamed:
            self._strip_ids(chunk)
            if (begins_again or recomputed) and not ids and not holder.get(key):
                return None
        return chunk

    def _one_head(self, chunk: Body) -> None:
        self._head = self._head or {name: chunk[name] for name in ("id", "created", "model") if name in chunk}
        chunk.update((name, value) for name, value in self._head.items() if name in chunk)

    def _count(self, usage: Any) -> None:
        """Count what earlier parts generated as generated, not as prompt; the total is right as it is."""
        if not isinstance(usage, dict):
            return
        if not self._part:
            self._prompt_details = usage.get("prompt_tokens_details")
            return
        usage["prompt_tokens"] -= self._before
        usage["completion_tokens"] += self._before
        if "prompt_tokens_details" in usage:
            usage["prompt_tokens_details"] = self._prompt_details

    def _check_prompt(self, holder: Body) -> None:
        told = holder.get("prompt_token_ids")
        if told is None:
            return
        if not self.prompt:
            self.prompt = told
            return
        if told != [*self.prompt, *self.generated]:
            raise bad_upstream("decode", "it did not go on from the token ids that it was given; vLLM 0.32 does")
        holder["prompt_token_ids"] = None

    def _text_in(self, choice: Body) -> tuple[Body, str]:
        """The object that holds the choice's text, and under which name."""
        if not self._chat:
            return choice, "text"
        return choice.get("delta") or choice.get("message") or {}, "content"

    def _without_repeated(self, text: str) -> str:
        repeated, self._repeated = self._repeated, ""
        if not text.startswith(repeated):
            raise bad_upstream("decode", "its text does not go on from the text before")
        return text[len(repeated) :]

    async def _name_tokens(self, choice: Body, ids: list[int]) -> None:
        """Name the first tokens after half a character as if no part had ended there."""
        logprobs = choice.get("logprobs")
        if self._detokenize is None or not logprobs:
            return
        in_reach = CONTEXT - (len(self.generated) - self._before)
        for index, token_id in enumerate(ids[: max(0, in_reach)]):
            before = [*self.generated, *ids[:index]][-CONTEXT:]
            name = await token_name(token_id, before, self._detokenize)
            if name is not None:
                _rename(logprobs, index, name)

    def _place(self, logprobs: Any) -> None:
        """Positions in the text of the whole answer (completions); vLLM adds up the lengths of the tokens' names."""
        if not isinstance(logprobs, dict) or not logprobs.get("tokens"):
            return
        offsets = []
        for name in logprobs["tokens"]:
            offsets.append(self._text_offset)
            self._text_offset += len(name)
        logprobs["text_offset"] = offsets

    def _open_end(self, chunk: Body, choice: Body) -> None:
        choice["finish_reason"] = choice["stop_reason"] = None
        if "delta" in choice:
            del choice["stop_reason"]  # vLLM's chat chunks have one at the end only
        chunk.pop("system_fingerprint", None)

    def _refuse_recomputed(self, chunk: Body) -> None:
        choice = _choice(chunk)
        if choice is not None and resend.is_recomputed(choice, self._body):
            raise bad_upstream(
                "decode",
                f"it gave the request up for another Prefill, but the answer could not be joined: {self.local}; "
                "set recompute_fallback to local",
            )

    def _strip_ids(self, chunk: Body) -> None:
        if not self._body.get("return_token_ids"):
            for holder in (chunk, _choice(chunk) or {}):
                holder.update((name, None) for name in ("prompt_token_ids", "token_ids") if name in holder)


def _append(first: Body, last: Body, *, chat: bool) -> None:
    """Make `last` the answer of both parts; neither was streamed."""
    before, after = _choice(first), _choice(last)
    if before is None or after is None:
        raise bad_upstream("decode", "its answer has no choice")
    after["token_ids"] = (before.get("token_ids") or []) + (after.get("token_ids") or [])
    one, other, key = (before["message"], after["message"], "content") if chat else (before, after, "text")
    other[key] = (one.get(key) or "") + (other.get(key) or "")
    if before.get("logprobs"):
        for name, values in before["logprobs"].items():
            if isinstance(values, list):
                after["logprobs"][name] = values + after["logprobs"][name]
    for one, other in ((first, last), (before, after)):
        other.update(
            (name, one[name]) for name in ("prompt_token_ids", "prompt_logprobs", "prompt_text") if name in one
        )


def _rename(logprobs: Body, index: int, name: str) -> None:
    """Change the name of a generated token in either route's logprobs."""
    if logprobs.get("content"):
        entry = logprobs["content"][index]
        if not entry["token"].startswith(_TOKEN_ID):
            entry.update(token=name, bytes=list(name.encode()))
        return
    old = logprobs["tokens"][index]
    if old.startswith(_TOKEN_ID):
        return
    logprobs["tokens"][index] = name
    top = logprobs["top_logprobs"][index] if logprobs.get("top_logprobs") else None
    if top and old in top:
        top[name] = top.pop(old)


def _choice(chunk: Body) -> Body | None:
    choices = chunk.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _json_object(data: bytes | None) -> Body | None:
    if not data or data == DONE:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _dump(value: Body) -> bytes:
    """JSON as vLLM writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
