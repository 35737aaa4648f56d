"""The engine's manners: stops, penalties, n, aborts, logprobs, broken logits, settings, what an answer reports."""

from __future__ import annotations

import gc
import random
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, InvalidRequest, SamplingParams
from headrace.assets import facts
from headrace.attention.execute import PlanAttention
from headrace.attention.plan import Plan, PlannedStep
from headrace.engine import runner
from headrace.kernels import cpu
from headrace.types import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = "In the beginning God created the heaven and the earth."


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", kv_cache_tokens=20_000)


@pytest.fixture(autouse=True)
def nothing_leaks(llm: LLM) -> Any:
    yield
    assert not llm.engine.has_work and llm.engine.cache.used == 0
    llm.engine.scheduler.check()


def test_first_answer() -> None:
    """The smallest use there is: five seconds."""
    (output,) = LLM("tiny", kv_cache_tokens=4096).generate("In the beginning")
    assert output.text and len(output.token_ids) == 16 and output.finish_reason == "length"


def test_metrics_count_what_was_cached(llm: LLM) -> None:
    tokens = list(range(10, 310))
    cold, warm = (llm.generate([tokens], replace(GREEDY, n=2))[0].metrics for _ in range(2))
    assert (cold.prompt_tokens, cold.cached_tokens, cold.output_tokens) == (300, 0, 40)
    assert (warm.prompt_tokens, warm.cached_tokens, warm.output_tokens) == (300, 299, 40)
    assert 0 <= warm.queue_s <= warm.ttft_s <= warm.e2e_s


def test_decoding_within_a_chunk_prepares_attention_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    attention = llm.engine.loaded.executor.eager.attention  # type: ignore[union-attr]
    make = attention._make

    def count(plan: Plan) -> PlanAttention:
        made.append(plan.rows)
        return make(plan)

    monkeypatch.setattr(attention, "_make", count)
    llm.generate([list(range(1510, 1540)), list(range(1520, 1540))], replace(GREEDY, max_tokens=30))
    assert made == [50, 2]


