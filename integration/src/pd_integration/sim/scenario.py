"""What happens in one run: the machine, the model, the clients and the faults, all from one seed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from block_mapper import GroupKind, KVGroup
from pd_integration._vllm import FREES_WINDOWS_TOO_EARLY, LOSES_COUNT_OF_DRAFTS, NEEDS_WHOLE_BLOCKS

BLOCK = 4
MODELS: dict[str, tuple[KVGroup, ...]] = {
    "full": (KVGroup(GroupKind.FULL, BLOCK),),
    "sliding": (KVGroup(GroupKind.SLIDING_WINDOW, BLOCK, window=9),),
    "full+sliding": (KVGroup(GroupKind.FULL, BLOCK), KVGroup(GroupKind.SLIDING_WINDOW, BLOCK, window=8)),
    "full+2*sliding": (
        KVGroup(GroupKind.FULL, BLOCK),
        KVGroup(GroupKind.SLIDING_WINDOW, BLOCK, window=6),
        KVGroup(GroupKind.SLIDING_WINDOW, BLOCK, window=13),
    ),
    "full+chunked": (KVGroup(GroupKind.FULL, BLOCK), KVGroup(GroupKind.CHUNKED_LOCAL, BLOCK, window=12)),
    "full+recurrent": (KVGroup(GroupKind.FULL, BLOCK), KVGroup(GroupKind.RECURRENT, 1 << 12)),
    "full+recurrent aligned": (KVGroup(GroupKind.FULL, BLOCK), KVGroup(GroupKind.RECURRENT, BLOCK)),
}
MODES = ("sync", "async", "pipeline")
RANKS = (1, 2, 4)
SIBLINGS = ("none", "before", "after")
ABORT_STATES = ("waiting", "running", "storing", "restorable", "loading", "remote", "preempted")


@dataclass(frozen=True)
class Client:
    """One request and what its client does. abort: the state in which the client hangs up, or None; the chance is
    taken anew in each step. stop_at: output position whose token is a stop token, or None."""

    index: int
    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    remote: bool = False
    stop_at: int | None = None
    abort: str | None = None


@dataclass(frozen=True)
class Reset:
    """reset_prefix_cache at a step, with these arguments."""

    step: int
    running: bool
    connector: bool


@dataclass(frozen=True)
class Scenario:
    """A whole run; see the generator below for the ranges."""

    seed: int
    mode: str
    ranks: int
    model: str
    num_blocks: int
    host_blocks: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    prefix_caching: bool
    share_prefixes: bool
    priority: bool
    zeroing: bool
    num_drafts: int
    lookahead: int
    early_output: bool
    sibling: str
    fail_stores: float
    fail_loads: float
    fail_remote: float
    failure_policy: Literal["recompute", "fail"]
    store_seconds: float
    load_seconds: float
    remote_seconds: float
    clients: tuple[Client, ...]
    resets: tuple[Reset, ...]

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return groups(self.model, self.num_drafts)

    @property
    def least_blocks(self) -> int:
        return least_blocks(
            self.model, self.max_model_len, self.num_drafts, self.lookahead, self.token_budget, self.mode
        )

    def only(self, clients: list[int], resets: list[int]) -> Scenario:
        """The same run with some of its clients and resets, by index."""
        return replace(
            self,
            clients=tuple(c for c in self.clients if c.index in clients),
            resets=tuple(r for i, r in enumerate(self.resets) if i in resets),
        )


def groups(model: str, num_drafts: int) -> tuple[KVGroup, ...]:
    """The KV cache groups of a model: recurrent ones have a slot for each draft."""
    return tuple(
        replace(group, speculative_blocks=num_drafts) if group.kind is GroupKind.RECURRENT else group
        for group in MODELS[model]
    )


def generate(seed: int, steps: int) -> Scenario:
    """The scenario of a seed; `steps` is about how long its clients keep coming."""
    random = Random(seed)
    pick = random.choice
    mode = pick(("sync", "async", *MODES))
    model = pick(("full", "full", *MODELS))
    num_drafts = 0 if mode == "pipeline" else pick((0, 0, 1, 3))
    if FREES_WINDOWS_TOO_EARLY and any(group.window for group in MODELS[model]):
        num_drafts = 0
    if LOSES_COUNT_OF_DRAFTS and "aligned" in model:
        num_drafts = 0
    lookahead = pick((0, num_drafts)) if mode == "sync" else num_drafts
    max_num_seqs = random.randint(2, 6)
    # A decode node's budget: a token for each request, and its drafts; sometimes more.
    token_budget = max_num_seqs * (1 + num_drafts) * pick((1, 1, 2, 4)) + max_num_seqs * (lookahead > 0)
    if NEEDS_WHOLE_BLOCKS and "aligned" in model:
        token_budget = max(token_budget, BLOCK)
    max_model_len = pick((24, 40, 64))
    num_blocks = least = least_blocks(model, max_model_len, num_drafts, lookahead, token_budget, mode)
    sibling = pick(("none", *SIBLINGS))
    # One request at least; with remote loads two, for vLLM alone can lock up when two loads share less.
    num_blocks += pick((0, 1, 2, 3, least // 4, least // 2)) + 1 + (2 * least // 3 if sibling != "none" else 0)
    failing = random.random() < 0.4
    return Scenario(
        seed=seed,
        mode=mode,
        ranks=pick((1, 2, *RANKS)),
        model=model,
        num_blocks=num_blocks,
        host_blocks=pick((0, 1, num_blocks // 4, num_blocks // 2, *[k * num_blocks for k in (1, 1, 4, 4, 4, 4)])),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        # vLLM's "align" mode of recurrent states is made for prefix caching, the other one has none.
        prefix_caching="aligned" in model or (model != "full+recurrent" and random.random() < 0.4),
        share_prefixes=random.random() < 0.3,
        priority=random.random() < 0.3,
        # vLLM zeroes new blocks of models with recurrent states anyway, and of caches with more than one precision.
        zeroing=random.random() < 0.3,
        num_drafts=num_drafts,
        lookahead=lookahead,
        # Not beside a remote writer: it may get blocks that such a drafter still writes, a race of vLLM's own.
        early_output=mode == "async" and sibling == "none",
        sibling=sibling,
        fail_stores=pick((0.0, 0.1, 0.3)) if failing else 0.0,
        fail_loads=pick((0.0, 0.2, 0.5)) if failing else 0.0,
        fail_remote=pick((0.0, 0.2)) if failing else 0.0,
        failure_policy=pick(("recompute", "fail")),
        store_seconds=pick((0.001, 0.02, 0.2)),
        load_seconds=pick((0.001, 0.02, 0.2)),
        remote_seconds=pick((0.01, 0.1, 0.5)),
        clients=tuple(_clients(random, steps, max_model_len, sibling != "none")),
        resets=tuple(
            Reset(random.randrange(steps), random.random() < 0.7, random.random() < 0.4)
            for _ in range(pick((0, 0, 1, 3)))
        ),
    )


def _clients(random: Random, steps: int, max_model_len: int, sibling: bool) -> Any:
    shared = [random.randrange(3, 512) for _ in range(max_model_len)]
    step, impatience = 0, random.choice((0.0, 0.2, 0.6))
    pace = random.choice((1, 3, 8))
    for index in itertools.count():
        if step >= steps:
            return
        length = _boundary(random, random.choice((max_model_len // 4, max_model_len - 2)))
        common = random.choice((0, 0, min(length, _boundary(random, max_model_len))))
        prompt = tuple(shared[:common]) + tuple(random.randrange(3, 512) for _ in range(length - common))
        room = max_model_len - length
        max_tokens = random.choice((1, min(2, room), _boundary(random, room), _boundary(random, room), room, room))
        yield Client(
            index=index,
            step=step,
            prompt=prompt,
            max_tokens=max_tokens,
            priority=random.randrange(3),
            remote=sibling and random.random() < 0.7,
            stop_at=random.randrange(max_tokens) if random.random() < 0.15 else None,
            abort=random.choice(ABORT_STATES) if random.random() < impatience else None,
        )
        # Clients come in bursts: only then does memory run out.
        step += random.choice((0, 0, 0, 0, 1, 2, 4 * pace, 8 * pace))


def _boundary(random: Random, most: int) -> int:
    """A length in 1..most, often at a block boundary or one beside it."""
    if random.random() < 0.7:
        return max(1, min(most, random.randint(1, -(-most // BLOCK)) * BLOCK + random.choice((-1, 0, 1))))
    return random.randint(1, most)


def least_blocks(model: str, tokens: int, num_drafts: int, lookahead: int, budget: int, mode: str) -> int:
    """Blocks that one request of the longest length needs alone."""
    in_flight = budget * (1 if mode == "sync" else 2)
    total = 0
    for group in groups(model, num_drafts):
        positions = -(-(tokens + num_drafts + lookahead) // group.block_size)
        if group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL):
            positions = min(positions, -(-((group.window or 0) + in_flight + num_drafts + lookahead) // BLOCK) + 1)
        elif group.kind is GroupKind.RECURRENT:
            positions = min(positions, 2) + 1 + num_drafts
        total += positions
    return total
