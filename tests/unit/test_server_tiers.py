"""What the tiers hold and what came back from them is told: in the reply, log lines, /metrics, across restarts."""

from __future__ import annotations

import json
import logging
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from headrace.cli.engine import figures
from headrace.config import EngineConfig
from headrace.config.tiers import without_password
from headrace.engine import messages as m
from headrace.server.start import tier_lines
from headrace.server.status import status_line
from headrace.stats import EngineStats, RestoreStats, StreamStats, TenantStats, TierStats
from headrace.types import Metrics
from tests.support.fake_engine import FakeCapacity, FakeEngine
from tests.support.fake_server import TEXT, serving, text, until

pytestmark = pytest.mark.unit

REASON = "32 chunks: 4 recomputed, 28 loaded"
DISK = TierStats(used_bytes=1000, budget_bytes=4000, blobs=3, reads=7, misses=1, bad=2, evictions=5, degraded=True)


def restoring(number: int, engine: FakeEngine) -> None:
    engine.restored_tokens, engine.restore_reason = 64, REASON
    engine.stats.tiers = {"host": TierStats(reads=1), "disk": DISK}
    engine.stats.restore.restores, engine.stats.restore.loaded_tokens, engine.stats.restore.unstored = 3, 64, 12


def given(reply: str) -> dict[str, Any]:
    """The `headrace` object of a whole reply or of a stream."""
    lines = [line.removeprefix("data: ") for line in reply.splitlines() if line.startswith(("data: {", "{"))]
    (found,) = [chunk["headrace"] for chunk in map(json.loads, lines) if "headrace" in chunk]
    return dict(found)


