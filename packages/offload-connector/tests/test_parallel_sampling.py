"""n > 1: vLLM schedules every sample as a request of its own; each comes through a preemption with its own seed."""

from test_connector import TIGHT, assert_empty, counters, recomputed_tokens
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

SAMPLES = 4


def parent(name, seed):
    params = SamplingParams(n=SAMPLES, max_tokens=40, temperature=0.8, seed=seed)
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(10, 40)),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=name,
    )
    return ParentRequest(request)


def test_every_sample_goes_on_with_its_own_seed(make_engine):
    engine = make_engine(TIGHT)
    parents = [parent("p0", seed=7), parent("p1", seed=70)]
    children = []
    for one in parents:
        for index in range(SAMPLES):
            child_id, params = one.get_child_info(index)
            options = {"seed": params.seed, "temperature": params.temperature, "n": params.n}
            children.append(engine.add(child_id, range(10, 40), params.max_tokens, **options))
    engine.run()
    assert counters(engine)["preempted_restored"] >= 3
    assert recomputed_tokens(engine) == sum(child.num_prompt_tokens for child in children)
    assert [child.sampling_params.seed for child in children] == [7 + i for i in range(4)] + [70 + i for i in range(4)]
    for one in parents:
        assert all(len(engine.outputs[child_id]) == 40 for child_id in one.child_requests)
    assert_empty(engine)
