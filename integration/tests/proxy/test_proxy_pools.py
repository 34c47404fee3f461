"""Which server takes a request, health, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from proxy_fakes import FakePrefill, FakeServer, Pair, decode_answer, drop, event, hang, pair, stream_then, until

import pd_integration

PROMPT = {"model": "tiny", "prompt": "say hello"}


async def health(p: Pair) -> tuple[int, dict]:
    status, content = await p.get("/health")
    return status, json.loads(content)


async def until_up(p: Pair, side: str, states: list[bool]) -> None:
    for _ in range(300):
        if [server["up"] for server in (await health(p))[1][side]] == states:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{side} never became {states}: {await health(p)}")


def test_requests_go_to_the_least_loaded_server_of_each_side() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def wait(request, body):
            await release.wait()
            return await decode_answer()(request, body)

        async with pair([FakePrefill(), FakePrefill()], [FakeServer(wait) for _ in range(3)]) as p:
            tasks = []
            for count in range(1, 10):
                task = asyncio.create_task(p.ask(PROMPT))
                await until(lambda count=count: sum(len(d.received) for d in p.decode) == count)
                tasks.append(task)
            assert [d.running for d in p.decode] == [3, 3, 3]
            assert sorted(len(prefill.received) for prefill in p.prefill) == [4, 5]
            release.set()
            assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 9

    asyncio.run(scenario())


def test_each_request_names_the_bootstrap_and_engine_of_the_prefill_that_served_it() -> None:
    async def scenario() -> None:
        async with pair([FakePrefill(), FakePrefill()]) as p:
            for number, prefill in enumerate(p.prefill):
                prefill.engines = {"0": f"engine-{number}"}
            await asyncio.gather(*(p.ask(PROMPT) for _ in range(8)))
            served = {
                r.body["kv_transfer_params"]["transfer_id"]: (prefill.url, prefill.engines["0"])
                for prefill in p.prefill
                for r in prefill.received
            }
            assert len(served) == 8
            for received in p.decode[0].received:
                params = received.body["kv_transfer_params"]
                assert served[params["transfer_id"]] == (
                    params["remote_bootstrap_addr"],
                    params["remote_engine_id"],
                )

    asyncio.run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_health_is_503_without_a_server_of_one_side_and_says_which(side: str) -> None:
    async def scenario() -> None:
        async with pair() as p:
            status, detail = await health(p)
            assert (status, detail["status"]) == (200, "ok")
            server = (p.prefill if side == "prefill" else p.decode)[0]
            server.health_status = 500
            await until_up(p, side, [False])
            status, detail = await health(p)
            assert (status, detail["status"]) == (503, "unavailable")
            assert "500" in detail[side][0]["reason"]
            status, answer = await p.ask(PROMPT)
            assert status == 503
            assert side in answer["error"]["message"]
            assert server.url in answer["error"]["message"]
            # No Prefill for a request that Decode can't take: its KV would lie there until the connector's time-out.
            assert [s.received for s in p.servers()] == [[], []]
            server.health_status = 200
            await until_up(p, side, [True])
            assert (await health(p))[0] == 200
            assert (await p.ask(PROMPT))[0] == 200

    asyncio.run(scenario())


def test_prefill_is_down_when_its_bootstrap_server_is() -> None:
    async def scenario() -> None:
        async with pair() as p:
            p.prefill[0].query_status = 500
            await until_up(p, "prefill", [False])
            assert "/query" in (await health(p))[1]["prefill"][0]["reason"]

    asyncio.run(scenario())


def test_one_missed_check_is_not_down() -> None:
    async def scenario() -> None:
        async with pair(health_failures=1000) as p:
            p.decode[0].health_status = 500
            await asyncio.sleep(0.3)
            assert (await health(p))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_that_refuses_connections_is_skipped_at_once(side: str) -> None:
    async def scenario() -> None:
        prefills, decodes = [FakePrefill(), FakePrefill()], [FakeServer(decode_answer()), FakeServer(decode_answer())]
        async with pair(prefills, decodes, health_interval=60.0) as p:
            servers = p.prefill if side == "prefill" else p.decode
            await servers[0].stop()
            results = await asyncio.gather(*(p.ask(PROMPT) for _ in range(6)))
            assert [status for status, _ in results] == [200] * 6
            assert len(servers[1].received) == 6
            content = await p.read_stream(PROMPT)
            assert content.endswith(b"[DONE]\n\n")
            assert [server["up"] for server in (await health(p))[1][side]] == [False, True]

    asyncio.run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_a_server_has_begun_is_not_sent_to_another(side: str) -> None:
    async def scenario() -> None:
        prefills, decodes = [FakePrefill(), FakePrefill()], [FakeServer(decode_answer()), FakeServer(decode_answer())]
        async with pair(prefills, decodes) as p:
            servers = p.prefill if side == "prefill" else p.decode
            for server in servers:
                server.answer = drop
            assert (await p.ask(PROMPT))[0] == 502
            assert sum(len(server.received) for server in servers) == 1

    asyncio.run(scenario())


def test_all_servers_of_a_side_gone_is_a_503_with_each_reason() -> None:
    async def scenario() -> None:
        decodes = [FakeServer(decode_answer()), FakeServer(decode_answer())]
        async with pair(decode=decodes, health_interval=60.0) as p:
            for server in decodes:
                await server.stop()
            status, answer = await p.ask(PROMPT)
            assert status == 503
            assert all(server.url in answer["error"]["message"] for server in decodes)

    asyncio.run(scenario())


def test_a_server_that_comes_back_is_used_again() -> None:
    async def scenario() -> None:
        async with pair() as p:
            port = int(p.decode[0].url.rsplit(":", 1)[1])
            await p.decode[0].stop()
            await until_up(p, "decode", [False])
            await p.decode[0].start(port)
            await until_up(p, "decode", [True])
            assert (await p.ask(PROMPT))[0] == 200

    asyncio.run(scenario())


def test_metrics_count_requests_and_show_servers() -> None:
    async def scenario() -> None:
        async with pair([FakePrefill()], [FakeServer(hang)]) as p:
            asked = asyncio.create_task(p.ask(PROMPT))
            await until(lambda: p.decode[0].running == 1)
            text = (await p.get("/metrics"))[1].decode()
            assert f'pd_proxy_backend_in_flight{{server="{p.decode[0].url}",side="decode"}} 1.0' in text
            assert f'pd_proxy_backend_in_flight{{server="{p.prefill[0].url}",side="prefill"}} 0.0' in text
            assert f'pd_proxy_backend_up{{server="{p.prefill[0].url}",side="prefill"}} 1.0' in text
            asked.cancel()
            p.decode[0].answer = decode_answer()
            await p.ask(PROMPT)
            await p.ask({}, "/some/unknown/route")
            text = (await p.get("/metrics"))[1].decode()
            assert 'pd_proxy_requests_total{route="/v1/completions",status="200"} 1.0' in text
            assert 'pd_proxy_requests_total{route="unknown",status="404"} 1.0' in text

    asyncio.run(scenario())


def test_shutdown_lets_requests_in_flight_end() -> None:
    async def scenario() -> None:
        async with (
            pair(decode=[FakeServer(decode_answer(("a", "b"), pause=0.3))]) as p,
            p.post({**PROMPT, "stream": True}) as response,
        ):
            await response.content.readuntil(b"\n\n")
            cleanup = asyncio.create_task(p.runner.cleanup())
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
            await asyncio.wait_for(cleanup, 3)

    asyncio.run(scenario())


def test_shutdown_ends_requests_that_outlast_its_time_out() -> None:
    async def scenario() -> None:
        async with pair(decode=[FakeServer(hang)], shutdown_timeout=0.2) as p:
            asked = asyncio.create_task(p.ask(PROMPT))
            await until(lambda: p.decode[0].running == 1)
            await asyncio.wait_for(p.runner.cleanup(), 5)
            await until(lambda: p.decode[0].cancelled == 1)
            asked.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_and_ends_gracefully_on_a_signal(number: int) -> None:
    async def scenario() -> None:
        released = asyncio.Event()

        async def end(request, response):
            await released.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        async with pair(decode=[FakeServer(stream_then([event("a")], end))]) as p:
            source = str(Path(pd_integration.__file__).parents[1])
            command = [sys.executable, "-m", "pd_integration.proxy", "--prefill", p.prefill[0].url, "--port", "0"]
            command += ["--prefill-bootstrap", p.prefill[0].url + "/", "--decode", p.decode[0].url]
            process = await asyncio.create_subprocess_exec(
                *command, env={**os.environ, "PYTHONPATH": source}, stderr=asyncio.subprocess.PIPE
            )
            try:
                assert process.stderr is not None
                url = ""
                while not url:
                    line = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
                    assert line, "the command ended before it listened"
                    _, _, url = line.strip().partition("listening on ")
                p.url = url
                async with p.post({**PROMPT, "stream": True}) as response:
                    await response.content.readuntil(b"\n\n")
                    process.send_signal(number)
                    await asyncio.sleep(0.2)
                    assert process.returncode is None
                    released.set()
                    assert await response.read() == b"data: [DONE]\n\n"
                assert await asyncio.wait_for(process.wait(), 10) == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    asyncio.run(scenario())
