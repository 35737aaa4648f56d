"""What the server prints, as a whole: the start, requests, status, refusals, in text and in JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from headrace import logs
from headrace.config import EngineConfig
from headrace.progress import LoadPhase, Prefill
from headrace.server.errors import ApiError, invalid
from headrace.server.job import Job, Prompt
from headrace.server.loading import LoadLog
from headrace.server.refusals import Refusal, Refusals, reason_of, refused_line
from headrace.server.start import curl, kernel_lines, ready_again_line, ready_lines, start_lines
from headrace.server.status import arrival_line, is_busy, job_line, status_line
from headrace.server.tally import MOST_KEYS, Tally
from headrace.stats import EngineStats, FinishedStats, KVStats, SchedulerStats, TokenStats
from headrace.types import Metrics, SamplingParams
from tests.support.fake_engine import FakeCapacity, FakeTokenizer
from tests.support.fake_server import TEXT, open_request, serving, text, until
from tests.support.server_log import logged

pytestmark = pytest.mark.unit

ALL_CPP = {
    "attend": "cpu: C++ amx", "rms_norm": "cpu: C++ amx", "linear": "cpu: C++ amx, packed weights",
    "layer": "cpu: C++ amx, two calls beside attention",
}  # fmt: skip
CAPACITY = FakeCapacity(
    kv_cache_tokens=57_344, kv_bytes_per_token=32_768, kv_cache_dtype="bfloat16", dtype="bfloat16", kernels=ALL_CPP,
    max_model_len=4096, architecture="LlamaForCausalLM", layers=4,
)  # fmt: skip


def without_times(lines: str) -> str:
    return "\n".join(line[9:] for line in lines.splitlines())


def start(capacity: Any, **settings: Any) -> str:
    config = EngineConfig(**settings)
    lines = start_lines(capacity, config, "tiny", 12_900_000) + ready_lines(config, "tiny", FakeTokenizer(), 6.96)
    return "\n".join(line.text for line in lines)


def test_the_start() -> None:
    assert (
        start(CAPACITY)
        == """\
model     tiny (llama, 4 layers), bfloat16, 12.3 MiB of weights
kernels   C++ amx for all operations
KV cache  57,344 tokens, 1.8 GiB (32,768 bytes a token, bfloat16): 14 sequences of 4,096 tokens, unshared
Ready in 7.0 s: http://127.0.0.1:8000/v1
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
-d '{"model": "tiny", "messages": [{"role": "user", "content": "..."}]}'"""
    )


def test_the_start_with_all_there_is() -> None:
    capacity = FakeCapacity(
        kv_cache_tokens=6000, quantization="int8", ranks="2 ranks (2 context x 1 tensor)",
        kernels={"attend": "triton: own sums", "linear": "triton: own sums", "gelu": "torch: one row at a time"},
    )  # fmt: skip
    told = start(capacity, host="::", port=99, api_key="s3cret", kv_offloading_size=0.5, kv_offload_path="/kv",
                 kv_offload_disk_size=32)  # fmt: skip
    assert (
        told
        == """\
model     tiny (fake, 1 layers), bytes, 12.3 MiB of weights, kept as int8
kernels   triton (own sums) for attend, linear
          torch (one row at a time) for gelu
KV cache  6,000 tokens, 5.9 MiB (1,024 bytes a token, bytes): 1.5 sequences of 4,000 tokens, unshared
tiers     host memory: 0.5 GiB, about 524,288 tokens, stored as raw
          disk /kv: 32 GiB, about 33,554,432 tokens, stored as raw
ranks     2 ranks (2 context x 1 tensor)
Ready in 7.0 s: http://[::1]:99/v1 (on all interfaces)
  curl http://[::1]:99/v1/chat/completions -H 'Content-Type: application/json' \
