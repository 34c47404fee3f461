"""The connector's figures out of Decode's /metrics."""

import asyncio

from aiohttp import web

from pd_integration.metrics import offload_figures, sampled_host_use

TEXT = """\
# HELP vllm:num_preemptions_total Preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 9.0
# HELP vllm:recompute_offload_preempted_offloaded_total Preempted requests stored.
# TYPE vllm:recompute_offload_preempted_offloaded_total counter
vllm:recompute_offload_preempted_offloaded_total{engine="0",model_name="tiny"} 7.0
vllm:recompute_offload_preempted_offloaded_created{engine="0",model_name="tiny"} 1.7e+09
# HELP vllm:recompute_offload_fallback_total Fallbacks.
# TYPE vllm:recompute_offload_fallback_total counter
vllm:recompute_offload_fallback_total{engine="0",model_name="tiny",reason="no_room"} 2.0
# HELP vllm:recompute_offload_host_blocks_total Host blocks.
# TYPE vllm:recompute_offload_host_blocks_total gauge
vllm:recompute_offload_host_blocks_total{engine="0",model_name="tiny"} 640.0
# HELP vllm:recompute_offload_host_blocks_used Host blocks used.
# TYPE vllm:recompute_offload_host_blocks_used gauge
vllm:recompute_offload_host_blocks_used{engine="0",model_name="tiny"} 30.0
# HELP vllm:recompute_offload_load_seconds Load jobs.
# TYPE vllm:recompute_offload_load_seconds histogram
vllm:recompute_offload_load_seconds_bucket{engine="0",le="0.1",model_name="tiny"} 3.0
vllm:recompute_offload_load_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 3.0
vllm:recompute_offload_load_seconds_count{engine="0",model_name="tiny"} 3.0
vllm:recompute_offload_load_seconds_sum{engine="0",model_name="tiny"} 0.2
"""


def test_figures_have_short_names_and_their_own_labels() -> None:
    assert offload_figures(TEXT) == {
        "preempted_offloaded": 7.0,
        "fallback:no_room": 2.0,
        "host_blocks_total": 640.0,
        "host_blocks_used": 30.0,
        "load_seconds_count": 3.0,
        "load_seconds_sum": 0.2,
    }


def test_engines_add_up() -> None:
    both = TEXT + 'vllm:recompute_offload_load_seconds_count{engine="1",model_name="tiny"} 4.0\n'
    assert offload_figures(both)["load_seconds_count"] == 7.0


def test_server_without_the_connector_has_no_figures() -> None:
    assert offload_figures("# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total 9.0\n") == {}


def test_host_pool_is_sampled_while_the_block_runs() -> None:
    async def main() -> list:
        app = web.Application()

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=TEXT)

        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            async with sampled_host_use(url) as samples:
                await asyncio.sleep(0.7)
            return samples
        finally:
            await runner.cleanup()

    samples = asyncio.run(main())
    assert len(samples) >= 1
    assert {(sample.used, sample.total) for sample in samples} == {(30.0, 640.0)}
