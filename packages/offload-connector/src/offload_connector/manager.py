"""The scheduler side: which preempted requests are on the host, and this step's jobs.

hook  ──► keep() ──────────► store job ─┐                      ┌─► every rank has reported ─► restorable
query ──► restorable_tokens() ◄─────────┼── build_metadata() ──┤
alloc ──► allocated() ─────► load job ──┘                      └─► every rank has reported ─► host blocks free
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from block_mapper import HostPool, HostPoolFull, JobDone, KVGroup, SavedRequests, State, UnsupportedGroup
from offload_connector._vllm import (
    HITS_MAY_BE_TAKEN,
    LOSES_COUNT_OF_DRAFTS,
    KVCacheConfig,
    KVCacheEvent,
    Request,
    RequestStatus,
    SchedulerOutput,
    VllmConfig,
    hash_block_size,
    init_logger,
    is_in_flight,
)
from offload_connector.config import PER_RANK, OffloadConfig
from offload_connector.groups import mapper_groups
from offload_connector.kv_events import HostBlockEvents
from offload_connector.last_steps import LastSteps
from offload_connector.metadata import OffloadMetadata, OffloadWorkerMetadata
from offload_connector.metrics import OffloadStats
from offload_connector.plans import LOAD_BEHIND, LOAD_NOW, STORE, Plans
from offload_connector.prefix_hashes import PrefixHashes
from offload_connector.within_step import WithinStep

logger = init_logger("vllm.offload_connector")


@dataclass
class _Preemption:
    """A saved request, its host blocks, when it was preempted (monotonic seconds), and its output tokens by then."""

    request: Request
    num_blocks: int
    time: float
    num_output_tokens: int


class OffloadManager:
    """Keeps the KV of preempted requests on the host; one per engine.

    Host blocks are there once every rank has announced how many its budget holds.

    Args:
        groups: the model's KV cache groups.
        world_size: ranks that must report a job before it counts as done.
        refusal: why nothing is ever kept for this model, or None.
        prefix_hashes: where saved requests share blocks of the same prefix; None where they do not.
        publish_events: tell of such blocks by KV cache events.
        within_step: which loads run within their step; None: those that can where steps do not overlap.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        world_size: int,
        refusal: str | None = None,
        prefix_hashes: PrefixHashes | None = None,
        publish_events: bool = False,
        within_step: WithinStep | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = groups
        self._prefix_hashes = prefix_hashes
        self._publish_events = publish_events and prefix_hashes is not None
        self._events: HostBlockEvents | None = None
        self._world_size = world_size
        self._within_step = within_step or WithinStep(groups)
        self._refusal = refusal
        self._clock = clock
        self._stats = OffloadStats()
        self._told_gauges: dict[str, int] = {}
        self._announced = OffloadWorkerMetadata()
        self._pool: HostPool | None = None
        self._saved: SavedRequests | None = None
        self._told_of_prompt_logprobs = False
        # Until the hook is called, or it has been told that it is not.
        self._misses_the_hook = True
        self._plans = Plans()
        self._preemptions: dict[str, _Preemption] = {}
        self._resumed: dict[str, _Preemption] = {}
        speculative = [group.block_size for group in groups if group.speculative_blocks]
        self._last_steps = LastSteps(speculative[0]) if speculative else None

    @classmethod
    def from_vllm(
        cls, config: OffloadConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> "OffloadManager":
        """Make the manager of this engine; a model whose groups are not known is refused, with a warning."""
        world_size = vllm_config.parallel_config.world_size
        aligned = vllm_config.cache_config.mamba_cache_mode == "align"
        try:
            groups = mapper_groups(kv_cache_config)
            if LOSES_COUNT_OF_DRAFTS and aligned and any(group.speculative_blocks for group in groups):
                raise UnsupportedGroup(
                    "before 0.32, vLLM loses count of drafts where prefix caching keeps recurrent states"
                )
        except UnsupportedGroup as refusal:
            logger.warning("Recompute offload keeps nothing for this model: %s", refusal)
            return cls((), world_size, str(refusal))
        hashes = None
        if config.share_prefixes:
            hashes = PrefixHashes(groups, kv_cache_config, hash_block_size(vllm_config, kv_cache_config))
        events = vllm_config.kv_events_config
        publish_events = events is not None and events.enable_kv_cache_events
        within_step = WithinStep(
            groups,
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            overlapping_steps=vllm_config.max_concurrent_batches > 1,
        )
        return cls(groups, world_size, None, hashes, publish_events, within_step)

    def set_load_failure_policy(self, recompute: bool) -> None:
        """Take note of what becomes of a request whose load fails: it is computed again, or ends with an error."""
        self._within_step.set_failure_policy(recompute)

    # The preemption hook

    def keep(self, request: Request, block_ids: Sequence[Sequence[int]], num_computed_tokens: int) -> bool:
        """Plan the store of a request that is preempted in this step. False: nothing is kept and nothing has changed.

        Args:
            request: still running; or waiting with KV in blocks of its own, which it gives up.
            block_ids: its device block table per KV cache group.
            num_computed_tokens: tokens that the engine has scheduled to be in those blocks.
        """
        self._misses_the_hook = False
        # A speculative token that was not accepted, or a token still in flight, has no place among the request's
        # tokens: what its position holds must not come back.
        num_tokens = min(num_computed_tokens, request.num_tokens)
        reason = self._refuse(request, num_tokens) or self._save(request, block_ids, num_tokens)
        if reason is None:
            return True
        self._stats.add("fallback", label=reason)
        return False

    def _refuse(self, request: Request, num_tokens: int) -> str | None:
        if self._refusal is not None:
            return "unsupported"
        if self._saved is None:
            return "not_ready"
        if num_tokens <= 0:
            return "nothing_computed"
        if self._last_steps is not None and (request.status is not RequestStatus.RUNNING or is_in_flight(request)):
            # Which slot holds its recurrent state follows from its last step, and it may not have had one; nor is the
            # outcome known of one in flight (vLLM before 0.32 preempts such requests).
            return "unsupported"
        if request.skip_reading_prefix_cache:
            if not self._told_of_prompt_logprobs:
                self._told_of_prompt_logprobs = True
                logger.warning(
                    "Request %s is recomputed: log-probabilities of its prompt come from computing it again, and "
                    "vLLM takes no outside tokens for it. Further such requests are not logged.",
                    request.request_id,
                )
            return "prompt_logprobs"
        return None

    def _save(self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int) -> str | None:
        assert self._saved is not None
        req_id = request.request_id
        hashes = None if self._prefix_hashes is None else self._prefix_hashes.of(request)
        last_step_end = None
        if self._last_steps is not None:
            num_tokens, last_step_end = self._last_steps.resume_point(req_id, num_tokens)
            self._last_steps.forget(req_id)
        try:
            pairs = self._saved.save(req_id, block_ids, num_tokens, self._plans.job(STORE), hashes, last_step_end)
        except HostPoolFull as full:
            logger.warning(
                "CPU cache free blocks are insufficient for request %s: %d needed, %d free; it will be recomputed. "
                "Raise %s to keep it.",
                req_id,
                full.needed,
                full.free,
                PER_RANK,
            )
            self._drop(req_id)
            return "host_full"
        except UnsupportedGroup as refusal:
            logger.warning("Request %s cannot be kept and will be recomputed: %s", req_id, refusal)
            self._drop(req_id)
            return "unsupported"
        self._plans.add(STORE, req_id, pairs)
        if request.status is not RequestStatus.RUNNING:
            # Unlike after a preemption, its blocks may go to another request in this very step.
            self._plans.store_first()
        if self._events is not None:
            self._events.saved(self._plans.job(STORE))
        num_blocks = sum(int(np.count_nonzero(table)) for table in self._saved.host_tables(req_id))
        self._preemptions[req_id] = _Preemption(request, num_blocks, self._clock(), request.num_output_tokens)
        self._resumed.pop(req_id, None)
        self._stats.add("preempted_offloaded")
        self._stats.add("blocks_stored", len(pairs))
        logger.info(
            "Created recompute offload state for request %s: %d tokens, %d blocks to store",
            req_id,
            num_tokens,
            len(pairs),
        )
        return None

    def holds(self, req_id: str) -> bool:
        """Whether the KV of this request is on the host, or on its way there or back."""
        return self._saved is not None and req_id in self._saved

    def has_pending_jobs(self) -> bool:
        """Whether some job has not been reported by every rank."""
        return bool(self._plans.open_jobs)

    # Admission of a saved request

    def restorable_tokens(self, request: Request, num_device_tokens: int) -> tuple[int | None, bool]:
        """Answer vLLM's query for outside tokens. Changes nothing: vLLM may ask again and again.

        Args:
            request: waiting.
            num_device_tokens: its first tokens that the device's prefix cache holds.

        Returns:
            (tokens that a load adds to these, whether the load runs behind the step); (None, False) while the store is
            not done; (0, False) when nothing is here for the request.
        """
        if self._saved is None:
            return 0, False
        if request.num_preemptions and self._misses_the_hook:
            self._tell_that_nobody_asked(request.request_id)
        state = self._saved.state(request.request_id)
        if state is State.STORING:
            return None, False
        if state is not State.RESTORABLE:
            return 0, False
        num_tokens = self._tokens_to_restore(request)
        if num_tokens <= num_device_tokens or (HITS_MAY_BE_TAKEN and num_device_tokens and len(self._groups) > 1):
            return 0, False
        return num_tokens - num_device_tokens, not self._loads_within_step(request.request_id)

    def _tell_that_nobody_asked(self, req_id: str) -> None:
        self._misses_the_hook = False
        logger.warning(
            "Request %s was preempted, but the scheduler has never asked to keep the KV of such a request. If that was "
            "for want of KV cache, add --additional-config '{\"recompute_scheduler_enable\": true}'; else nothing is "
            "kept. Further such requests are not logged.",
            req_id,
        )

    def _tokens_to_restore(self, request: Request) -> int:
        assert self._saved is not None
        # The engine must compute at least the last token, to have something to sample from.
        return self._saved.restorable_tokens(request.request_id, request.num_tokens - 1) or 0

    def _loads_within_step(self, req_id: str) -> bool:
        return self._within_step.allows(self._preemptions[req_id].num_blocks * self._announced.block_bytes)

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """Plan the load of a request for which vLLM has just allocated blocks.

        Args:
            request: about to run, or to wait for its load.
            block_ids: its new device block table per KV cache group.
            num_external_tokens: tokens to load from here; 0 when the request goes on without us, or when vLLM tells
                of blocks it has added after the load.
        """
        req_id = request.request_id
        if self._last_steps is not None:
            self._last_steps.admit(request)
        if self._saved is None or self._saved.state(req_id) is not State.RESTORABLE:
            return
        if num_external_tokens == 0:
            # The device's prefix cache or another connector serves it: what is here is of no more use.
            logger.debug("Request %s goes on without its saved KV", req_id)
            self._stats.add("fallback", label="served_elsewhere")
            self._drop(req_id)
            return
        num_tokens = self._tokens_to_restore(request)
        kind = LOAD_NOW if self._loads_within_step(req_id) else LOAD_BEHIND
        pairs = self._saved.load(
            req_id, block_ids, num_tokens, self._plans.job(kind), device_tokens=num_tokens - num_external_tokens
        )
        self._plans.add(kind, req_id, pairs)
        self._resumed[req_id] = self._preemptions.pop(req_id)
        self._stats.add("blocks_loaded", len(pairs))
        self._stats.add("tokens_restored", num_external_tokens)
        logger.info(
            "Prepared recompute offload H2D load for request %s: %d tokens, %d blocks, %s",
            req_id,
            num_external_tokens,
            len(pairs),
            "within the step" if kind == LOAD_NOW else "behind the step",
        )

    def finished(self, req_id: str) -> None:
        """The request has ended. Its host blocks return once no copy touches them."""
        if self._last_steps is not None:
            self._last_steps.forget(req_id)
        self._drop(req_id)

    def _drop(self, req_id: str) -> None:
        self._preemptions.pop(req_id, None)
        self._resumed.pop(req_id, None)
        if self._saved is not None:
            self._saved.discard(req_id)

    def reset(self) -> None:
        """Drop every saved request; those that are being loaded into blocks already allocated go on."""
        if self._saved is not None:
            for req_id in list(self._preemptions):
                self._drop(req_id)
            self._saved.pool.unpublish()

    # Jobs

    def build_metadata(self, scheduled: SchedulerOutput) -> OffloadMetadata:
        """Hand out the jobs planned while this step was scheduled, at most one of each kind."""
        if self._last_steps is not None:
            self._last_steps.note_scheduled(scheduled)
        return self._plans.take()

    def update(self, message: OffloadWorkerMetadata | None) -> None:
        """Take note of what the ranks report after a step; its tokens have been taken in already."""
        if self._last_steps is not None:
            self._last_steps.note_output()
        if message is not None:
            if message.ranks:
                self._announce(message)
            for job, count in message.done.items():
                self._reported(job, count, message.failed.get(job))
        if self._resumed:
            self._note_next_tokens()

    def _announce(self, message: OffloadWorkerMetadata) -> None:
        self._announced = OffloadWorkerMetadata(
            ranks=message.ranks, capacity=message.capacity, block_bytes=message.block_bytes, refusal=message.refusal
        ).aggregate(self._announced)
        if self._announced.ranks < self._world_size or self._refusal is not None:
            return
        if self._announced.refusal is not None:
            self._refusal = self._announced.refusal
            logger.warning("Recompute offload keeps nothing for this model: %s", self._refusal)
            return
        self._pool = HostPool(self._announced.capacity, log_changes=self._publish_events)
        if self._publish_events:
            self._events = HostBlockEvents(self._groups, self._pool)
        self._saved = SavedRequests(self._pool, self._groups, self._world_size, self._prefix_hashes is not None)

    def _reported(self, job: int, count: int, error: str | None) -> None:
        assert self._saved is not None
        done: JobDone | None = self._saved.report(job, count, failed=error is not None)
        if done is None:
            return
        self._plans.open_jobs.remove(job)
        if self._events is not None:
            self._events.done(done)
        for req_id in done.restored:
            self._stats.add("preempted_restored")
            logger.debug("Request %s has its KV back on the device", req_id)
        for req_id in done.failed:
            logger.error("Copying the KV of request %s failed; it will be recomputed: %s", req_id, error)
            self._stats.add("fallback", label="copy_failed")
            self._preemptions.pop(req_id, None)
            self._resumed.pop(req_id, None)

    def _note_next_tokens(self) -> None:
        for req_id, preemption in list(self._resumed.items()):
            if preemption.request.num_output_tokens > preemption.num_output_tokens:
                del self._resumed[req_id]
                self._stats.observe("resume_seconds", self._clock() - preemption.time)

    # Figures and checks

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV cache events since the last call."""
        return [] if self._events is None else self._events.take()

    def take_stats(self) -> OffloadStats | None:
        """Return what was counted since the last call and how things stand, or None when neither has changed."""
        gauges = {"saved_requests": len(self._preemptions)}
        if self._pool is not None:
            usage = self._pool.usage()
            gauges["host_blocks_total"] = usage.total
            gauges["host_blocks_used"] = usage.used
            gauges["host_blocks_cached"] = usage.cached
            gauges["host_blocks_free"] = usage.free
            gauges["host_blocks_high_water"] = usage.high_water
        if self._stats.is_empty() and gauges == self._told_gauges:
            return None
        stats, self._stats, self._told_gauges = self._stats, OffloadStats(), gauges
        for name, value in gauges.items():
            stats.set(name, value)
        return stats

    def check_integrity(self) -> None:
        """Raise AssertionError unless host blocks, saved requests and jobs agree."""
        if self._saved is not None:
            self._saved.check_integrity()
            assert all(req_id in self._saved for req_id in self._preemptions), "a preemption without saved KV"
