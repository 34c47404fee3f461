"""Sending a request to Prefill again after Decode gave it up: which requests may be, and the two bodies that do it.

Decode's scheduler, under `recompute_fallback: resend`, ends a preempted request whose KV nobody kept with stop_reason
"recomputed". It goes on as a new request whose prompt is the old one's token ids followed by those generated so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_integration.proxy.bodies import Body

STOP_REASON = "recomputed"
FALLBACK = "recompute_fallback"
COMPLETIONS_MAX_TOKENS = 16
"""What vLLM takes, as OpenAI does, for a completion without max_tokens."""

# They describe the client's own prompt, which part one has answered, or would be applied to it a second time.
_ONLY_ONCE = ("echo", "suffix", "truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "return_prompt_text")
# What Prefill's copy keeps: the model, how the prompt is cached and queued, how text is made of tokens.
_FOR_PREFILL = (
    "model",
    "cache_salt",
    "priority",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def why_local(body: Body, *, chat: bool) -> str | None:
    """Why this request's answer could not be joined exactly, so that Decode must recompute it itself; None: it could.

    The scheduler knows more reasons (`recompute_scheduler.fallback`); these are the ones only seen in the request.
    """
    if chat and body.get("tools"):
        return "a tool parser reads the answer as one text"
    if not chat and body.get("echo") and not body.get("return_token_ids"):
        return "vLLM does not echo the prompt's text when it returns token ids"
    if body.get("return_tokens_as_token_ids"):
        return None
    alternatives = (body.get("logprobs") and body.get("top_logprobs")) if chat else body.get("logprobs")
    if alternatives or body.get("logprob_token_ids"):
        return "the text of an alternative token depends on the tokens before it"
    return None


def recompute_locally(body: Body) -> Body:
    """The request with a word to Decode's scheduler: if preempted, recompute it there."""
    return {**body, "vllm_xargs": {**(body.get("vllm_xargs") or {}), FALLBACK: "local"}}


def is_recomputed(choice: Body, body: Body) -> bool:
    """Whether Decode ended this choice to have the request sent to Prefill again.

    A client may have a stop string of that very name; requests with stop strings are not given up.
    """
    stop = body.get("stop") or []
    ours = STOP_REASON not in ([stop] if isinstance(stop, str) else stop)
    return ours and choice.get("finish_reason") == "stop" and choice.get("stop_reason") == STOP_REASON


def again_for_prefill(body: Body, token_ids: Sequence[int]) -> Body:
    """The completion that makes Prefill compute the KV of `token_ids`; `Upstream.prefill` adds where it is to be kept.

    KV depends on token ids alone, so a chat request goes this way too, past its template.
    """
    kept = {key: body[key] for key in _FOR_PREFILL if body.get(key) is not None}
    return {**kept, "prompt": list(token_ids), "max_tokens": 1, "ignore_eos": True, "stream": False}


def again_for_decode(body: Body, prompt: Sequence[int], generated: Sequence[int], *, chat: bool) -> Body:
    """The client's request, to go on after `generated`; all ids are token ids."""
    again = {key: value for key, value in body.items() if key not in _ONLY_ONCE}
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            again[name] = body[name] - len(generated)
    if body.get("min_tokens"):
        again["min_tokens"] = max(0, body["min_tokens"] - len(generated))
    if chat:
        # vLLM takes these instead of applying the chat template (0.32: OnlineRenderer.preprocess_chat).
        again["kv_transfer_params"] = {"prompt_token_ids": [*prompt, *generated]}
    else:
        again["prompt"] = [*prompt, *generated]
        if body.get("max_tokens") is None:
            again["max_tokens"] = COMPLETIONS_MAX_TOKENS - len(generated)
    return again