-H "Authorization: Bearer $HEADRACE_API_KEY" -d '{"model": "tiny", "messages": [{"role": "user", "content": "..."}]}'"""
    )


def test_kernels_of_several_kinds() -> None:
    missing = {name: "torch: no compiler was found" for name in ("attend", "linear")}
    assert kernel_lines({**missing, "layer": "ops: one by one"}) == ["torch (no compiler was found) for all operations"]
    assert kernel_lines({"attend": "echo"}) == ["echo for all operations"]


def test_a_first_request_for_each_kind_of_model() -> None:
    config = EngineConfig()
    assert curl(config, "it's", None).endswith("""'{"model": "it'"'"'s", "prompt": [1, 2, 3], "max_tokens": 32}'""")
    plain = FakeTokenizer()
    plain.has_chat_template = False
    assert "/v1/completions -H" in curl(config, "x", plain) and '"prompt": "..."' in curl(config, "x", plain)
    for labels, route in ((("no", "yes"), "classify"), ((), "embeddings")):
        capacity = replace(CAPACITY, writes=False, pooling=replace(CAPACITY.pooling, labels=labels))
        told = curl(config, "x", FakeTokenizer(), capacity)
        assert f"/v1/{route} -H" in told and '"input": "..."' in told
    assert "/v1/chat/completions" in curl(config, "x", FakeTokenizer(), CAPACITY)


def test_the_second_start_is_one_line() -> None:
    assert ready_again_line(3.21, 1, 3).text == "Ready again in 3.2 s after restart 1 of 3"
    with logged() as out, serving(prepare=lambda number, engine: None) as running:
        running.engine.die("lost")
        until(lambda: "Ready again" in out.getvalue())
    told = without_times(out.getvalue()).splitlines()
    died = next(index for index, line in enumerate(told) if "lost" in line)
    assert told[died] == "ERROR the engine has failed: lost; starting it again (restart 1 of 3)"
    assert len(told) == died + 2 and told[-1].startswith("INFO  Ready again in ")
    assert sum("Ready in" in line for line in told) == 1


def test_loading_in_the_log() -> None:
    now = [0.0]
    load = LoadLog(lambda: now[0])
    with logged() as out:
        for name, total, at in (("configuration", 0, 1.0), ("weights", 3 << 30, 2.0), ("packing", 0, 9.0)):
            now[0] = at
            load(LoadPhase(name, total // 3, total))
            load.tell()
        now[0] = 50.0
        load.tell()
        load.times.close()
    assert (
        without_times(out.getvalue())
        == """\
INFO  loading   configuration, for 0.0 s
INFO  loading   weights 1.0 of 3.0 GiB, for 0.0 s
INFO  loading   weights: 3.0 GiB in 7.0 s
INFO  loading   packing, for 0.0 s
INFO  loading   packing, for 41 s
INFO  loading   packing: 41.0 s"""
    )
    assert load.weights == 3 << 30


def job(n: int = 1, prompt: int = 5969, **params: Any) -> Job:
    made = Job("chatcmpl-ed6062509bf84f6f9401fd1b57045b1a", [Prompt([7] * prompt, SamplingParams(n=n, **params))], 10.0)
    made.end_s = 12.5
    return made


def ended(made: Job, tokens: int, **metrics: Any) -> Job:
    for choice in made.choices:
        choice.token_ids, choice.texts, choice.finish_reason = [1] * tokens, ["Say\n", "x" * 300], "length"
    made.metrics = [Metrics(ttft_s=0.25, e2e_s=2.25, prompt_tokens=made.prompt_tokens, **metrics)]
    return made


def test_lines_of_requests() -> None:
    several = ended(job(n=2, prompt=9), 3, queue_s=0.125, strategy="chain", strategy_reason="chain: new prompt")
    lines = [
        arrival_line(job(temperature=0.0, stop=("a\n",)), None),
        job_line(ended(job(), 120, cached_tokens=5952), "done"),
        job_line(several, "done"),
        job_line(ended(job(prompt=128), 1, cached_tokens=64, restored_tokens=64, restore_reason="2 loaded"), "done"),
        job_line(job(prompt=1_000_000), "client gone"),
    ]
    assert (
        "\n".join(line.text for line in lines)
        == """\
ed606250  arrived   prompt   5,969  temperature=0.0  stop=('a\\n',)
ed606250  length    prompt   5,969 (  5,952 cached)  output    120  ttft   0.250 s     59.5 tokens/s
ed606250  length    prompt       9 (      0 cached)  output      6  ttft   0.250 s      2.0 tokens/s  \
2 answers, queued 0.125 s, prefill by chain (new prompt)
ed606250  length    prompt     128 (     64 cached)  output      1  ttft   0.250 s        - tokens/s  \
64 restored, restore: 2 loaded
ed606250  left      prompt 1,000,000                   output      0  after 2.500 s"""
    )


def test_texts_are_told_only_where_asked_for_and_cut() -> None:
    told = job_line(ended(job(), 2), "done", texts=True)
    assert "'Say\\nxxx" in told.text and told.text.endswith("xxx... (304 characters)'") and len(told.text) < 400
    assert "Say" not in job_line(ended(job(), 2), "done").text
    assert "answers" not in job_line(ended(job(), 2), "done").fields and len(told.fields["answers"][0]) < 230
    assert arrival_line(job(), "Hello").text.endswith("  'Hello'")


@pytest.mark.parametrize(("setting", "arrivals", "ends", "texts"), [
    ("off", 0, 0, 0), ("ends", 0, 1, 0), ("params", 1, 1, 0), ("text", 1, 1, 2),
])  # fmt: skip
def test_what_is_logged_of_requests(setting: str, arrivals: int, ends: int, texts: int) -> None:
    with logged() as out, serving(log_requests=setting) as running:
        running.http.post(TEXT, json=text("secret", temperature=0.5))
    told = out.getvalue()
    assert told.count("arrived") == told.count("temperature=0.5") == arrivals
    assert told.count("length    prompt") == ends and told.count("secret") == texts


NOTHING = EngineStats().flat()


def status(**more: Any) -> Any:
    before = EngineStats().flat()
    now = EngineStats(
        SchedulerStats(running=2, waiting=1, steps=4), TokenStats(prompt=9000, prefilled=3000, generated=560),
        kv=KVStats(chunks_total=1000, chunks_used=123, chunks_unshared=more.pop("unshared", 456)),
    ).flat() | {"tokens.cached": 5999}  # fmt: skip
    return status_line(before, now, 5.0, **more)


def test_status() -> None:
    reading = [Prefill("a", 4096, 1024, 5969, 1000)]
    lines = [status(), status(unshared=123), status(prefills=reading * 3, rate=1000.0)]
    assert (
        "\n".join(line.text for line in lines)
        == """\
