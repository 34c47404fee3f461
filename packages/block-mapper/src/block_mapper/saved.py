"""Saved requests: preempted requests whose KV lives on the host, from the first copy out to the last copy back.

        save                all copies out done            load                all copies back done
GONE ----------> STORING -----------------------> RESTORABLE ----> LOADING -------------------------> GONE
                    ^                                                 |
                    +------------ save: preempted again --------------+

STORING or LOADING, a copy failed: GONE.  Any state, discard or reset: GONE.  Everything else: IllegalEvent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from block_mapper.groups import KVGroup
from block_mapper.holding import Hashes, hold, prefix_keys
from block_mapper.jobs import IllegalEvent, Jobs
from block_mapper.mapping import as_table, blocks_to_load, blocks_to_store, fewest_tokens, to_host_table
from block_mapper.pool import NULL_BLOCK, HostPool
from block_mapper.runs import Int64Array

Tables = Sequence[Sequence[int] | Int64Array]


class State(Enum):
    """Where a saved request is in its life. GONE: not known (never saved, restored, dropped or discarded)."""

    STORING = "storing"
    RESTORABLE = "restorable"
    LOADING = "loading"
    GONE = "gone"


@dataclass(frozen=True)
class JobDone:
    """What the last report of a job changed. A request discarded meanwhile is in none of the three.

    restorable: all its copies out are done. restored: its KV is back on the device; it is gone from here.
    failed: one of its copies failed; it was dropped and must take the fallback.
    """

    job: int
    restorable: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass
class _Saved:
    """host_tables: per group, host block by logical position. waits_for: open jobs before the next state."""

    num_tokens: int
    fewest_tokens: int
    host_tables: tuple[Int64Array, ...]
    state: State
    waits_for: set[int]

    def blocks(self) -> Int64Array:
        return np.concatenate([table[table != NULL_BLOCK] for table in self.host_tables])


class SavedRequests:
    """The saved requests of one engine, and the host blocks they hold.

    groups: one per block table of a request, in the tables' order. world_size: ranks that report each job.
    share_prefixes: store full blocks with the same hash once, and keep them for later requests while there is room.
    """

    def __init__(self, pool: HostPool, groups: Sequence[KVGroup], world_size: int = 1, share_prefixes: bool = False):
        if not groups:
            raise ValueError("groups is empty: give one KVGroup per KV cache group")
        self.pool = pool
        self.groups = tuple(groups)
        self.share_prefixes = share_prefixes
        self._jobs = Jobs(pool, world_size)
        self._saved: dict[str, _Saved] = {}

    def save(
        self,
        req_id: str,
        tables: Tables,
        num_tokens: int,
        job: int,
        hashes: Hashes | None = None,
        last_step_end: int | None = None,
    ) -> Int64Array:
        """Keep the KV of a request that is being preempted: int64 [n, 2], (device block, host block) pairs to copy.

        tables: its device block table per group, null ids in place. num_tokens: tokens whose KV may be kept, computed
        and accepted. job: number of the store job; requests preempted in one step share it. It must be reported even
        when n is 0. hashes: per group, the hash of each full block in logical order, None where there is none; used
        with share_prefixes only, never for recurrent groups. last_step_end: one past the last token that the
        request's last step had scheduled, rejected drafts included; needed with a recurrent group that has
        speculative blocks (recurrent_resume_point gives it).

        A request saved while it is loading (it ran in the step of its load and was preempted again) is saved anew,
        and becomes restorable when that load is done too.

        Raises HostPoolFull, UnsupportedGroup (the tables lack a block that the next token needs), ValueError (bad
        arguments) or IllegalEvent (already saved, or the job does not take stores); then nothing has changed.
        """
        before = self._saved.get(req_id)
        if before and before.state is not State.LOADING:
            raise IllegalEvent(f"request {req_id!r} is {before.state.value}: discard it before it is saved again")
        self._jobs.check_takes(job, is_load=False)
        last_step_end = self._check_tokens(num_tokens, last_step_end)
        device_blocks, positions = zip(
            *(
                blocks_to_store(group, table, num_tokens, last_step_end)
                for group, table in zip(self.groups, self._aligned(tables, num_tokens), strict=True)
            ),
            strict=True,
        )
        device = np.concatenate(device_blocks)
        keys = prefix_keys(self.groups, positions, num_tokens, hashes) if self.share_prefixes else []
        host, new = hold(self.pool, device, keys)

        waits_for = {job} | self._jobs.writing(host[~new])
        if before:
            waits_for |= before.waits_for
            self._drop(req_id)
        self._jobs.add(job, False, host[new])
        ends = np.cumsum([len(p) for p in positions])
        host_tables = tuple(
            to_host_table(group, p, blocks, num_tokens)
            for group, p, blocks in zip(self.groups, positions, np.split(host, ends[:-1]), strict=True)
        )
        fewest = max(fewest_tokens(g, table, num_tokens) for g, table in zip(self.groups, host_tables, strict=True))
        self._saved[req_id] = _Saved(num_tokens, fewest, host_tables, State.STORING, waits_for)
        for number in waits_for:
            self._jobs.open[number].req_ids[req_id] = None
        return np.column_stack((device[new], host[new]))

    def restorable_tokens(self, req_id: str, at_most: int | None = None) -> int | None:
        """Tokens that load can restore, at_most at most: None while storing or loading, 0 when there is nothing.

        Fewer than were saved can be too few: a window's blocks in front of it were not kept, a recurrent state is
        that after the saved tokens and no other. Then the answer is 0. A pure query.
        """
        saved = self._saved.get(req_id)
        if saved is None:
            return 0
        if saved.state is not State.RESTORABLE:
            return None
        tokens = saved.num_tokens if at_most is None else min(saved.num_tokens, at_most)
        return tokens if tokens >= saved.fewest_tokens else 0

    def load(self, req_id: str, tables: Tables, num_tokens: int, job: int, device_tokens: int = 0) -> Int64Array:
        """Bring the first num_tokens tokens back: int64 [n, 2], (host block, device block) pairs to copy.

        tables: the newly allocated device block table per group, null ids and lookahead blocks in place.
        num_tokens: at most restorable_tokens. job: number of the load job, shared by the requests resumed in one step;
        it must be reported even when n is 0. device_tokens: leading tokens that the new table already holds on the
        device (prefix cache); blocks wholly inside them are not copied.

        Raises ValueError (bad arguments, or the tables lack a block that the next token needs) or IllegalEvent (not
        restorable, or the job does not take loads); then nothing has changed.
        """
        saved = self._saved.get(req_id)
        if saved is None or saved.state is not State.RESTORABLE:
            raise IllegalEvent(f"request {req_id!r} is {self.state(req_id).value}: only a restorable one can be loaded")
        self._jobs.check_takes(job, is_load=True)
        if not saved.fewest_tokens <= num_tokens <= saved.num_tokens:
            raise ValueError(
                f"num_tokens is {num_tokens}: request {req_id!r} can be restored at "
                f"{saved.fewest_tokens} to {saved.num_tokens} tokens, ask restorable_tokens"
            )
        if not 0 <= device_tokens < num_tokens:
            raise ValueError(
                f"device_tokens is {device_tokens}: it must be from 0 to below num_tokens, {num_tokens}; "
                "discard the request when the device holds all of it"
            )
        host, device = zip(
            *(
                blocks_to_load(group, host_table, table, num_tokens, device_tokens)
                for group, host_table, table in zip(
                    self.groups, saved.host_tables, self._aligned(tables, num_tokens), strict=True
                )
            ),
            strict=True,
        )
        pairs = np.column_stack((np.concatenate(host), np.concatenate(device)))
        self._jobs.add(job, True, pairs[:, 0])
        self._jobs.open[job].req_ids[req_id] = None
        saved.state = State.LOADING
        saved.waits_for = {job}
        return pairs

    def report(self, job: int, count: int = 1, failed: bool = False) -> JobDone | None:
        """count more ranks have finished their copies of a job (or given up: failed). None until all ranks have.

        A failed store drops every request that waits for it, a failed load those it was for: they take the fallback.
        IllegalEvent when the job is not open, or count is below 1 or above the ranks that have not reported yet.
        """
        done = self._jobs.report(job, count, failed)
        if done is None:
            return None
        outcome: dict[str, list[str]] = {"restorable": [], "restored": [], "failed": []}
        for req_id in done.req_ids:
            saved = self._saved.get(req_id)
            if saved is None or job not in saved.waits_for:
                continue
            saved.waits_for.discard(job)
            if done.failed:
                outcome["failed"].append(req_id)
                self._drop(req_id)
            elif saved.waits_for:
                continue
            elif saved.state is State.STORING:
                outcome["restorable"].append(req_id)
                saved.state = State.RESTORABLE
            else:
                outcome["restored"].append(req_id)
                self._drop(req_id)
        return JobDone(job, **{name: tuple(req_ids) for name, req_ids in outcome.items()})

    def discard(self, req_id: str) -> bool:
        """Forget a request, in any state: finished, aborted, or resumed another way. False when it was gone already.

        Its host blocks come back once every copy that touches them is done.
        """
        known = req_id in self._saved
        if known:
            self._drop(req_id)
        return known

    def reset(self) -> None:
        """Forget every saved request and every shared prefix. Jobs under way must still be reported."""
        for req_id in list(self._saved):
            self._drop(req_id)
        self.pool.unpublish()

    def state(self, req_id: str) -> State:
        saved = self._saved.get(req_id)
        return State.GONE if saved is None else saved.state

    def host_tables(self, req_id: str) -> tuple[Int64Array, ...]:
        """Copies of the host block table per group, int64 [positions], null where nothing was stored. KeyError."""
        return tuple(table.copy() for table in self._saved[req_id].host_tables)

    def open_jobs(self) -> tuple[int, ...]:
        """Numbers of the jobs that not all ranks have reported yet."""
        return tuple(self._jobs.open)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._saved

    def __len__(self) -> int:
        return len(self._saved)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every host block is held exactly as often as requests and jobs hold it."""
        self.pool.check_integrity()
        held = np.zeros(self.pool.num_blocks + 1, np.int64)
        for blocks in [saved.blocks() for saved in self._saved.values()] + self._jobs.held():
            np.add.at(held, blocks, 1)
        wrong = np.flatnonzero(held != self.pool.refs)
        assert not wrong.size, f"host blocks {wrong} are held {held[wrong]} times, counted {self.pool.refs[wrong]}"
        for req_id, saved in self._saved.items():
            waiting = saved.state in (State.STORING, State.LOADING)
            assert waiting == bool(saved.waits_for), f"{req_id!r} is {saved.state.value}, waits for {saved.waits_for}"
            for job in saved.waits_for:
                assert req_id in self._jobs.open[job].req_ids, f"job {job} does not know that {req_id!r} waits for it"

    def _drop(self, req_id: str) -> None:
        self.pool.free(self._saved.pop(req_id).blocks())

    def _aligned(self, tables: Tables, num_tokens: int) -> list[Int64Array]:
        if len(tables) != len(self.groups):
            raise ValueError(f"{len(tables)} block tables for {len(self.groups)} groups: give one per group, in order")
        return [as_table(group, table, num_tokens) for group, table in zip(self.groups, tables, strict=True)]

    def _check_tokens(self, num_tokens: int, last_step_end: int | None) -> int:
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}: with nothing computed there is nothing to save")
        if last_step_end is None:
            if any(group.speculative_blocks for group in self.groups):
                raise ValueError(
                    "last_step_end is missing: a recurrent group with speculative blocks needs it to find the state, "
                    "take it and num_tokens from recurrent_resume_point"
                )
            return num_tokens
        if last_step_end < num_tokens:
            raise ValueError(f"last_step_end is {last_step_end}: the last step ended at {num_tokens} tokens or later")
        return last_step_end
