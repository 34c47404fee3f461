"""The last step of every running request, for models whose recurrent state has speculative slots.

The scheduler knows how many tokens a request has, not how many drafts of its last step were accepted, and where the
recurrent state lies depends on just that (see block_mapper.recurrent_resume_point). So it is noted step by step: what
was scheduled, and by how many tokens the request has grown when the step's output has come in.
"""

from dataclasses import dataclass

from block_mapper import recurrent_resume_point
from offload_connector._vllm import Request, SchedulerOutput


@dataclass
class _Last:
    request: Request
    num_tokens: int
    scheduled: int = 0
    drafts: int = 0
    accepted: int = 0


class LastSteps:
    """Costs a few operations per running request and step; not made for other models.

    Args:
        block_size: that of the recurrent groups, in tokens.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: dict[str, _Last] = {}

    def admit(self, request: Request) -> None:
        """vLLM has allocated blocks for `request`."""
        self._last[request.request_id] = _Last(request, request.num_tokens)

    def forget(self, req_id: str) -> None:
        """The request has ended or was preempted."""
        self._last.pop(req_id, None)

    def note_scheduled(self, scheduled: SchedulerOutput) -> None:
        """A step has been scheduled."""
        for req_id, count in scheduled.num_scheduled_tokens.items():
            last = self._last[req_id]
            last.scheduled = count
            last.drafts = len(scheduled.scheduled_spec_decode_tokens.get(req_id, ()))

    def note_output(self) -> None:
        """The output of one step has been taken in."""
        for last in self._last.values():
            grown = last.request.num_tokens - last.num_tokens
            if grown > 0:
                last.accepted = grown - 1
                last.num_tokens += grown

    def resume_point(self, req_id: str, num_computed_tokens: int) -> tuple[int, int]:
        """Return (tokens that the request can resume after, one past the last token that its last step scheduled).

        Nothing of the request may be in flight. `num_computed_tokens`: rejected drafts taken off.
        """
        last = self._last[req_id]
        rejected = max(0, last.drafts - last.accepted)
        computed_before = num_computed_tokens + rejected - last.scheduled
        return recurrent_resume_point(
            computed_before, last.scheduled, last.drafts, num_computed_tokens, self._block_size
        )
