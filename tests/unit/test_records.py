"""Records as Python shows them: short reprs without secrets, names suggested, figures by plain names; no torch."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.config import SETTINGS, EngineConfig, config_from_env
from headrace.config.keywords import SettingKeywords
from headrace.config.signature import settings_text
from headrace.outputs import Completion, RequestOutput
from headrace.stats import EngineStats, FinishedStats, KVStats, SchedulerStats, TokenStats
from headrace.types import Delta, InvalidRequest, Metrics, Request, SamplingParams
from tools.golden import KEYWORDS, keywords

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (SamplingParams(), "SamplingParams()"),
        (SamplingParams(temperature=0, stop="x", max_tokens=None),
         "SamplingParams(temperature=0, stop=('x',), max_tokens=None)"),
        (Metrics(ttft_s=0.5, cached_tokens=64), "Metrics(ttft_s=0.5, cached_tokens=64)"),
        (Completion(1, "Yes.", [1, 2, 3], finish_reason="stop"), "Completion(1, 'Yes.', 3 tokens, stop)"),
        (Completion(0, "a" * 50 + "b" * 50, [1] * 1000),
         f"Completion(0, '{'a' * 30} ... {'b' * 30}', 1,000 tokens, unfinished)"),
        (RequestOutput("r-1", [5] * 4000, [Completion(0, " 4821.", [1] * 5, finish_reason="stop")],
                       Metrics(cached_tokens=3968)),
         "RequestOutput('r-1', ' 4821.', 5 tokens, stop, 3,968 of 4,000 prompt tokens cached)"),
        (RequestOutput("r-2", [5], [Completion(0, "a", [1], finish_reason="length"), Completion(1), Completion(2)],
                       Metrics()),
         "RequestOutput('r-2', 'a', 1 tokens, length and 2 more, 0 of 1 prompt tokens cached)"),
        (RequestOutput("r-3", [], [], Metrics()), "RequestOutput('r-3', no output, 0 of 0 prompt tokens cached)"),
        (Delta("r-4", 0, " a", [7]), "Delta(request_id='r-4', index=0, text=' a', token_ids=[7])"),
        (Request("r-5", [7] * 4000, SamplingParams(n=2), cache_salt="Smith & Sons"),
         "Request('r-5', 4,000 tokens, SamplingParams(n=2))"),
        (EngineConfig(), "EngineConfig(model='tiny')"),
        (EngineConfig(context_parallel_size=2), "EngineConfig(model='tiny', context_parallel_size=2)"),
        (EngineConfig(model="m", kv_cache_tokens=4096, max_batch_tokens=16384, api_key="open sesame"),
         "EngineConfig(model='m', kv_cache_tokens=4096, max_batch_tokens=16384, api_key='***')"),
    ],
)  # fmt: skip
def test_reprs(record: Any, told: str) -> None:
    assert repr(record) == told


def test_no_repr_shows_a_secret() -> None:
    config = EngineConfig(api_key="open sesame", kv_remote_url="redis://me:open-sesame@there/1")
    told = f"{config!r} {config.server!r} {config.outside!r}"
    assert "sesame" not in told
    assert {item.name for item in SETTINGS.values() if item.secret} == {"api_key", "kv_remote_url"}


def test_repr_of_sampling_params_makes_them_again() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.5}, stop_token_ids=[1, 2], stop=["x"], seed=7)
    assert eval(repr(params)) == params == pickle.loads(pickle.dumps(params)) == copy.deepcopy(params)
    assert replace(params, seed=8).seed == 8


@pytest.mark.parametrize(
    ("made", "name", "told"),
    [
        (SamplingParams, "max_token", "unknown parameter 'max_token'; did you mean max_tokens?"),
        (SamplingParams, "xyzzy", "unknown parameter 'xyzzy': help(SamplingParams) lists them"),
        (EngineConfig, "kv_cash_tokens", "unknown setting 'kv_cash_tokens'; did you mean kv_cache_tokens?"),
        (EngineConfig, "max_sequence", "unknown setting 'max_sequence'; did you mean max_sequences?"),
        (EngineConfig, "top_p", "unknown setting 'top_p'; it is one of requests: SamplingParams(top_p=...)"),
        (EngineConfig, "xyzzy", "unknown setting 'xyzzy': headrace serve --help-all lists them"),
    ],
)
def test_names_are_suggested(made: Any, name: str, told: str) -> None:
    with pytest.raises(TypeError) as error:
        made(**{name: 1})
    assert str(error.value) == told


def test_names_of_flags_are_keywords_too() -> None:
    assert EngineConfig(max_num_seqs=3, max_num_batched_tokens="1k").scheduler.max_sequences == 3
    assert config_from_env(max_num_seqs=3).scheduler.max_sequences == 3
    with pytest.raises(TypeError, match="'max_num_seqs' and 'max_sequences' are the same setting; give one"):
        EngineConfig(max_sequences=4, max_num_seqs=3)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("enable_prefix_caching", "off", "true or false, got 'off'"),
        ("enable_prefix_caching", 1, "true or false, got 1"),
        ("restart", None, "true or false, got None"),
        ("kv_remote_url", 5, "a string or None, got 5"),
        ("served_model_name", 5, "a string or None, got 5"),
        ("engine_timeout_s", "10", "a number, got '10'"),
        ("step_timeout_s", True, "a number or None, got True"),
        ("port", "8000", "an integer, got '8000'"),
        ("tool_call_parser", None, "a string, got None"),
        ("threads", 100_000, "an integer between 1 and 1024, got 100000"),
        ("threads", "2", "an integer between 1 and 1024, got '2'"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(name: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    assert str(error.value) == f"{name} must be {told}"


def test_paths_may_be_paths(tmp_path: Path) -> None:
    assert EngineConfig(kv_offload_path=tmp_path) == EngineConfig(kv_offload_path=str(tmp_path))
    assert EngineConfig(sessions_dir=tmp_path).flat["sessions_dir"] == str(tmp_path)


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_flags_of_requests_are_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be true or false, got {value!r}") as error:
        SamplingParams(**{name: value})
    assert error.value.param == name


def test_half_a_surrogate_pair_is_no_stop_string() -> None:
    """No answer has it, and no process can be told of it."""
    with pytest.raises(InvalidRequest, match=r"^stop is no text at character 1") as refused:
        SamplingParams(stop=["a\ud800"])
    assert refused.value.param == "stop"


def test_signature_of_sampling_params_is_its_own() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == [item.name for item in fields(SamplingParams)]
    assert all(f"`{item.name}`" in str(SamplingParams.__doc__) for item in fields(SamplingParams))
    assert SamplingParams(3, 0.5) == SamplingParams(n=3, temperature=0.5)


def test_keywords_are_those_of_the_settings() -> None:
    """Where a setting was added or changed: `python tools/golden.py`."""
    assert KEYWORDS.read_text() == keywords()
    assert SettingKeywords.__annotations__.keys() == SETTINGS.keys() - {"model"}


def test_help_tells_of_every_setting_of_the_engine_that_is_not_rare() -> None:
    text = settings_text()
    assert max(map(len, text.splitlines())) <= 100
    for item in SETTINGS.values():
        shown = item.name != "model" and not item.rare and item.record.title != "Server"
        assert (f"    {item.name}={item.default!r}: " in text) == shown


def test_the_package_lists_what_is_public() -> None:
    assert dir(headrace) == sorted(headrace.__all__) and {"LLM", "AsyncLLM", "SamplingParams"} <= set(dir(headrace))


def test_summary() -> None:
    stats = EngineStats(
        SchedulerStats(running=2, waiting=3, preemptions=1),
        TokenStats(prompt=1000, cached=750, prefilled=250, generated=80),
        FinishedStats(stop=4, length=5, abort=6),
        KVStats(chunks_total=100, chunks_used=20, chunks_cached=30, evictions=7),
    )
    assert asdict(stats.summary()) == {
        "requests_running": 2,
        "requests_waiting": 3,
        "requests_finished": 9,
        "requests_aborted": 6,
        "prompt_tokens": 1000,
        "cached_tokens": 750,
        "cached_share": 0.75,
        "output_tokens": 80,
        "kv_tokens": 6400,
        "kv_tokens_used": 1280,
        "kv_tokens_kept": 1920,
        "kv_share": 0.5,
        "preemptions": 1,
        "evictions": 7,
    }
    assert EngineStats().summary().cached_share == EngineStats().summary().kv_share == 0.0
