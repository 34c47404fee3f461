"""Request bodies: what a client may send, and what Prefill and Decode get of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from pd_integration.proxy.errors import ProxyError, bad_request

Body = dict[str, Any]

# Both tell a server which host to fetch tensors from. A client that could set them would point Decode at its own.
TRANSFER_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params"})
# Content that vLLM never reads parameters from: here such a name means nothing (a tool's schema may use any).
_CONTENT_FIELDS = frozenset({"messages", "prompt", "tools", "response_format", "structured_outputs", "documents"})

# Far above any tool schema, and far below where Python's JSON encoder gives up.
_MAX_DEPTH = 100

# Types of what we replace or drop for Prefill. Prefill can't check these any more, and when Decode's request parser is
# the first to refuse them, Prefill's blocks stay until its time-out: nobody tells it.
_TYPES: dict[str, tuple[type, ...]] = {
    "stream": (bool,),
    "stream_options": (dict,),
    "stream_interval": (int,),
    "n": (int,),
    "use_beam_search": (bool,),
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "min_tokens": (int,),
    "ignore_eos": (bool,),
    "stop": (str, list),
    "stop_token_ids": (list,),
    "logprobs": (bool, int),
    "top_logprobs": (int,),
    "logprob_token_ids": (list,),
    "prompt_logprobs": (int,),
    "echo": (bool,),
    "return_token_ids": (bool,),
    "structured_outputs": (dict,),
    "repetition_detection": (dict,),
    "truncate_prompt_tokens": (int,),
    "return_tokens_as_token_ids": (bool,),
    "tools": (list,),
    "vllm_xargs": (dict,),
}
_ITEM_TYPES: dict[str, type] = {"stop": str, "stop_token_ids": int, "logprob_token_ids": int}

# Not for Prefill, whose one token is thrown away. `stop*` could end it with finish_reason "stop", and Mooncake keeps KV
# only for requests that ended by length; the others shape or cost output that nobody sees. And vLLM on a CPU fails on
# a seed when a prompt is computed in pieces.
_NOT_FOR_PREFILL = (
    "stream_options",
    "stream_interval",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
    "structured_outputs",
    "repetition_detection",
)


def parse(content: bytes) -> Body:
    """The client's JSON object, checked for what the P/D path can't serve; a 400 that names the field otherwise."""
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        # A decoder's message gives the position only; others may quote the text.
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "it can't be decoded"
        raise bad_request(f"the request body is not valid JSON: {reason}") from None
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object")
    for _ in _objects(body):  # the depth of all of it, content included
        pass
    _refuse_transfer_fields(body)
    _check_types(body)
    _check_one_sequence(body)
    return body


def for_prefill(body: Body, *, chat: bool) -> Body:
    """The copy that makes Prefill compute the prompt."""
    prefill = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    prefill.update(
        stream=False,
        max_tokens=1,
        # An end-of-sequence token must not end the request: only finish_reason "length" keeps the KV.
        ignore_eos=True,
    )
    if chat:
        prefill["max_completion_tokens"] = 1
    return prefill


def for_decode(body: Body, transfer: Body | None) -> Body:
    """A request with the place of its KV; without `transfer` Decode computes the prompt itself."""
    if transfer is None:
        return body
    return {**body, "kv_transfer_params": {**body.get("kv_transfer_params", {}), **transfer}}


def kept_params(transfer_id: str) -> Body:
    """What makes Prefill's MooncakeConnector keep the KV until it is pulled under `transfer_id`."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def transfer_params(transfer_id: str, bootstrap: str, engine_id: str) -> Body:
    """What Decode's MooncakeConnector needs to pull the KV (its names, vLLM 0.32)."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is not JSON", "", 0)


def _refuse_transfer_fields(body: Body) -> None:
    for path, container in _objects({key: value for key, value in body.items() if key not in _CONTENT_FIELDS}):
        for field in sorted(TRANSFER_FIELDS & container.keys()):
            name = path + field
            if path or container[field] is not None:
                raise bad_request(f"{name} is set by the proxy; remove it from the request", name)
            del body[field]  # an SDK that writes out its defaults sends null: harmless


def _objects(value: Body) -> Iterator[tuple[str, Body]]:
    """Every JSON object in `value`, itself first, each with its path ('vllm_xargs.'); a 400 when nested too deep."""
    # Not recursive: the depth is the client's choice.
    todo: list[tuple[str, int, Any]] = [("", 0, value)]
    while todo:
        path, depth, container = todo.pop()
        if depth > _MAX_DEPTH:
            raise bad_request(f"the request body is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(container, dict):
            yield path, container
            children = [(f"{path}{key}.", child) for key, child in container.items()]
        else:
            children = [(path, child) for child in container]
        todo += [(name, depth + 1, child) for name, child in children if isinstance(child, (dict, list))]


def _check_types(body: Body) -> None:
    for name, types in _TYPES.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(_JSON_NAMES[t] for t in types)
            raise bad_request(f"{name} must be {wanted}, not {_JSON_NAMES.get(type(value), 'that')}", name)
        item_type = _ITEM_TYPES.get(name)
        if item_type and isinstance(value, list) and not all(type(item) is item_type for item in value):
            raise bad_request(f"every item of {name} must be {_JSON_NAMES[item_type]}", name)
    if body.get("stream_options") is not None and not body.get("stream"):
        raise bad_request("stream_options needs stream: true", "stream_options")


def _check_one_sequence(body: Body) -> None:
    """One transfer carries the KV of one prompt to one sequence; anything more is refused by name."""
    if body.get("n") not in (None, 1):
        raise _one_sequence("n", f"n is {body['n']}; send n=1, as many times as you need")
    if body.get("use_beam_search"):
        raise _one_sequence("use_beam_search", "beam search decodes several sequences; leave use_beam_search out")
    if body.get("prompt_embeds") is not None:
        raise _one_sequence("prompt_embeds", "the KV of prompt_embeds can't be transferred; send prompt")
    if body.get("truncate_prompt_tokens") == -1:
        raise _one_sequence(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens is -1, which can differ between Prefill and Decode; give the number to keep",
        )
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(type(item) is int for item in prompt):
        raise _one_sequence("prompt", f"prompt holds {len(prompt)} prompts; send one per request")


def _one_sequence(param: str, message: str) -> ProxyError:
    return bad_request(f"not supported with prefill/decode disaggregation: {message}", param)


_JSON_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
