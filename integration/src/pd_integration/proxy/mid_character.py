"""Text at a boundary that splits a character: where vLLM's detokenizer stands, found out by asking a server.

A token may hold part of a character (one byte of three, say). vLLM's detokenizer holds such tokens back until what
follows completes them:

    tokens   ... "ab"  <E2>  <82> | <AC>  "c"          | the boundary between two parts of an answer
    text     ... "ab"   -     -   |  "€"  "c"

A request that begins right of the boundary has a detokenizer that never gave out "ab": as long as its prompt ends in
half a character it has no clean place to start from, and with the first whole character it gives the text of its
whole prompt, then "€" (seen with tokenizers 0.23, `DecodeStream` primed with ids). So one must know that text to take
it off, without what is held back. All of this needs a tokenizer, which the proxy has not; servers have one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pd_integration.proxy.errors import bad_upstream

Detokenize = Callable[[Sequence[int]], Awaitable[str]]

INCOMPLETE = "\ufffd"
"""What a decoder puts for bytes that are no whole character."""
CONTEXT = 4
"""Tokens a character can be spread over (UTF-8), and how far vLLM looks back to name a token in logprobs."""

# Enough context to see how a text ends: tokens without any text (special ones) may stand between the bytes.
_WINDOW = 32


async def held_back(token_ids: Sequence[int], detokenize: Detokenize) -> int:
    """How many of the last tokens have given no text yet, because it ends in an incomplete character."""
    count = 0
    while count < len(token_ids):
        end = len(token_ids) - count
        if not (await detokenize(token_ids[max(0, end - _WINDOW) : end])).endswith(INCOMPLETE):
            break
        count += 1
    return count


async def text_given(held: Sequence[int], text: str, detokenize: Detokenize) -> str:
    """The text that a client has of a prompt that ends with the tokens `held`.

    `text` is that of the whole prompt and of a token with a complete character behind it.

    Raises:
        ProxyError: 502, the server's detokenizer works otherwise (a tokenizer that is not a "fast" one, say).
    """
    up_to_held = text[: text.rfind(INCOMPLETE) + 1]
    of_held = await detokenize(held)
    if not up_to_held.endswith(of_held):
        raise bad_upstream(
            "prefill",
            "its detokenizer does not go on in the middle of a character; set recompute_fallback to local on Decode",
        )
    return up_to_held[: -len(of_held)]


async def token_name(token_id: int, before: Sequence[int], detokenize: Detokenize) -> str | None:
    """How vLLM names a token in logprobs when `before` was generated just before it; None: by its text alone.

    A token that completes a character is named by the whole character, one that does not by nothing (vLLM 0.32,
    `LogprobsProcessor`).
    """
    if not (await detokenize([token_id])).endswith(INCOMPLETE):
        return None
    for count in range(1, min(len(before), CONTEXT) + 1):
        whole = await detokenize([*before[-count:], token_id])
        if not whole.endswith(INCOMPLETE):
            return whole
    return ""
