"""What the decode benchmark runs: the model, the cells of its grid, the arms, and each cell's requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from pd_integration.models import SPECIAL_TOKENS, family, llama_model, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL = "bench-llama"
MODEL_SEED, WORKLOAD_SEED = 0, 0
BLOCK_TOKENS = 32
MAX_NUM_SEQS = 16
BUDGET = MAX_NUM_SEQS
"""max_num_batched_tokens of a Decode node: max_num_seqs * (1 + speculative tokens), without speculation."""
HOST_BYTES = 1 << 30
AMPLE = 1.0
LAYERS, KV_HEADS, HEAD_SIZE, FLOAT32_BYTES = 6, 1, 64, 4
BLOCK_BYTES = BLOCK_TOKENS * LAYERS * 2 * KV_HEADS * HEAD_SIZE * FLOAT32_BYTES


@family(MODEL)
def bench_llama(seed: int) -> PreTrainedModel:
    """21 million parameters; one KV head for all of attention, 3 KiB of KV a token."""
    return llama_model(
        seed,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=8192,
    )


def write_bench_model(directory: Path) -> Path:
    """Write the model once into ``directory`` and return it."""
    if not (directory / "config.json").exists():
        write_model(directory, MODEL, MODEL_SEED)
    return directory


class Source(Enum):
    """Where the KV of a prompt comes from."""

    PREFILL = "Prefill"
    """A real Prefill server, over Mooncake."""
    MADE_UP = "made up"
    """vLLM's DecodeBenchConnector writes some values at no cost; what is left is the Decode engine alone."""


@dataclass(frozen=True)
class Arm:
    """One way to run Decode under pressure.

    Attributes:
        offload: host bytes of the recompute offload connector; None: without it.
        peer: a KV cache offload connector of vLLM's own to put beside the prompt's, None for none.
        resend: a preempted request whose KV was not kept goes to Prefill again.
        free_copies: the connector moves no byte and says that it did; the tokens that come out are wrong.
        pressure: whether the KV cache is too small.
        prefix_caching: whether Decode's own prefix cache is on, which the peers need.
    """

    name: str
    offload: int | None = None
    peer: str | None = None
    resend: bool = False
    free_copies: bool = False
    pressure: bool = True
    prefix_caching: bool = False


ARM_AMPLE = Arm("ample KV cache", pressure=False)
ARM_OURS = Arm("connector", offload=HOST_BYTES)
ARM_FREE = Arm("connector, copies free", offload=HOST_BYTES, free_copies=True)
ARM_RECOMPUTE = Arm("vLLM's recompute")
# Room for one block: nothing is kept, every preempted request is one for the fallback.
ARM_RESEND = Arm("resend to Prefill", offload=BLOCK_BYTES, resend=True)
ARM_OFFLOADING = Arm("OffloadingConnector", peer="OffloadingConnector", prefix_caching=True)
ARM_SIMPLE = Arm("SimpleCPUOffloadConnector", peer="SimpleCPUOffloadConnector", prefix_caching=True)
ARMS = (ARM_AMPLE, ARM_OURS, ARM_FREE, ARM_RECOMPUTE, ARM_RESEND, ARM_OFFLOADING, ARM_SIMPLE)


@dataclass(frozen=True)
class Cell:
    """One load: mean prompt length in tokens, pressure (see `blocks`), and the source of the prompts' KV."""

    prompt: int
    pressure: float
    source: Source = Source.MADE_UP
    requests: int = 17
    output: int = 256

    def arms(self) -> list[Arm]:
        """Those that this cell can run: without Prefill there is nowhere to send a request again."""
        return [arm for arm in ARMS if self.source is Source.PREFILL or not arm.resend]

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, output) of every request, in tokens: drawn evenly, a quarter up and down and a half up and down."""
        draw = random.Random(WORKLOAD_SEED)
        return [
            (
                draw.randint(self.prompt * 3 // 4, self.prompt * 5 // 4),
                draw.randint(self.output // 2, self.output * 3 // 2),
            )
            for _ in range(self.requests)
        ]

    def prompts(self) -> list[list[int]]:
        """The token ids of every prompt."""
        draw = random.Random(WORKLOAD_SEED + 1)
        return [[draw.randrange(len(SPECIAL_TOKENS), 256) for _ in range(prompt)] for prompt, _ in self.lengths()]

    @property
    def threads(self) -> int:
        """Threads that the engine computes with: on two cores, one is left to a Prefill server."""
        return 1 if self.source is Source.PREFILL else 2

    @property
    def longest(self) -> int:
        """max_model_len: room for the longest of these requests."""
        return max(prompt + output for prompt, output in self.lengths()) + BLOCK_TOKENS

    def blocks(self, pressure: float) -> int:
        """KV cache blocks such that `MAX_NUM_SEQS` requests of mean length need ``pressure`` times as many in the end.

        Never fewer than the longest request needs, and one for the null block.
        """
        mean = sum(prompt + output for prompt, output in self.lengths()) / self.requests
        wanted = int(MAX_NUM_SEQS * mean / BLOCK_TOKENS / pressure)
        return max(wanted, -(-self.longest // BLOCK_TOKENS)) + 1

    def decode_blocks(self, arm: Arm) -> int:
        """Decode's KV cache in ``arm``: ample means twice what the running requests can come to need."""
        return self.blocks(self.pressure if arm.pressure else AMPLE / 2)


GRID = tuple(
    cell
    for pressure in (2.0, 1.25, 4.0)
    for cell in (
        Cell(256, pressure, output=160),
        Cell(1024, pressure, output=256),
        Cell(4096, pressure, output=320),
    )
)
"""Outputs that let a request grow into the room of another, and requests enough for that to happen, in a minute."""
PD = (Cell(1024, 2.0, Source.PREFILL, requests=24, output=320),)