@pytest.mark.parametrize("stream", [False, True])
def test_reply_and_log_line(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(prepare=restoring) as running:
        told = given(running.http.post(TEXT, json=text("x" * 150, stream=stream)).text)
        assert (told["restored_tokens"], told["restore_reason"]) == (64, REASON)
        until(lambda: f"64 restored, restore: {REASON}" in caplog.text)
        assert "prompt     150 (     64 cached)" in caplog.text


def test_nothing_stored_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving() as running:
        told = given(running.http.post(TEXT, json=text()).text)
        assert (told["restored_tokens"], told["restore_reason"]) == (0, None)
        until(lambda: "length    prompt" in caplog.text)
        assert "restore" not in caplog.text and "tiers " not in caplog.text
        assert 'tier="' not in running.http.get("/metrics").text
        assert running.metric("kv_unstored_chunks") == 0


def test_metrics_of_tiers() -> None:
    with serving(prepare=restoring) as running:
        running.http.post(TEXT, json=text())
        assert running.metric("tier_used_bytes", tier="disk", model_name="fake") == 1000
        assert running.metric("tier_degraded", tier="disk") == 1 and running.metric("tier_degraded", tier="host") == 0
        assert running.metric("tier_bad_total", tier="disk") == 2
        assert running.metric("tier_reads_total", tier="host") == 1
        assert running.metric("kv_unstored_chunks") == 12 and running.metric("kv_restores_total") == 3


def test_metrics_of_streams() -> None:
    own = StreamStats(bytes_in=7, bytes_out=2, projected_tokens=64, seconds=4.0, waited_s=1.0, steps={"column": 3})

    def prepare(number: int, engine: FakeEngine) -> None:
        engine.stats.stream = {"0": own, "1": StreamStats(bytes_in=9)}

    with serving(prepare=prepare) as running:
        running.http.post(TEXT, json=text())
        for direction, rank, size in (("in", "0", 7), ("out", "0", 2), ("in", "1", 9)):
            assert running.metric("kv_stream_bytes_total", rank=rank, direction=direction) == size
        assert running.metric("kv_stream_steps_total", rank="0", schedule="column") == 3
        assert running.metric("kv_stream_projected_tokens_total", rank="0") == 64
        assert running.metric("kv_stream_waited_seconds_total", rank="0") == 1
        assert running.metric("kv_stream_link_bound_perc", rank="0") == 0.25
        assert running.metric("kv_stream_link_bound_perc", rank="1") == 0


def test_every_field_has_a_metric() -> None:
    made = EngineStats()
    parts = [getattr(made, room.name) for room in fields(made)]
    rooms = [TierStats, StreamStats, TenantStats, *(type(part) for part in parts if is_dataclass(part))]
    assert len(rooms) == len(fields(EngineStats))
    for room in rooms:
        told = {f.name for f in fields(room) if f.metadata.get("figures") or "by" in f.metadata}
        assert told == {f.name for f in fields(room)} - {"reason"}
    metrics = [(figure.metric, *figure.labels.values()) for figure, _ in EngineStats.figures()]
    assert len(set(metrics)) == len(metrics) > 40


def test_counters_go_on_across_restarts() -> None:
    with serving(prepare=restoring) as running:
        running.http.post(TEXT, json=text())
        running.engine.die("lost")
        until(lambda: len(running.given.engines) == 2)
        running.wait(200)
        assert running.metric("tier_bad_total", tier="disk") == 4 and running.metric("kv_restores_total") == 6
        assert running.metric("tier_blobs", tier="disk") == 3 and running.metric("kv_unstored_chunks") == 12


def test_sum_of_two_engines() -> None:
    earlier = EngineStats(
        restore=RestoreStats(loaded_tokens=5, unstored=9), tiers={"disk": DISK, "host": TierStats(reads=4)}
    )
    own = EngineStats(
        restore=RestoreStats(loaded_tokens=6, unstored=1), tiers={"disk": TierStats(blobs=1, reads=2, errors=1)}
    )
    both = own.after(earlier)
    assert (both.restore.loaded_tokens, both.restore.unstored) == (11, 1)
    disk = both.tiers["disk"]
    assert (disk.blobs, disk.used_bytes, disk.degraded) == (1, 0, False)
    assert (disk.reads, disk.errors, disk.bad) == (9, 1, 2)
    assert both.tiers["host"].reads == 4, "a tier of the engine before is not forgotten"
    assert own.tiers["disk"].reads == 2 and earlier.tiers["disk"].reads == 7


def test_over_the_socket() -> None:
    stats = EngineStats(
        restore=RestoreStats(unstored=3, seconds=0.5), tiers={"disk": DISK, "host": TierStats(reason="full")}
    )
    events = m.Events([], [], {}, stats)
    assert m.from_engine(m.frame(events)[m.LENGTH.size :]) == events


def test_status_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = EngineStats(tiers={"disk": DISK}, restore=RestoreStats(loaded_tokens=10, unstored=2)).flat()
    assert "tiers" not in now
    before = {**now, "restore.loaded_tokens": 4, "scheduler.steps": -1}
    assert status_line(before, now, 1.0).text.endswith("0.0%  restored 6 tokens, 2 chunks to be stored")
    failed = status_line(before, {**now, "restore.failures": 1}, 1.0)
    assert failed.text.endswith("restored 6 tokens, 1 restores failed, 2 chunks to be stored")
    alone = status_line({**now, "scheduler.steps": -1}, now, 1.0)
    assert alone.text.endswith("KV   0.0%  2 chunks unstored")
    quiet = {**now, "restore.unstored": 0}
    before = {**quiet, "scheduler.steps": -1}
    assert status_line(before, quiet, 1.0).text.endswith("KV   0.0%")


def test_tiers_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    url = "rediss://user:secret@kv.example:6380/1?password=secret"
    config = {"kv_offloading_size": 0.5, "kv_offload_path": "/kv", "kv_remote_url": url, "kv_remote_format": "int4"}
    with serving(**config):
        assert "tiers     host memory: 0.5 GiB, about 524,288 tokens, stored as raw" in caplog.text
        assert "          disk /kv: 32 GiB, about 33,554,432 tokens, stored as raw" in caplog.text
        assert "          remote rediss://kv.example:6380/1: as much as its server keeps, stored as int4" in caplog.text
        assert "secret" not in caplog.text


def test_streamed_decode_at_the_start() -> None:
    config = EngineConfig(kv_offloading_size=2, offload_schedule="row", weight_offload=True)
    told = "in host memory, 2 GiB, streamed at each step, schedule row; the weights too"
    assert tier_lines(FakeCapacity(), config) == [told]
    config = EngineConfig(kv_offload_path="/kv", kv_offload_disk_size=9.5, offload_schedule="auto")
    told = "in a file in /kv, 9.5 GiB, streamed at each step, schedule auto"
    assert tier_lines(FakeCapacity(), config) == [told]
    assert tier_lines(FakeCapacity(), EngineConfig()) == []


def test_tokens_of_rounding_tiers() -> None:
    config = EngineConfig(kv_offloading_size=2, kv_host_format="int4")
    told = tier_lines(FakeCapacity(kv_cache_dtype="bfloat16", kv_bytes_per_token=1024), config)
    assert told == ["host memory: 2 GiB, about 7,456,540 tokens, stored as int4"]


def test_urls_without_passwords() -> None:
    assert without_password("redis://:p@h:1/0") == "redis://h:1/0"
    assert without_password("unix://u:p@/run/kv.sock?password=x") == "unix:///run/kv.sock"


def test_line_of_the_command_line() -> None:
    line = figures(Metrics(prompt_tokens=9, cached_tokens=8, restored_tokens=7, restore_reason=REASON))
    assert "(8 cached, of these 7 restored, 1 new)" in line and line.endswith(f"restore: {REASON}")
    assert "restore" not in figures(Metrics())
