"""A server of chunks that several ranks share: one engine's chunks serve another's, and a server that one rank or all
lose in mid-restore costs time only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LLM
from headrace.config import EngineConfig
from tests.support.checkpoints import FolderOf
from tests.support.offloading import counters, flush, forced, prompts_of, stored, watched
from tests.support.ranked_offloading import PARAMS, ConfigOf, RankedLLM, close, loads, over_ranks
from tests.support.redis_servers import Address, Proxy, fake_server, wait_for
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(2, 1), (3, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.matrix)]
"""(context, tensor) ranks."""
RARER = ["trickle", "replace"]
MODES = ["stall", "cut", "say", *(pytest.param(mode, marks=pytest.mark.matrix) for mode in RARER)]
WAITED_FOR = ["stall", "trickle", "say"]
LOSSES = [(2, 1, {0}), pytest.param(2, 1, {0, 1}, marks=pytest.mark.matrix), (1, 2, {1}), (1, 2, {0, 1})]
"""(context, tensor) ranks, and those that lose the server: the first of two context ranks loads all, if it can."""


@pytest.fixture
def server() -> Iterator[Address]:
    with fake_server() as address:
        yield address


class Answers:
    """Prompts, and what one rank with nothing stored says."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        one = LLM(folder, kv_cache_tokens=4096, dtype="bfloat16", enable_prefix_caching=False)
        self.prompts = prompts_of(one)
        self.truth = run(one, self.prompts, PARAMS)

    def of(self, llm: LLM) -> list[Trace]:
        return [watched(llm, [each], PARAMS)[0] for each in self.prompts]


@pytest.fixture(scope="module")
def answers(folder_of: FolderOf) -> Answers:
    return Answers(str(folder_of("llama_gqa")))


def url(port: int) -> str:
    return f"redis://127.0.0.1:{port}/0"


def opened(answers: Answers, shape: tuple[int, int], port: int, **settings: Any) -> RankedLLM:
    size, tensor = shape
    remote = {"kv_remote_url": url(port), "kv_offloading_size": 0, "kv_offload_timeout_s": 20.0, "max_model_len": None}
    llm = over_ranks(size, tokens=4096, model=answers.folder, tensor=tensor, **{**remote, **settings})
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    return llm


@pytest.mark.parametrize(("size", "tensor"), SHAPES)
def test_shared_by_two_engines(size: int, tensor: int, server: Address, answers: Answers) -> None:
    """The second has one context rank more."""
    first = opened(answers, (size, tensor), server[1])
    same(answers.of(first), answers.truth)
    flush(first)
    second = opened(answers, (size + 1, tensor), server[1])
    loads(second, answers.prompts, answers.truth)
    assert second.engine.offload is not None
    stored(second)
    assert second.engine.offload.tiers.stats()["remote"].written_bytes == 0, "what is there is not written again"
    close(first), close(second)


def by_proxy(proxy: Proxy, ranks: set[int]) -> ConfigOf:
    """These ranks reach the server by the proxy."""

    def config_of(config: EngineConfig, rank: int) -> EngineConfig:
        return config.replace(kv_remote_url=url(proxy.port)) if rank in ranks else config

    return config_of


@pytest.mark.parametrize(("size", "tensor", "lose"), LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_server_fails_in_mid_restore(
    mode: str, size: int, tensor: int, lose: set[int], server: Address, answers: Answers
) -> None:
    with fake_server() as empty:
        proxy = Proxy(server)
        config_of = by_proxy(proxy, lose)
        # Who waits in vain waits a second; others have time, so that a busy machine does not give the server up before.
        timeout_s = 1.0 if mode in WAITED_FOR else 20.0
        llm = opened(answers, (size, tensor), server[1], kv_offload_timeout_s=timeout_s, config_of=config_of)
        same(answers.of(llm), answers.truth)
        flush(llm)
        llm.forget()
        proxy.target = empty if mode == "replace" else server
        proxy.misbehave("cut" if mode == "replace" else mode, 10_000, b"$5\r\nhello\r\n")
        same(watched(llm, answers.prompts, PARAMS), answers.truth)
        assert proxy.misbehaved.is_set()
        assert llm.engine.offload is not None
        stored(llm)
        assert llm.engine.offload.tiers.stats()["remote"].errors >= 1
        proxy.close()
        close(llm)


@pytest.mark.parametrize(("size", "tensor"), [(2, 1), (1, 2)])
def test_a_server_that_is_gone_and_comes_back(size: int, tensor: int, server: Address, answers: Answers) -> None:
    """It is left alone by all ranks while it is gone, and used again afterwards."""
    proxy = Proxy(server)
    llm = opened(answers, (size, tensor), proxy.port, kv_offload_timeout_s=0.5)
    offload = llm.engine.offload
    assert offload is not None
    same(answers.of(llm), answers.truth)
    flush(llm)
    proxy.stop()
    same(answers.of(llm), answers.truth)
    flush(llm)
    assert counters(llm).loaded_tokens == 0
    assert offload.tiers.stats()["remote"].degraded
    proxy.start()

    def restores() -> bool:
        llm.engine.cache.tree.clear()
        same(answers.of(llm), answers.truth)
        return bool(counters(llm).loaded_tokens)

    wait_for(restores, 60)
    proxy.close()
    close(llm)