running   2  waiting   1  read     600/s  written   112.0/s  cached  67 %  KV  12.3% (123 chunks; 456 unshared)
running   2  waiting   1  read     600/s  written   112.0/s  cached  67 %  KV  12.3%
running   3  waiting   1  read     600/s  written   112.0/s  cached  67 %  KV  12.3% (123 chunks; 456 unshared)  \
reading 12,288 of 17,907 tokens (3,072 cached), 1,000/s, 6 s left"""
    )
    long = [status_line(NOTHING, NOTHING, 5.0, reading, 1000.0), status_line(NOTHING, NOTHING, 5.0)]
    assert (
        "\n".join(line.text for line in long)
        == """\
running   1  waiting   0  reading 4,096 of 5,969 tokens (1,024 cached), 1,000/s, 2 s left
running   0  waiting   0  no step ended in the last 5 s"""
    )
    assert lines[2].fields["prefills"][0]["total"] == 5969


def test_when_a_status_is_due() -> None:
    idle = EngineStats().flat()
    assert not is_busy(idle, idle, [])
    assert is_busy(idle, idle, [Prefill("a", 0, 0, 9, 9)]), "the counters stand still while a long step runs"
    assert is_busy(idle, EngineStats(SchedulerStats(waiting=1)).flat(), [])
    one, two = (EngineStats(finished=FinishedStats(stop=count)).flat() for count in (1, 2))
    assert is_busy(idle, two, []) and not is_busy(idle, one, []), "one request has a line of its own"


def test_a_dead_engine_has_no_status() -> None:
    def dies(number: int, engine: Any) -> None:
        engine.prefills = [Prefill("a", 0, 0, 9, 9)]

    with logged() as out, serving(prepare=dies, log_interval_s=0.05) as running:
        until(lambda: "reading" in out.getvalue())
        running.given.hold.clear()
        running.engine.die("lost")
        until(lambda: "starting it again" in out.getvalue())
        told = out.getvalue()
        running.http.get("/health")
        until(lambda: running.metric("engine_restarts_total") == 1)
        assert out.getvalue() == told
        running.given.hold.set()


def test_a_second_ctrl_c_ends_what_is_under_way() -> None:
    with logged() as out, serving(token_s=0.01) as running:
        sock = open_request(running.port, text(max_tokens=3000, stream=True))
        until(lambda: running.engine.stats.scheduler.running == 1)
        loop = running.server.servers[0].get_loop()
        for _ in range(2):
            loop.call_soon_threadsafe(running.server.handle_exit, signal.SIGINT, None)
        running.thread.join(5)
        assert not running.thread.is_alive() and running.server.exit_code() == 0
        sock.close()
    *_, stopping, ended, left = without_times(out.getvalue()).splitlines()
    assert stopping == "INFO  stopping: requests under way have up to 10 s; ctrl-c again ends them at once"
    assert ended == "INFO  stopping: ended what was under way: 1 request"
    assert "  left      prompt       5" in left


def test_requests_under_way_are_ended_when_their_time_is_over() -> None:
    with logged() as out, serving(token_s=0.01, shutdown_timeout_s=0.1) as running:
        sock = open_request(running.port, text(max_tokens=3000, stream=True))
        until(lambda: running.engine.stats.scheduler.running == 1)
        running.server.servers[0].get_loop().call_soon_threadsafe(running.server.handle_exit, signal.SIGTERM, None)
        running.thread.join(5)
        assert not running.thread.is_alive() and running.server.exit_code() == 0
        sock.close()
    *_, stopping, ended, left = without_times(out.getvalue()).splitlines()
    assert stopping == "INFO  stopping: requests under way have up to 0.1 s"
    assert ended == "INFO  stopping: ended what was under way: 1 request"
    assert "  left      prompt       5" in left


def test_lines_about_refusals() -> None:
    full, tokens = Refusal(429, "queue full"), Refusal(400, "max_tokens")
    assert refused_line(Counter([full]), 5.0, "12 requests are waiting") == (
        "refused one with 429: 12 requests are waiting"
    )
    counts = Counter({full: 12, tokens: 2, Refusal(400, "prompt"): 1})
    assert refused_line(counts, 5.0, "") == (
        "refused in the last 5 s: 12 with 429 (queue full), 3 with 400 (max_tokens 2, prompt 1)"
    )
    many = Counter({Refusal(400, f"field {index}"): 9 - index for index in range(8)})
    assert refused_line(many, 5.0, "") == (
        "refused in the last 5 s: 44 with 400 (field 0 9, field 1 8, field 2 7, field 3 6, others 14)"
    )


def test_reasons_are_ours() -> None:
    assert reason_of(invalid("unknown field 'tempereture'", "tempereture", "unknown_parameter")) == "unknown field"
    assert reason_of(invalid("no", "messages[17].content")) == "messages"
    assert reason_of(ApiError(404, "unknown route: GET /a\nb")) == "unknown route"


async def test_a_tally_tells_the_first_at_once_and_bounds_what_it_counts() -> None:
    told: list[Counter[Any]] = []
    tally = Tally(60.0, lambda counts, seconds: told.append(counts), lambda key: "rest")
    tally.note("a")
    await _turn()
    for number in range(3 * MOST_KEYS):
        tally.note(number)
    await _turn()
    assert told == [Counter({"a": 1})], "the next line waits for its interval"
    tally._due()
    assert told[1]["rest"] == 2 * MOST_KEYS and len(told[1]) == MOST_KEYS + 1


async def _turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0.001)


async def test_each_refusal_is_told_at_debug_and_faults_of_our_own_never() -> None:
    with logged(level=logging.DEBUG) as out:
        refusals = Refusals(60.0)
        refusals.note(ApiError(500, "internal error"), "POST", "/v1/completions", "req_1")
        refusals.note(invalid("n: too\nmany", "n"), "POST", "/v1/completions", "req_1")
        await _turn()
    assert (
        without_times(out.getvalue())
        == """\
