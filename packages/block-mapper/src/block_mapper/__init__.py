"""Where every KV cache block of a preempted LLM request lives on the host, and which blocks to copy."""

from block_mapper.groups import GroupKind, KVGroup, UnsupportedGroup, recurrent_resume_point
from block_mapper.jobs import IllegalEvent
from block_mapper.pool import NULL_BLOCK, HostPool, HostPoolFull, PoolUsage
from block_mapper.runs import byte_spans, coalesce
from block_mapper.saved import JobDone, SavedRequests, State

__version__ = "0.1.0"

__all__ = [
    "NULL_BLOCK",
    "GroupKind",
    "HostPool",
    "HostPoolFull",
    "IllegalEvent",
    "JobDone",
    "KVGroup",
    "PoolUsage",
    "SavedRequests",
    "State",
    "UnsupportedGroup",
    "byte_spans",
    "coalesce",
    "recurrent_resume_point",
]
