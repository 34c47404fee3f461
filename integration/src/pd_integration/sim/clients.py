"""The clients of a run: when they come, what they must receive, when they hang up; and the operator's resets."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request, RequestStatus

from block_mapper import State
from offload_connector.manager import OffloadManager
from pd_integration.sim.errors import Violation
from pd_integration.sim.model import Model
from pd_integration.sim.scenario import Client, Scenario
from pd_integration.sim.sibling import REMOTE
from pd_integration.sim.tokens import Text


class Clients:
    """Adds requests, hangs up, resets; and holds every token against what the request must say."""

    def __init__(
        self,
        scenario: Scenario,
        scheduler: Scheduler,
        model: Model,
        features: Counter[str],
        manager: OffloadManager,
        block_hasher: Any,
        random: Random,
    ) -> None:
        self.step = 0
        self._scenario = scenario
        self._scheduler = scheduler
        self._model = model
        self._features = features
        self._manager = manager
        self._block_hasher = block_hasher
        self._random = random
        self._coming = list(scenario.clients)
        self._resets = list(scenario.resets)
        self._here: dict[str, Client] = {}
        self._received: dict[str, list[int]] = {}

    @property
    def coming(self) -> bool:
        return bool(self._coming)

    # What they do

    def act(self) -> None:
        """Before a step is scheduled: some come, some hang up."""
        self.step += 1
        self._hang_up(0.3)
        while self._coming and self._coming[0].step <= self.step:
            self._add(self._coming.pop(0))

    def act_during_step(self) -> None:
        """Aborts that arrive while a step runs; the engine carries them out before it takes in the step's output."""
        self._hang_up(0.3)

    def _add(self, client: Client) -> None:
        request_id = f"r{client.index}"
        text = Text(request_id, client.prompt, self._scenario.max_model_len + 16)
        stop = [] if client.stop_at is None else [text.tokens[len(client.prompt) + client.stop_at]]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=client.max_tokens,
            ignore_eos=True,
            stop_token_ids=stop,
            extra_args={"kv_transfer_params": dict(REMOTE)} if client.remote else None,
        )
        request = Request(
            request_id,
            list(client.prompt),
            params,
            None,
            block_hasher=self._block_hasher,
            priority=client.priority,
            arrival_time=float(client.index),
        )
        self._model.texts[request_id] = text
        self._here[request_id] = client
        self._received[request_id] = []
        self._scheduler.add_request(request)

    def state(self, request: Request) -> str:
        """Where a request is, in the words of scenario.ABORT_STATES."""
        saved = self._manager._saved
        state = State.GONE if saved is None else saved.state(request.request_id)
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return "loading" if state is State.LOADING else "remote"
        if state in (State.STORING, State.RESTORABLE):
            return state.value
        if request.status == RequestStatus.RUNNING:
            return "running"
        return "preempted" if request.status == RequestStatus.PREEMPTED else "waiting"

    def _hang_up(self, chance: float) -> None:
        for request_id, client in list(self._here.items()):
            request = self._scheduler.requests.get(request_id)
            if client.abort is None or request is None or self.state(request) != client.abort:
                continue
            if self._random.random() < chance:
                self._features[f"abort while {client.abort}"] += 1
                self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                del self._here[request_id]

    # What the operator does

    @property
    def wants_reset(self) -> bool:
        return bool(self._resets and self._resets[0].step <= self.step)

    def reset(self) -> None:
        """Carry out a reset that is due, if it can be now: no load may be under way."""
        requests, arrived = self._scheduler.requests.values(), self._scheduler.finished_recving_kv_req_ids
        loading = [r for r in requests if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        if any(r.is_finished() for r in requests) or any(r.request_id not in arrived for r in loading):
            return
        loaded = bool(loading) or any(r.num_computed_tokens and r.status != RequestStatus.RUNNING for r in requests)
        # vLLM alone can't; what it does is compared with what we do only where nothing was kept.
        if loaded and not (self._resets[0].running and self._features["preempted_offloaded"]):
            return
        self._features["reset with loaded requests"] += loaded
        reset = self._resets.pop(0)
        done = self._scheduler.reset_prefix_cache(reset.running, reset.connector)
        self._features["reset with running requests" if reset.running else "reset"] += 1
        if reset.running or (reset.connector and done):
            # New weights, say: from here on all older KV is wrong.
            self._model.epoch += 1

    # What they must receive

    def receive(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        client = self._here.get(request_id)
        if client is None:
            raise Violation("output after the end", f"{request_id} gets {output.new_token_ids}")
        text, received = self._model.texts[request_id], self._received[request_id]
        at = len(client.prompt) + len(received)
        expected = text.tokens[at : at + len(output.new_token_ids)]
        if output.new_token_ids != expected:
            raise Violation("wrong tokens", f"{request_id} gets {output.new_token_ids} at {at}, not {expected}")
        received += output.new_token_ids
        if output.finish_reason is not None:
            self._check_end(request_id, client, output.finish_reason)
            del self._here[request_id]

    def _check_end(self, request_id: str, client: Client, reason: FinishReason) -> None:
        received = self._received[request_id]
        if reason == FinishReason.LENGTH:
            self._features["ended by length"] += 1
            room = self._scenario.max_model_len - len(client.prompt)
            if len(received) != min(client.max_tokens, room):
                raise Violation(
                    "wrong length", f"{request_id} ends after {len(received)} of {client.max_tokens} tokens"
                )
        elif reason == FinishReason.STOP:
            self._features["ended by a stop token"] += 1
        elif reason == FinishReason.ERROR:
            self._features["ended by a failed load"] += 1
            if self._scenario.failure_policy != "fail":
                raise Violation("request failed", f"{request_id} ends with an error")
        else:
            raise Violation("request failed", f"{request_id} ends with {reason}")

    def check_served(self) -> None:
        if self._here:
            raise Violation("request lost", f"{sorted(self._here)} never ended")
