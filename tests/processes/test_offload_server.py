"""The server on stored chunks: restarts after SIGTERM and after kill -9, and two engines on one directory."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import LLM, SamplingParams
from headrace.types import CHUNK
from tests.support.fake_server import until
from tests.support.server_process import TEXT, ServerProcess, process, text

PROMPTS = [[(i * 37 + i // 61 + seed) % 1900 + 50 for i in range(3000)] for seed in range(4)]
STORED = 2999 // CHUNK * CHUNK
"""Tokens of a prompt that can come back: whole chunks, and not that of the last token."""
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """The answers of an engine that stores nothing."""
    llm = LLM("tiny", kv_cache_tokens=4096)
    return [llm.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS]


def ask(server: ServerProcess, prompt: list[int], **more: Any) -> tuple[list[int], dict[str, Any]]:
    """The answer and what it cost."""
    body = text(prompt, max_tokens=8, ignore_eos=True, return_token_ids=True, **more)
    reply = server.http.post(TEXT, json=body).json()
    return reply["choices"][0]["token_ids"], reply["headrace"]


def until_stored(server: ServerProcess) -> None:
    until(lambda: server.metric("kv_unstored_chunks") == 0, 30)


def kill(server: ServerProcess) -> None:
    """The server and its engine at once, as if the machine had lost its power."""
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    for each in family:
        os.kill(each.pid, signal.SIGKILL)
    server.process.wait(10)
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family))


def test_restarts(tmp_path: Path, right: list[list[int]]) -> None:
    kv = tmp_path / "kv"
    options = ("--kv-offload-path", str(kv), "--kv-offload-disk-size", "0.25")
    with process(tmp_path, *options) as server:
        server.wait_ready()
        answer, told = ask(server, PROMPTS[0])
        assert (answer, told["restored_tokens"], told["restore_reason"]) == (right[0], 0, None)
        assert server.stop() == 0, server.log.read_text()
        assert f"disk {kv}: 0.25 GiB, about" in server.log.read_text()
    assert stat.S_IMODE(kv.stat().st_mode) == 0o700

    with process(tmp_path, *options) as server:
        server.wait_ready()
        answer, told = ask(server, PROMPTS[0])
        assert answer == right[0] and 0 < told["restored_tokens"] <= STORED
        assert "chunks" in told["restore_reason"] and told["cached_tokens"] >= told["restored_tokens"]
        assert f"{told['restored_tokens']:,} restored, restore: " in server.log.read_text()
        assert ask(server, PROMPTS[1])[0] == right[1]
        until_stored(server)
        used = server.metric("tier_used_bytes", tier="disk")
        assert used >= 2 * STORED * server.metric("kv_bytes_per_token")
        for name in ("tier_bad_total", "tier_degraded", "tier_dropped_total", "tier_errors_total"):
            assert server.metric(name, tier="disk") == 0, name
        answer, told = ask(server, PROMPTS[1], cache_salt="a tenant")
        assert answer == right[1] and told["restored_tokens"] == 0
        beside_another(server, kv, right)
        server.engine().kill()
        until(lambda: server.metric("engine_restarts_total") == 1)
        server.wait_ready()
        answer, told = ask(server, PROMPTS[2])
        assert answer == right[2] and told["restored_tokens"] > 0, "a new engine of the server has nothing"
        assert server.metric("kv_restore_failures_total") == server.metric("tier_bad_total", tier="disk") == 0
        until_stored(server)
        used = server.metric("tier_used_bytes", tier="disk")
        kill(server)

    with LLM("tiny", kv_cache_tokens=4096, kv_offload_path=str(kv), kv_offload_disk_size=0.25) as after:
        found = after.generate([PROMPTS[1]], PARAMS)[0]
        assert found.token_ids == right[1]
        assert found.metrics.restored_tokens > 0, "kill -9 lost what the metric called stored"
    with LLM("tiny", kv_cache_tokens=4096, kv_offload_path=str(kv), kv_offload_disk_size=0.25) as after:
        assert after.engine.stats().tiers["disk"].used_bytes == used, "stored once more"


def beside_another(server: ServerProcess, kv: Path, right: list[list[int]]) -> None:
    """Another engine on the server's directory: each finds what the other has stored."""
    other = LLM("tiny", kv_cache_tokens=4096, kv_offload_path=str(kv), kv_offload_disk_size=0.25)
    first = other.generate([PROMPTS[0]], PARAMS)[0]
    assert first.token_ids == right[0] and first.metrics.restored_tokens > 0
    assert ask(server, PROMPTS[2])[0] == right[2]
    until_stored(server)
    third = other.generate([PROMPTS[2]], PARAMS)[0]
    assert third.token_ids == right[2] and third.metrics.restored_tokens > 0, "what the server stores is not seen"
    assert other.generate([PROMPTS[3]], PARAMS)[0].token_ids == right[3]
    other.close()
    answer, told = ask(server, PROMPTS[3])
    assert answer == right[3] and told["restored_tokens"] > 0, "what the other stores is not seen"


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [((), ("-cp", "2")), (("-tp", "2"), ("-tp", "2"))])
def test_by_default_in_the_cache_directory(
    ranks: tuple[tuple[str, ...], ...], tmp_path: Path, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ranks: of the server that stores, and of the one that restores."""
    monkeypatch.delenv("HEADRACE_KV_OFFLOAD_PATH")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    for options, restored in zip(ranks, (False, True), strict=True):
        with process(tmp_path, *options) as server:
            server.wait_ready()
            answer, told = ask(server, PROMPTS[0])
            assert answer == right[0] and bool(told["restored_tokens"]) == restored
            until_stored(server)
            assert server.stop() == 0
            told = server.log.read_text()
            assert f"disk {tmp_path}/kv: " in told and "off by --kv-offload-path none" in told
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