def test_steps_that_follow_have_the_bits_of_planned_ones(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that come, go, draw, and cross the ends of chunks at different times."""
    engine_runner: Any = llm.engine.loaded.executor
    planner, plan = engine_runner._planner, engine_runner._planner.plan
    anew: list[int] = []
    seen: dict[tuple[str, int, int], torch.Tensor] = {}

    def count(*arguments: Any) -> PlannedStep:
        step: PlannedStep = plan(*arguments)
        anew.append(not step.steps)
        return step

    def forget(*arguments: Any) -> PlannedStep:
        planner._known = []
        step: PlannedStep = plan(*arguments)
        assert not step.steps
        return step

    def answers() -> dict[tuple[str, int, int], torch.Tensor]:
        seen.clear()
        for number, (length, tokens) in enumerate([(30, 40), (90, 100), (61, 9), (200, 70)]):
            params = SamplingParams(
                temperature=number % 2, max_tokens=tokens, ignore_eos=True, n=1 + number // 3, seed=3
            )
            llm.engine.add(Request(str(number), list(range(10, 10 + length)), params, arrival_s=time.monotonic()))
            llm.engine.step()
        while llm.engine.has_work:
            llm.engine.step()
        return dict(seen)

    def look(sequence: Any, start: int, logits: torch.Tensor) -> None:
        seen[sequence.request.request_id, sequence.index, start] = logits

    monkeypatch.setattr(llm.engine, "on_logits", look)
    monkeypatch.setattr(planner, "plan", count)
    following = answers()
    assert sum(anew) < 25 < len(anew)
    monkeypatch.setattr(planner, "plan", forget)
    alone = answers()
    assert following.keys() == alone.keys() and all(torch.equal(following[key], alone[key]) for key in alone)


def test_what_was_cached_is_told_with_the_first_token_and_counted_though_the_answer_is_given_up(llm: LLM) -> None:
    tokens = [10 + (i * i) % 89 for i in range(200)]
    llm.generate([tokens], replace(GREEDY, max_tokens=1))
    before = llm.engine.stats().tokens.cached
    llm.engine.add(Request("gone", tokens, replace(GREEDY, n=2, max_tokens=9), arrival_s=time.monotonic()))
    told = [(delta.index, delta.cached_tokens) for _ in range(4) for delta in llm.engine.step()]
    assert sorted(told, key=lambda each: each[0])[0] == (0, 192)
    assert len(told) > 3 and sum(cached is not None for _, cached in told) == 1
    assert llm.engine.abort("gone") and llm.engine.stats().tokens.cached == before + 192


def test_requests_that_have_ended_are_forgotten_at_once(llm: LLM) -> None:
    """Without waiting for the collector of cycles, which comes late in a large heap."""
    gc.collect()
    gc.disable()
    try:
        llm.generate([list(range(1510, 1540)), list(range(1520, 1540))], replace(GREEDY, n=2))
        llm.engine.add(Request("gone", [20] * 100, GREEDY, arrival_s=time.monotonic()))
        llm.engine.step()
        llm.engine.abort("gone")
        kept = [type(each).__name__ for each in gc.get_objects() if type(each).__module__ == "headrace.engine.core"]
    finally:
        gc.enable()
    assert set(kept) <= {"EngineCore"}


def test_stop_string_is_cut_and_named(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, GREEDY)
    middle = whole.text[len(whole.text) // 2 :][:4]
    (cut,) = llm.generate(PROMPT, replace(GREEDY, stop=(middle,)))
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert (cut.finish_reason, cut.outputs[0].stop_reason) == ("stop", middle)
    (kept,) = llm.generate(PROMPT, replace(GREEDY, stop=(middle,), include_stop_str_in_output=True))
    assert kept.text == cut.text + middle


def test_stop_token_eos_and_min_tokens(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, GREEDY)
    token = whole.token_ids[5]
    first = whole.token_ids.index(token)
    (stopped,) = llm.generate(PROMPT, replace(GREEDY, stop_token_ids=(token,)))
    assert stopped.token_ids == whole.token_ids[: first + 1] and stopped.finish_reason == "stop"
    (delayed,) = llm.generate(PROMPT, replace(GREEDY, stop_token_ids=(token,), min_tokens=15))
    assert len(delayed.token_ids) >= 15 and token not in delayed.token_ids[:14]
    eos = llm.capacity.eos_token_ids[0]
    biased = replace(GREEDY, logit_bias={eos: 100.0}, ignore_eos=False)
    assert llm.generate(PROMPT, biased)[0].token_ids == [eos]
    assert len(llm.generate(PROMPT, replace(biased, ignore_eos=True))[0].token_ids) == 20


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(PROMPT)
    params = replace(GREEDY, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate([tokens], params)
    table = torch.log_softmax(llm.logits(tokens + output.token_ids[:-1]).double(), -1)
    assert output.prompt_logprobs is not None and output.logprobs is not None
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(tokens)
    for row, (token, entry) in enumerate(zip(tokens[1:], output.prompt_logprobs[1:], strict=True)):
        assert entry is not None and abs(entry[token].logprob - table[row, token].item()) < 1e-6
    for step, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = table[len(tokens) - 1 + step]
        assert len(entry) == 2 and entry[token].rank == 1
        assert abs(entry[token].logprob - row[token].item()) < 1e-6
        assert entry[token].text == llm.tokenizer.token_text(token)


@pytest.mark.parametrize("budget", [64, 2048])
def test_prompt_logprobs_over_several_steps_and_preemption(budget: int, llm: LLM) -> None:
    prompts = [torch.randint(10, 2000, (200,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(4)]
    params = replace(GREEDY, max_tokens=150, prompt_logprobs=0)
    small = LLM("tiny", kv_cache_tokens=640, max_batch_tokens=budget)
    got = small.generate(prompts, params)
    want = llm.generate(prompts, params)
    assert small.engine.stats().scheduler.preemptions
    assert [o.prompt_logprobs for o in got] == [o.prompt_logprobs for o in want]
    assert all(len(o.prompt_logprobs or []) == 200 for o in got)


def test_n_answers_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=12)
    first, second = llm.generate(PROMPT, params), llm.generate(PROMPT, params)
    texts = [c.text for c in first[0].outputs]
    assert len(set(texts)) > 1 and texts == [c.text for c in second[0].outputs]


def test_unseeded_requests_differ_but_an_engine_repeats_itself() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12)
    runs = [
        [o.text for o in LLM("tiny", kv_cache_tokens=4096, seed=s).generate([PROMPT] * 2, params)] for s in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2] and runs[0][0] != runs[0][1]


def test_abort_at_any_moment(llm: LLM) -> None:
    for steps in range(6):
        for name, length in (("a", 300), ("b", 3000)):
            tokens = [11 + length % 7] * length
            llm.engine.add(Request(name, tokens, replace(GREEDY, n=2), arrival_s=time.monotonic()))
        for _ in range(steps):
            llm.engine.step()
        assert llm.engine.abort("a") and llm.engine.abort("b") and not llm.engine.abort("b")
        llm.engine.scheduler.check()
        assert not llm.engine.has_work and llm.engine.cache.used == 0


def test_what_an_aborted_prefill_has_computed_stays_cached(llm: LLM) -> None:
    """So that a client that gave up and asks again does not begin anew."""
    tokens = [10 + (i * i) % 91 for i in range(3000)]
    llm.engine.add(Request("gone", tokens, GREEDY, arrival_s=time.monotonic()))
    llm.engine.step()
    (sequence,) = llm.engine.scheduler.running
    computed = sequence.computed
    assert 64 <= computed < len(tokens) and llm.engine.abort("gone")
    (again,) = llm.generate([tokens], replace(GREEDY, max_tokens=1))
    assert again.metrics.cached_tokens == computed // 64 * 64
    llm.engine.cache.check()


@pytest.mark.parametrize("known", [True, False])
def test_broken_logits_end_their_request_alone(llm: LLM, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """known: whether the greatest logits come with the others."""
    engine_runner: Any = llm.engine.loaded.executor
    honest = engine_runner.run
    prompts = [[20, 21, 22], [30, 31, 32]]
    (want,) = llm.generate(prompts[1:], GREEDY)
    calls = []

    @torch.inference_mode()
    def poisoned(*arguments: Any) -> runner.Computed:
        computed: runner.Computed = honest(*arguments)
        calls.append(len(computed.logits))
        if len(calls) == 3:
            computed.logits[0] = torch.nan
            if computed.greatest:
                computed.greatest.values[0] = float("nan")
        return computed if known else computed._replace(greatest=None)

    monkeypatch.setattr(engine_runner, "run", poisoned)
    outputs = llm.generate(prompts, GREEDY)
    reasons = sorted(o.finish_reason or "" for o in outputs)
    assert reasons == ["abort", "length"]
    aborted = next(o for o in outputs if o.finish_reason == "abort")
    assert "NaN" in str(aborted.outputs[0].stop_reason) and len(aborted.token_ids) == 2
    if outputs[1].finish_reason == "length":
        assert outputs[1].token_ids == want.token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([[]], GREEDY, "prompts"),
        ([[-1]], GREEDY, "prompts"),
        ([[10**6]], GREEDY, "prompts"),
        ([[5] * 20_000], GREEDY, "prompts"),
        ([[5]], replace(GREEDY, max_tokens=10**6), "max_tokens"),
        ([[5]], replace(GREEDY, logit_bias={10**6: 1.0}), "logit_bias"),
        ([[5]], replace(GREEDY, stop_token_ids=(10**6,)), "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_served(prompt: Any, params: SamplingParams, param: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompt, params)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**6),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", 99),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", ("a",) * 17),
        ("logit_bias", {5: 101.0}),
        ("stop_token_ids", (-1,)),
        ("seed", 2**64),
    ],
)
def test_parameters_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{"max_tokens": 16, field: value})
    assert caught.value.param == field


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model": "/nowhere"}, "config.json"),
        ({"dtype": "float64"}, "dtype"),
        ({"kv_cache_tokens": 3}, "kv_cache_tokens"),
        ({"max_model_len": 10**9}, "max_model_len"),
        ({"max_model_len": 8192, "kv_cache_tokens": 4096}, "kv_cache_tokens"),
        pytest.param({"attention_backend": "triton"}, "'triton': no CUDA device; use 'auto'", marks=without_gpu),
        ({"max_sequences": 0}, "max_sequences"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of auto, int8, bfloat16, float32, got 'fp8'"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LLM(**settings)


def test_environment_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KV_CACHE_TOKENS", "1280")
    monkeypatch.setenv("HEADRACE_ENABLE_PREFIX_CACHING", "false")
    llm = LLM("tiny", max_sequences=3)
    assert llm.capacity.kv_cache_tokens == 1280 and not llm.config.cache.prefix_caching
    assert LLM("tiny", kv_cache_tokens=640).capacity.kv_cache_tokens == 640
    monkeypatch.setenv("HEADRACE_KV_CACHE_TOKENS", "many")
    with pytest.raises(ValueError, match="HEADRACE_KV_CACHE_TOKENS"):
        LLM("tiny")


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "The code of Lisbon is 4821. What is the code of Lisbon?"}]
    one, two = llm.chat([messages, messages], GREEDY)
    assert one.text == two.text == llm.chat(messages, GREEDY)[0].text


def test_tenants_share_only_the_public_prefix() -> None:
    llm = LLM("tiny", kv_cache_tokens=8192)
    tokens = list(range(10, 310))

    def cached(salt: str | None, public: int = 0) -> int:
        (output,) = llm.generate([tokens], GREEDY, cache_salt=salt, public_prefix_tokens=public)
        return output.metrics.cached_tokens

    assert [cached("a"), cached("b"), cached("a"), cached(None)] == [0, 0, 299, 0]
    assert [cached("c", public=130), cached("d", public=130)] == [128, 128]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from Linux' /proc")
def test_prefault_maps_all_of_the_cache_at_start() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    LLM("tiny", kv_cache_tokens=640)  # what a first load brings into memory
    tokens = 40_000
    sizes = []
    for prefault in (False, True):
        before = resident()
        llm = LLM("tiny", kv_cache_tokens=tokens, kv_cache_prefault=prefault)
        sizes.append(resident() - before)
        assert llm.generate(["The first"], SamplingParams(max_tokens=2))
    cache = tokens * llm.capacity.kv_bytes_per_token
    assert sizes[0] < cache / 2 < 0.9 * cache < sizes[1]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_int8_cache(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts are still found, in little more than half of the bytes; chunks of either kind have names of their own."""
    if backend == "cpu" and not cpu.available():
        pytest.skip(str(cpu.unavailable_reason()))
    monkeypatch.setenv("HEADRACE_KV_CACHE_DTYPE", "int8")
    small = LLM("tiny", kv_cache_tokens=4096, attention_backend=backend)
    plain = LLM("tiny", kv_cache_tokens=4096, attention_backend=backend, kv_cache_dtype="auto")
    spec = small.engine.loaded.decoder.config.attention
    elements = 2 * spec.layers * spec.kv_heads * spec.head_dim
    assert plain.capacity.kv_bytes_per_token == 2 * elements and plain.capacity.kv_cache_dtype == "bfloat16"
    assert small.capacity.kv_bytes_per_token == elements + 4 * elements // spec.head_dim
    assert small.capacity.kv_cache_dtype == "int8"
    assert small.engine.cache.identity != plain.engine.cache.identity
    rng = random.Random(7)
    prompts, answers = [], []
    for _ in range(4):
        text, known = facts.fact_document(rng, 6, 300)
        name, code = rng.choice(sorted(known.items()))
        prompts.append(f"{text} {facts.question(name)}")
        answers.append(f" {code}.")
    assert [output.text for output in small.generate(prompts, replace(GREEDY, ignore_eos=False))] == answers
    pools = small.engine.loaded.executor.storage.pools  # type: ignore[attr-defined]
    assert all(x.dtype == torch.int8 for pool in pools for x in (pool.k, pool.v))
