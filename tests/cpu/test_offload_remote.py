"""A server that shares chunks, and one that stops, slows down or is replaced in mid-restore: answers are the same."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import FolderOf
from tests.support.offloading import answer, counters, engine, flush, offloading, prompts_of, watched
from tests.support.redis_servers import Proxy, fake_server
from tests.support.traces import same

pytestmark = pytest.mark.cpu


def test_shared_by_two_engines(folder_of: FolderOf) -> None:
    truth = answer(engine(folder_of("llama"), enable_prefix_caching=False), prompts_of(engine(folder_of("llama"))))
    with fake_server() as (host, port):
        settings = {
            "kv_offloading_size": 0.0,
            "kv_remote_url": f"redis://{host}:{port}/0",
            "kv_offload_timeout_s": 20.0,
        }
        first = offloading(folder_of("llama"), **settings)
        same(answer(first, prompts_of(first)), truth)
        flush(first)
        second = offloading(folder_of("llama"), **settings)
        same(answer(second, prompts_of(second)), truth)
        assert counters(second).loaded_tokens >= 384


@pytest.mark.parametrize("mode", ["stall", pytest.param("trickle", marks=pytest.mark.matrix), "cut", "say", "replace"])
def test_server_fails_in_mid_restore(mode: str, folder_of: FolderOf) -> None:
    truth = answer(engine(folder_of("llama"), enable_prefix_caching=False), prompts_of(engine(folder_of("llama"))))
    with fake_server() as address, fake_server() as empty:
        proxy = Proxy(address)
        url = f"redis://127.0.0.1:{proxy.port}/0"
        llm = offloading(folder_of("llama"), kv_offloading_size=0.0, kv_remote_url=url, kv_offload_timeout_s=2.0)
        same(answer(llm, prompts_of(llm)), truth)
        flush(llm)
        proxy.target = empty if mode == "replace" else address
        proxy.misbehave("cut" if mode == "replace" else mode, 10_000, b"$5\r\nhello\r\n")
        same(watched(llm, prompts_of(llm)), truth)
        assert proxy.misbehaved.is_set()
        assert llm.engine.offload is not None
        assert llm.engine.offload.tiers.stats()["remote"].errors >= 1
        proxy.close()
