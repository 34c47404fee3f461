"""What becomes of a preempted request whose KV nobody kept: recomputed on this node, or sent to Prefill again."""

from dataclasses import dataclass, replace
from typing import Any

from recompute_scheduler._vllm import Request, VllmConfig
from recompute_scheduler.activation import settings

FALLBACK = "recompute_fallback"
MAX_LOCAL_TOKENS = "recompute_fallback_max_local_tokens"
STOP_REASON = "recomputed"
"""The stop_reason that tells a proxy to send a request to Prefill again; the name that vllm-ascend uses."""


@dataclass(frozen=True)
class Fallback:
    """The operator's choice.

    Attributes:
        resend: end the request with stop_reason "recomputed", so that a proxy sends it to Prefill again.
        max_local_tokens: with `resend`, requests of up to so many tokens are recomputed here all the same.
        server_max_tokens: output tokens that this server allows at most, whatever a request asks for; None: no limit.
    """

    resend: bool = False
    max_local_tokens: int = 0
    server_max_tokens: int | None = None

    @classmethod
    def parse(cls, additional_config: Any) -> "Fallback":
        """Read `recompute_fallback` and `recompute_fallback_max_local_tokens` from vLLM's additional_config.

        Raises:
            ValueError: names the key, its value and what to write instead.
        """
        found = settings(additional_config, FALLBACK, MAX_LOCAL_TOKENS)
        kind = found.get(FALLBACK, "local")
        if kind not in ("local", "resend"):
            raise ValueError(f'additional-config: {FALLBACK} is {kind!r}; write "local" or "resend"')
        limit = found.get(MAX_LOCAL_TOKENS, 0)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ValueError(f"additional-config: {MAX_LOCAL_TOKENS} is {limit!r}; write a number of tokens, 0 or more")
        if limit and kind == "local":
            raise ValueError(
                f"additional-config: {MAX_LOCAL_TOKENS} is {limit}, but nothing is ever sent to Prefill again; "
                f'add "{FALLBACK}": "resend", or take it out'
            )
        return cls(kind == "resend", limit)

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> "Fallback":
        """Read additional_config, and the limit of output tokens that the model's generation config sets."""
        chosen = cls.parse(vllm_config.additional_config)
        if not chosen.resend:
            return chosen
        return replace(chosen, server_max_tokens=vllm_config.model_config.get_diff_sampling_param().get("max_tokens"))

    def resends(self, request: Request) -> bool:
        """Whether this preempted request, of which nothing was kept, goes to Prefill again."""
        return self.resend and request.num_tokens > self.max_local_tokens and self.why_not(request) is None

    def why_not(self, request: Request) -> str | None:
        """Return what of `request` a resend would change; None: nothing."""
        if self.server_max_tokens is not None and request.max_tokens == self.server_max_tokens:
            return "the server's own limit of its length would start anew"
        return why_not_resend(request)


def why_not_resend(request: Request) -> str | None:
    """Return what of this request would change if it went on as a new one whose prompt ends with its output so far.

    None: nothing would; its tokens, and what they may be, depend on the tokens before them alone.
    """
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None or request.mm_features:
        return "its prompt is more than token ids"
    if request.use_structured_output:
        return "its grammar has taken in the output so far"
    if params.temperature > 0 and params.seed is not None:
        return "its random numbers go on from the output so far"
    if params.presence_penalty or params.frequency_penalty or params.bad_words or params.thinking_token_budget:
        return "its sampling looks at the output so far"
    if params.stop or params.repetition_detection:
        return "its end may lie across the output so far and the rest"
    if (params.extra_args or {}).get(FALLBACK) == "local":
        # A proxy that could not join the two answers sends it as vllm_xargs.
        return "it says so itself"
    if request.resumable:
        return "its input is not complete"
    return None
