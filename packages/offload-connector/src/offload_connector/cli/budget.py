"""What a budget of host memory holds, and what a host must have for it."""

from __future__ import annotations

from dataclasses import dataclass

from offload_connector.cli.layout import Kind, Layout


@dataclass(frozen=True)
class Deployment:
    """One vLLM instance: `dp` engines of `tp * pp` ranks, a card each, `cards_per_host` of them on one host."""

    tp: int
    pp: int
    dp: int
    cards_per_host: int

    @property
    def ranks(self) -> int:
        """Cards of the instance; `cpu_bytes_to_use` is divided by this number."""
        return self.tp * self.pp * self.dp

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.cards_per_host)

    @property
    def busiest_host_cards(self) -> int:
        return min(self.ranks, self.cards_per_host)


@dataclass(frozen=True)
class Budget:
    """A budget per rank, applied to a model's blocks.

    Attributes:
        layout: the model's blocks.
        deployment: the instance.
        per_rank: bytes, `cpu_bytes_to_use_per_rank`.
        tokens: computed tokens of the preempted request that the figures are for.
    """

    layout: Layout
    deployment: Deployment
    per_rank: int
    tokens: int

    @classmethod
    def for_requests(cls, layout: Layout, deployment: Deployment, requests: int, tokens: int) -> Budget:
        """The smallest budget with which one engine keeps `requests` requests of `tokens` tokens at once."""
        return cls(layout, deployment, requests * layout.blocks(tokens) * layout.block_bytes, tokens)

    @property
    def blocks(self) -> int:
        """Host blocks of an engine: what the budget of the rank with the largest blocks holds."""
        return self.per_rank // self.layout.block_bytes

    @property
    def requests(self) -> int:
        """Preempted requests of `tokens` tokens that one engine keeps at once, at least."""
        return self.blocks // self.layout.blocks(self.tokens)

    @property
    def held_tokens(self) -> int:
        """Tokens that one engine keeps, in requests of about `tokens` tokens."""
        return self.blocks * self.tokens // self.layout.blocks(self.tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes on one rank that each further token of a long request takes."""
        growing = sum(group.kind is Kind.FULL for group in self.layout.groups)
        return growing * self.layout.block_bytes // self.layout.block_size

    @property
    def request_bytes(self) -> int:
        """Bytes on one rank of a request of `tokens` tokens."""
        return self.layout.blocks(self.tokens) * self.layout.block_bytes

    @property
    def total(self) -> int:
        """The same budget as `cpu_bytes_to_use`."""
        return self.per_rank * self.deployment.ranks

    @property
    def host_bytes(self) -> int:
        """Most bytes that the ranks of one host allocate: their budgets and a null block each."""
        return self.deployment.busiest_host_cards * (self.per_rank + self.layout.block_bytes)

    @property
    def shm_size(self) -> int:
        """A value for docker's `--shm-size`, in GiB: four times the need, as a power of two.

        It is a limit and costs nothing until it is used. For 16 cards of 16 GiB each it gives the usual 1024g.
        """
        need = -(-self.deployment.busiest_host_cards * self.per_rank >> 30)
        return 1 << (4 * max(1, need) - 1).bit_length()
