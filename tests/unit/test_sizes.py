"""Sizes and types as people write them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from headrace.config import EngineConfig, config_from_env
from headrace.config.environment import OTHERS, unknown_variables
from headrace.config.sizes import Unit, parse_size

pytestmark = pytest.mark.unit

SIZES: list[tuple[Unit, str, float]] = [
    ("tokens", "16384", 16384), ("tokens", "128k", 131072), ("tokens", "128K", 131072), ("tokens", " 1 M ", 1 << 20),
    ("tokens", "1.5k", 1536), ("tokens", "131,072", 131072), ("tokens", "131_072", 131072), ("tokens", "2g", 2 << 30),
    ("GiB", "16", 16), ("GiB", "0.5", 0.5), ("GiB", "1e-3", 0.001), ("GiB", "16GiB", 16), ("GiB", "16 g", 16),
    ("GiB", "512MiB", 0.5), ("GiB", "1.5T", 1536), ("GiB", "16GB", 16e9 / 2**30), ("GiB", "1048576k", 1),
    ("MiB", "512", 512), ("MiB", "1GiB", 1024), ("MiB", "1GB", 953), ("MiB", "512KiB", 0),
]  # fmt: skip


@pytest.mark.parametrize(("unit", "text", "value"), SIZES)
def test_sizes(unit: Unit, text: str, value: float) -> None:
    found = parse_size("x", text, unit)
    assert found == value and isinstance(found, float if unit == "GiB" else int)


@pytest.mark.parametrize("unit", ["tokens", "GiB", "MiB"])
@pytest.mark.parametrize("text", ["", "k", "many", "1 2", "12q", "1kk", "--1", "16GiBs", "½"])
def test_what_is_no_size(unit: Unit, text: str) -> None:
    with pytest.raises(ValueError, match=r"^x must be a .*such as .*, got '"):
        parse_size("x", text, unit)


def test_tokens_are_whole() -> None:
    with pytest.raises(ValueError, match="x must be whole tokens, such as"):
        parse_size("x", "1.3", "tokens")


def test_settings_take_them_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made = EngineConfig(kv_cache_tokens="128k", max_model_len="8k", kv_offloading_size="512MiB")
    assert made == EngineConfig(kv_cache_tokens=131072, max_model_len=8192, kv_offloading_size=0.5)
    assert made == EngineConfig(**made.flat)
    monkeypatch.setenv("HEADRACE_MAX_BATCH_TOKENS", "4k")
    assert config_from_env().scheduler.max_batch_tokens == 4096


TYPES: list[tuple[str, Any, str]] = [
    ("dtype", "BF16", "bfloat16"), ("dtype", "fp32", "float32"), ("dtype", "Float", "float32"),
    ("dtype", "Auto", "auto"), ("kv_cache_dtype", "bf16", "bfloat16"), ("kv_cache_dtype", "INT8", "int8"),
    ("quantization", "Int4", "int4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "meant"), TYPES)
def test_spellings_of_types(name: str, given: str, meant: str, caplog: pytest.LogCaptureFixture) -> None:
    assert EngineConfig(**{name: given}) == EngineConfig(**{name: meant})
    assert not caplog.records


@pytest.mark.parametrize("given", ["fp16", "float16", "HALF"])
def test_float16_is_told_of(given: str, caplog: pytest.LogCaptureFixture) -> None:
    assert EngineConfig(dtype=given).model.dtype == "bfloat16"
    assert f"dtype {given.lower()}: computed in bfloat16" in caplog.text


def test_variables_that_nothing_reads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from headrace.config import environment

    known = {"HEADRACE_PORT": "1", **dict.fromkeys(OTHERS, "x"), "OTHER_HEADRACE": "y"}
    assert unknown_variables(known | {"HEADRACE_PROT": "1", "HEADRACE_QQQQ": "2"}) == {
        "HEADRACE_PROT": "; did you mean HEADRACE_PORT?",
        "HEADRACE_QQQQ": "",
    }
    monkeypatch.setenv("HEADRACE_KV_CACHE_TOKNES", "5")
    with caplog.at_level(logging.WARNING):
        environment.warn_of_unknown()
        environment.warn_of_unknown()
    told = [r.getMessage() for r in caplog.records if "TOKNES" in r.getMessage()]
    assert told == [
        "HEADRACE_KV_CACHE_TOKNES is no setting, and nothing reads it; did you mean HEADRACE_KV_CACHE_TOKENS?"
    ]
