"""The whole life cycle at random, against a naive model with real contents.

The world has a device, one host memory per rank and slow copies: a job's bytes move only when its rank reports. So a
host block that comes back too early is overwritten by the next owner, and the wrong contents show up on the device.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from naive import GROUPS, POOL, RANKS, Content, Copy, Request, content, visible

from block_mapper import GroupKind, HostPool, HostPoolFull, IllegalEvent, PoolUsage, SavedRequests, State


class Life(RuleBasedStateMachine):
    share = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(POOL)
        self.saved = SavedRequests(self.pool, GROUPS, RANKS, share_prefixes=self.share)
        self.requests: dict[str, Request] = {}
        self.copies: dict[int, Copy] = {}
        self.writer: dict[int, int] = {}
        self.host: list[dict[int, Content]] = [{} for _ in range(RANKS)]
        self.device: list[dict[int, Content]] = [{} for _ in range(RANKS)]
        self.next_job = 0
        self.next_device = 1

    # Building tables as vLLM does: null in front of the window, lookahead behind the computed tokens.

    def new_table(self, index: int, num_tokens: int, kept_longer: int, lookahead: int) -> list[int]:
        group = GROUPS[index]
        seen = visible(group, num_tokens)
        first = (seen.start if seen else num_tokens) // group.block_size
        if group.kind is not GroupKind.RECURRENT:
            first = max(0, first - kept_longer)
        end = -(-num_tokens // group.block_size) + lookahead
        ids = list(range(self.next_device, self.next_device + end - first))
        self.next_device += len(ids)
        return [0] * first + ids[::-1]

    def job(self, is_load: bool, join: bool) -> int:
        if join:
            for number, copy in self.copies.items():
                if copy.is_load is is_load and not copy.reports:
                    return number
        self.next_job += 1
        return self.next_job

    def draw_request(self, data: st.DataObject, *states: State) -> str | None:
        names = [name for name in "abcdef" if self.state(name) in states]
        return data.draw(st.sampled_from(names)) if names else None

    def state(self, name: str) -> State:
        return self.requests[name].state if name in self.requests else State.GONE

    def used(self) -> set[int]:
        held = [r.held for r in self.requests.values()] + [set(c.blocks) for c in self.copies.values()]
        return set().union(*held)

    # Events.

    @rule(
        data=st.data(),
        num_tokens=st.integers(1, 30),
        kept_longer=st.integers(0, 2),
        lookahead=st.integers(0, 2),
        hashed=st.integers(0, 8),
        join=st.booleans(),
    )
    def save(
        self, data: st.DataObject, num_tokens: int, kept_longer: int, lookahead: int, hashed: int, join: bool
    ) -> None:
        name = self.draw_request(data, State.GONE, State.LOADING)
        if name is None:
            return
        before = self.requests.get(name)
        family = before.family if before else data.draw(st.integers(0, 1))
        tables = [self.new_table(g, num_tokens, kept_longer, lookahead) for g in range(len(GROUPS))]
        hashes = [[f"{family} {p}".encode() for p in range(hashed)] for _ in GROUPS]
        number = self.job(False, join)
        computed = {
            block: content(g, family, p, num_tokens)
            for g, table in enumerate(tables)
            for p, block in enumerate(table[: -(-num_tokens // GROUPS[g].block_size)])
            if block
        }
        usage = self.pool.usage()
        try:
            pairs = self.saved.save(name, tables, num_tokens, number, hashes).tolist()
        except HostPoolFull as full:
            self.check_full(full, len(computed), usage)
            return
        copied = {device for device, _ in pairs}
        assert len(copied) == len(pairs)
        assert copied <= computed.keys()
        fresh = {host for _, host in pairs}
        assert len(fresh) == len(pairs)
        assert not fresh & self.used(), "a host block in use was handed out"
        held = set()
        for g, (host, table) in enumerate(zip(self.saved.host_tables(name), tables, strict=True)):
            last = (num_tokens - 1) // GROUPS[g].block_size
            assert len(host) == last + 1
            for p, (h, d) in enumerate(zip(host.tolist(), table, strict=False)):
                assert bool(h) == bool(d), "null must stay null in place, and every computed block be kept"
                if d in copied:
                    assert [d, h] in pairs
                elif d:
                    assert self.share
                    assert p < hashed
                    assert (p + 1) * GROUPS[g].block_size <= num_tokens
                if h:
                    assert h not in held
                    held.add(h)
        if not self.share:
            assert copied == computed.keys()
        waits_for = {number} | {self.writer[h] for h in held - fresh if h in self.writer}
        if before:
            waits_for |= before.waits_for
        self.requests[name] = Request(family, num_tokens, State.STORING, waits_for, held)
        copy = self.copies.setdefault(number, Copy(is_load=False))
        copy.stores += [(computed[device], host) for device, host in pairs]
        copy.blocks += fresh
        self.writer.update(dict.fromkeys(fresh, number))

    def check_full(self, full: HostPoolFull, blocks: int, before: PoolUsage) -> None:
        assert full.free < full.needed <= blocks
        assert full.free <= POOL - len(self.used())
        if not self.share:
            assert (full.needed, full.free) == (blocks, POOL - len(self.used()))
        after = self.pool.usage()
        assert (after.used, after.cached, after.free) == (before.used, before.cached, before.free)

    def serves(self, name: str, num_tokens: int) -> bool:
        """Whether every token that token num_tokens sees is stored, asked token by token."""
        return all(
            host[token // group.block_size] != 0 and (group.kind is not GroupKind.RECURRENT or num_tokens == saved)
            for saved in [self.requests[name].num_tokens]
            for group, host in zip(GROUPS, self.saved.host_tables(name), strict=True)
            for token in visible(group, num_tokens)
        )

    @rule(data=st.data(), at_most=st.integers(0, 35))
    def query(self, data: st.DataObject, at_most: int) -> None:
        name = data.draw(st.sampled_from("abcdef"))
        state = self.state(name)
        assert self.saved.state(name) is state
        answer = self.saved.restorable_tokens(name, at_most)
        assert answer == self.saved.restorable_tokens(name, at_most)
        if state is State.GONE:
            assert answer == 0
        elif state is not State.RESTORABLE:
            assert answer is None
        else:
            tokens = min(at_most, self.requests[name].num_tokens)
            can = tokens >= 1 and all(self.serves(name, n) for n in range(tokens, self.requests[name].num_tokens + 1))
            assert answer == (tokens if can else 0)

    @rule(
        data=st.data(),
        at_most=st.integers(1, 60),
        kept_longer=st.integers(0, 2),
        lookahead=st.integers(0, 2),
        device_tokens=st.integers(0, 30),
        join=st.booleans(),
    )
    def load(
        self, data: st.DataObject, at_most: int, kept_longer: int, lookahead: int, device_tokens: int, join: bool
    ) -> None:
        name = self.draw_request(data, State.RESTORABLE)
        if name is None:
            return
        request = self.requests[name]
        num_tokens = self.saved.restorable_tokens(name, at_most) or request.num_tokens
        device_tokens %= num_tokens
        request.device = [self.new_table(g, num_tokens, kept_longer, lookahead) for g in range(len(GROUPS))]
        number = self.job(True, join)
        pairs = self.saved.load(name, request.device, num_tokens, number, device_tokens).tolist()
        expected = []
        for g, (host, table) in enumerate(zip(self.saved.host_tables(name), request.device, strict=True)):
            size = GROUPS[g].block_size
            for p in range(min(len(host), -(-num_tokens // size))):
                inside = (p + 1) * size <= device_tokens
                if inside and table[p]:
                    for rank in range(RANKS):
                        self.device[rank][table[p]] = content(g, request.family, p, num_tokens)
                elif host[p] and table[p]:
                    expected.append([int(host[p]), table[p]])
                    copy = self.copies.setdefault(number, Copy(is_load=True))
                    copy.loads.append((int(host[p]), table[p], content(g, request.family, p, request.num_tokens)))
                    copy.blocks.append(int(host[p]))
        self.copies.setdefault(number, Copy(is_load=True))
        assert sorted(pairs) == sorted(expected)
        request.state, request.waits_for, request.loading = State.LOADING, {number}, num_tokens

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), at_once=st.booleans(), failed=st.integers(0, 9))
    def report(self, data: st.DataObject, at_once: bool, failed: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.copies)))
        copy = self.copies[number]
        with pytest.raises(IllegalEvent):
            self.saved.report(number, RANKS + 1 - copy.reports)
        count = RANKS - copy.reports if at_once else 1
        for rank in range(copy.reports, copy.reports + count):
            if failed:
                self.move(copy, rank)
        copy.failed |= not failed
        copy.reports += count
        done = self.saved.report(number, count, failed=not failed)
        if copy.reports < RANKS:
            assert done is None
            return
        del self.copies[number]
        self.writer = {block: job for block, job in self.writer.items() if job != number}
        assert done is not None
        outcome: dict[str, set[str]] = {"restorable": set(), "restored": set(), "failed": set()}
        for name, request in list(self.requests.items()):
            if number not in request.waits_for:
                continue
            request.waits_for.remove(number)
            if copy.failed:
                outcome["failed"].add(name)
                del self.requests[name]
            elif not request.waits_for and request.state is State.STORING:
                outcome["restorable"].add(name)
                request.state = State.RESTORABLE
            elif not request.waits_for:
                outcome["restored"].add(name)
                self.check_restored(self.requests.pop(name))
        assert {key: set(getattr(done, key)) for key in outcome} == outcome

    def move(self, copy: Copy, rank: int) -> None:
        for stored, host in copy.stores:
            self.host[rank][host] = stored
        for host, device, expected in copy.loads:
            assert self.host[rank][host] == expected, "a host block was overwritten while a load still read it"
            self.device[rank][device] = self.host[rank][host]

    def check_restored(self, request: Request) -> None:
        for rank in range(RANKS):
            for g, (group, table) in enumerate(zip(GROUPS, request.device, strict=True)):
                for token in visible(group, request.loading):
                    found = self.device[rank][table[token // group.block_size]]
                    if group.kind is GroupKind.RECURRENT:
                        assert found == (("state", request.family, request.loading),)
                    else:
                        assert found[token % group.block_size] == (g, request.family, token)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from("abcdef"))
        assert self.saved.discard(name) is (name in self.requests)
        self.requests.pop(name, None)

    @rule(sure=st.integers(0, 3))
    def reset(self, sure: int) -> None:
        if sure == 3:
            self.saved.reset()
            self.requests.clear()
            assert self.pool.usage().cached == 0

    @rule(data=st.data())
    def illegal(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from("abcdef"))
        tables = [self.new_table(g, 5, 0, 0) for g in range(len(GROUPS))]
        if self.state(name) in (State.STORING, State.RESTORABLE):
            with pytest.raises(IllegalEvent):
                self.saved.save(name, tables, 5, self.next_job + 1)
        if self.state(name) is not State.RESTORABLE:
            with pytest.raises(IllegalEvent):
                self.saved.load(name, tables, 5, self.next_job + 1)
        with pytest.raises(IllegalEvent):
            self.saved.report(self.next_job + 1)

    # What always holds.

    @invariant()
    def nothing_leaks(self) -> None:
        self.saved.check_integrity()
        usage = self.pool.usage()
        assert usage.used == len(self.used())
        assert usage.total == usage.used + usage.cached + usage.free == POOL
        assert self.share or usage.cached == 0
        assert set(self.saved.open_jobs()) == set(self.copies)
        assert len(self.saved) == len(self.requests)
        assert all(name in self.saved for name in self.requests)

    def teardown(self) -> None:
        for number, copy in list(self.copies.items()):
            self.saved.report(number, RANKS - copy.reports)
        for name in list(self.requests):
            self.saved.discard(name)
        self.saved.check_integrity()
        assert self.pool.usage().used == 0
        self.saved.reset()
        assert self.pool.usage().free == POOL


class SharedLife(Life):
    share = True


TestLife = Life.TestCase
TestSharedLife = SharedLife.TestCase
TestLife.settings = TestSharedLife.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
