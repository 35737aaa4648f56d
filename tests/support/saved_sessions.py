"""An engine that saves sessions, and what is asked of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import EngineCall
from headrace.types import InvalidRequest
from tests.support.offloading import stored

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TINY = {"dtype": "bfloat16", "kv_cache_tokens": 4096, "max_batch_tokens": 256}


def engine(folder: Path, model: str | Path = "tiny", **settings: Any) -> LLM:
    return LLM(str(model), sessions_dir=str(folder), **{**TINY, **settings})


def ask(llm: LLM, call: EngineCall) -> Any:
    return CallHandlers(llm.engine).ask(call)


def checked(llm: LLM) -> None:
    """Nothing is held, and nothing is lost."""
    if llm.engine.offload is not None:
        stored(llm)
    cache = llm.engine.cache
    cache.check()
    assert not cache.tables and not cache.parked and not cache.loose


def computed(llm: LLM, tokens: list[int], salt: str | None = None) -> None:
    llm.generate([tokens], SamplingParams(max_tokens=1), cache_salt=salt)


def file_of(folder: Path) -> Path:
    (found,) = folder.glob("*/*.safetensors")
    return found


def refusal(llm: LLM, call: EngineCall) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as told:
        ask(llm, call)
    checked(llm)
    return told.value
