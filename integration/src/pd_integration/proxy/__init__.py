"""Prefill/decode proxy: one OpenAI endpoint in front of N Prefill and M Decode servers joined by Mooncake.

Run it with `python -m pd_integration.proxy --help`, or from code with `create_app`, `start` and `run`.

How a request travels
---------------------
1. Prefill gets a copy that generates one token and keeps the KV cache (`do_remote_decode`).
2. When Prefill has answered, Decode gets the client's own request together with the place to pull the KV from
   (`do_remote_prefill`), and its answer is what the client sees.

Decode is asked only after Prefill has answered, although Mooncake would accept both at once. A pull for a request that
Prefill refused, aborted or never saw stays in one of Prefill's sender tasks (20 by default) and keeps Decode's blocks
until VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s) runs out: a handful of bad requests would stop all transfers. One
after the other, no pull is ever sent for KV that does not exist, and Decode holds no blocks while Prefill queues.

A request that Decode gives up
------------------------------
With `recompute_fallback: resend` Decode's scheduler ends a preempted request whose KV nobody kept with stop_reason
"recomputed". The proxy sends its token ids, the client's prompt and all that was generated, to Prefill again and goes
on at Decode; the client sees one answer with the tokens, text, logprobs, limits and counts of an unbroken one. Text is
never tokenised again. What makes this exact, and what it asks of the servers:

- Decode is always asked for token ids (`return_token_ids`), which the client gets only if it asked too.
- vLLM 0.32's chat route takes token ids (`kv_transfer_params.prompt_token_ids`); one that does not is an error.
- Where the boundary splits a character, Prefill's `/tokenize` and `/detokenize` tell what text is already out.
- An answer that can't be joined exactly is not broken: Decode is told to recompute such a request itself
  (`vllm_xargs: {"recompute_fallback": "local"}`). That holds for chat requests with tools or to a Decode with a
  reasoning or tool parser (asked once, by two one-token chat requests), for logprobs of alternative tokens unless
  `return_tokens_as_token_ids` is set, and for echoed prompts without `return_token_ids`.
- All Decode servers run with the same options. Where a server limits the length of answers by itself (`max_new_tokens`
  in a generation config), each part has that limit anew.
- A request is sent again `max_resends` times (8); then it fails with status 503, or with an error event in a stream.

What is left behind when something fails
----------------------------------------
- Prefill fails, times out or its client leaves: its connection is closed, vLLM aborts it and frees its blocks. Decode
  has not heard of the request.
- Decode refuses, or its client leaves before the pull: Decode tells Prefill to free the blocks.
- The client leaves later: vLLM aborts the request on Decode; a pull in flight ends first, then both sides free.
- No Decode server takes the request after Prefill has finished, or a client leaves in the very moment Prefill finishes:
  Prefill keeps the blocks until VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT. Set it (on Prefill) somewhat above the longest
  time a request may queue on Decode; nothing else bounds it.
"""

from pd_integration.proxy.app import create_app
from pd_integration.proxy.config import ConfigError, Prefiller, ProxyConfig
from pd_integration.proxy.serve import run, start

__all__ = ["ConfigError", "Prefiller", "ProxyConfig", "create_app", "run", "start"]