DEBUG refused  req_1  POST /v1/completions with 400: n: too\\nmany
INFO  refused one with 400: n: too\\nmany"""
    )


def test_refused_requests_have_no_line_of_their_own() -> None:
    with logged() as out, serving(max_queued_requests=1, running_limit=0) as running:
        running.engine.stats.scheduler.waiting = 1
        for _ in range(3):
            assert running.http.post(TEXT, json=text()).status_code == 429
        until(lambda: "refused" in out.getvalue())
    assert "prompt" not in out.getvalue().split("curl")[1] and out.getvalue().count("refused") == 1


def test_json() -> None:
    with logged("json") as out, serving() as running:
        running.http.post(TEXT, json=text("z" * 128))
        running.http.post(TEXT, json=text(max_tokens=-1))
        until(lambda: "refused" in out.getvalue())
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert lines[0]["time"].endswith("Z") and lines[0]["level"] == "info" and lines[0]["logger"] == "headrace.server"
    by_message = {line["message"].split()[0]: line for line in lines}
    assert by_message["KV"]["kv_cache_tokens"] == 64_000 and by_message["Ready"]["url"].endswith("/v1")
    (end,) = [line for line in lines if line.get("event") == "ended"]
    assert end["request_id"].startswith("cmpl-") and len(end["request_id"]) == 37
    assert (end["prompt_tokens"], end["cached_tokens"], end["output_tokens"]) == (128, 64, 8)
    assert end["outcome"] == "done" and end["finish_reason"] == "length"
    assert end["ttft_s"] > 0 and lines[-1]["refused_by_status"] == {"400": 1}


def test_json_of_an_exception_is_one_line() -> None:
    try:
        raise ValueError("a\n\u2028b")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "no %s", "args": ("x\ny",), "levelname": "ERROR", "exc_info": (
            ValueError, error, error.__traceback__)})  # fmt: skip
    line = logs.JsonFormatter().format(record)
    assert line.isascii() and line.isprintable()
    assert "ValueError" in json.loads(line)["exception"] and json.loads(line)["level"] == "error"
