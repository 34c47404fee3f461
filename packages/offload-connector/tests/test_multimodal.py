"""Victims whose prompt holds images: what the encoder computed is in the KV that comes back."""

from collections import Counter

from test_connector import TIGHT, assert_empty, counters, note_victims, recomputed_tokens
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

IMAGE = 16
"""Tokens of one image."""


def with_encoder(engine, images):
    """Give the scheduler an encoder, which the text model of these tests has not, with a cache for so many images."""
    engine.scheduler.max_num_encoder_input_tokens = images * IMAGE
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=images * IMAGE)
    return engine


def image(name, offset):
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, IMAGE))


def run(engine):
    """Step to the end; return how often each image of each request was encoded."""
    encoded = Counter()
    while engine.scheduler.has_requests():
        for request_id, inputs in engine.step().scheduled_encoder_inputs.items():
            encoded.update((request_id, index) for index in inputs)
    engine.run()
    return encoded


def load(engine):
    return [
        engine.add(f"r{i}", range(10, 40 + i), 40, mm_features=[image(f"a{i}", 3), image(f"b{i}", 20)])
        for i in range(8)
    ]


def test_images_of_a_restored_request_are_not_encoded_again(make_engine):
    engine = with_encoder(make_engine(TIGHT, max_num_batched_tokens=32), images=2)
    requests = load(engine)
    encoded = run(engine)
    assert counters(engine)["preempted_restored"] >= 2
    assert encoded == {(request.request_id, index): 1 for request in requests for index in (0, 1)}
    assert recomputed_tokens(engine) == sum(request.num_prompt_tokens for request in requests)
    assert_empty(engine)


def test_without_host_memory_they_are(make_engine):
    """The test above would see it: vLLM's recompute needs the encoder again."""
    engine = with_encoder(make_engine(TIGHT, host_blocks=1, max_num_batched_tokens=32), images=2)
    load(engine)
    encoded = run(engine)
    assert counters(engine)["fallback"] >= 2
    assert max(encoded.values()) >= 2
    assert_empty(engine)


def test_a_prompt_cut_before_its_image_encodes_it_when_it_goes_on(make_engine):
    engine = with_encoder(make_engine(TIGHT, max_num_batched_tokens=16, max_model_len=512), images=1)
    for index in range(4):
        engine.add(f"r{index}", range(10, 30), 40)
    engine.add("long", range(10, 170), 40, mm_features=[image("first", 2), image("last", 150 - IMAGE)])
    victims = note_victims(engine)
    encoded = run(engine)
    cut = [computed for request, computed in victims if request.request_id == "long"]
    assert cut
    assert 2 + IMAGE <= cut[0] < 150
    assert encoded == {("long", 0): 1, ("long", 1): 1}
    assert_empty(engine)
