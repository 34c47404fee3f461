"""What a request says and what its KV holds: the tokens it must produce, and a digest for every position."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 512
FIRST_TOKEN = 3
POISON_TOKEN = 2
"""What a forward samples that read KV of a failed load. It must never reach a client."""

Int64Array = NDArray[np.int64]
_MASK = (1 << 64) - 1


def sampled_token(request_id: str, position: int) -> int:
    """The token of a request at a position of its sequence; depends on nothing else."""
    return FIRST_TOKEN + (zlib.crc32(request_id.encode()) + 31 * position) % (VOCABULARY - FIRST_TOKEN)


class Text:
    """One request's whole sequence, as far as it can go, known from the start.

    tokens: prompt and every output token up to the length limit. digests: int64, one per position; digest p stands for
    the tokens 0..p, so equal prefixes have equal KV and nothing else has.
    """

    def __init__(self, request_id: str, prompt: Sequence[int], length: int) -> None:
        self.request_id = request_id
        self.num_prompt = len(prompt)
        self.tokens = list(prompt) + [sampled_token(request_id, p) for p in range(len(prompt), length)]
        self.digests = _chain(self.tokens)

    def draft(self, position: int, right: bool) -> int:
        """A proposal for a position: the token that will be sampled there, or another one."""
        token = self.tokens[position] if position < len(self.tokens) else FIRST_TOKEN
        return token if right else FIRST_TOKEN + (token - FIRST_TOKEN + 1) % (VOCABULARY - FIRST_TOKEN)

    def written(self, start: int, end: int, accepted_end: int, salt: int) -> Int64Array:
        """Digests that a forward over start..end leaves; what is beyond accepted_end comes from rejected drafts."""
        right = self.digests[start : min(end, accepted_end)]
        wrong = np.arange(start + len(right), end, dtype=np.int64) * 0x5851F42D4C957F2D + salt
        return np.concatenate((right, wrong))


def _chain(tokens: Sequence[int]) -> Int64Array:
    value, values = 0x243F6A8885A308D3, []
    for token in tokens:
        value = ((value ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
        value ^= value >> 29
        values.append(value)
    return np.array(values, np.uint64).view(np.int64)


def flavour(*parts: int) -> int:
    """A constant that tells group, layer, rank and weights apart in what a block holds."""
    return int(np.array([zlib.crc32(repr(parts).encode()) * 0x100000001B3 & _MASK], np.uint64).view(np.int64)[0])
