"""Which loads may run within their step."""

from types import SimpleNamespace

import pytest

from block_mapper import GroupKind, KVGroup
from offload_connector.manager import OffloadManager
from offload_connector.metadata import OffloadWorkerMetadata


@pytest.mark.parametrize("kind", [kind for kind in GroupKind if kind is not GroupKind.FULL])
def test_only_full_attention_loads_within_the_step(kind):
    """vLLM goes back to the first bad block of a failed load; with any other kind the blocks before it are gone."""
    windowed = kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
    answers = []
    for group in (KVGroup(GroupKind.FULL, 16), KVGroup(kind, 16, window=16 if windowed else None)):
        one = OffloadManager([group], world_size=1)
        one.update(OffloadWorkerMetadata(ranks=1, capacity=8, block_bytes=1))
        request = SimpleNamespace(
            request_id="a", num_tokens=17, num_output_tokens=1, skip_reading_prefix_cache=False, block_hashes=[]
        )
        assert one.keep(request, [[1, 2]], 16)
        (job,) = [one.build_metadata(SimpleNamespace(num_scheduled_tokens={})).store.job]
        one.update(OffloadWorkerMetadata(done={job: 1}))
        answers.append(one.restorable_tokens(request, 0))
    assert answers == [(16, False), (16, True)]
