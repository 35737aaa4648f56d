"""LLM and AsyncLLM as Python shows them, and `with`."""

from __future__ import annotations

import gc
import inspect
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock
from weakref import ref

import numpy as np
import pytest

from headrace import LLM, AsyncLLM, EngineDead, InvalidRequest, SamplingParams
from headrace.config import SETTINGS, EngineConfig
from headrace.engine import ending
from headrace.parallel.transport import RankLost
from headrace.types import Delta

pytestmark = pytest.mark.cpu

BRIEF = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", kv_cache_tokens=4096, threads=1) as made:
        yield made


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_signature_shows_every_setting(kind: Any) -> None:
    first, *shown = inspect.signature(kind).parameters.values()
    assert first.default == "tiny" and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    told = {each.name: (each.annotation, each.default) for each in shown}
    assert told == {item.name: (item.given_kind, item.default) for item in SETTINGS.values() if item.name != "model"}
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in shown)
    assert "kv_cache_tokens=None: KV in fast memory on each rank" in str(kind.__doc__)
    assert max(map(len, str(inspect.signature(kind)).splitlines())) <= 100


def test_only_public_names_are_listed(llm: LLM) -> None:
    answers = ["chat", "classify", "embed", "generate", "logits", "score"]
    assert dir(LLM) == sorted([*answers, "close", "load_session", "save_session", "stats"])
    assert dir(llm) == sorted([*dir(LLM), "capacity", "config", "engine", "tokenizer"])
    assert "generate" in dir(AsyncLLM) and not [name for name in dir(AsyncLLM()) if name.startswith("_")]


def test_reprs(llm: LLM) -> None:
    assert repr(llm) == "LLM('tiny', bfloat16, 4,096 KV tokens)"
    assert repr(AsyncLLM(EngineConfig(model="m"))) == "AsyncLLM('m', not started)"


def test_stats_count(llm: LLM) -> None:
    before = llm.stats()
    outputs = llm.generate([[5] * 200, [5] * 200], BRIEF)
    after = llm.stats()
    assert after.requests_finished - before.requests_finished == 2 and after.prompt_tokens - before.prompt_tokens == 400
    assert after.cached_tokens - before.cached_tokens == sum(output.metrics.cached_tokens for output in outputs) == 192
    assert after.kv_tokens == 4096 and after.kv_tokens_kept >= 192 and after.requests_running == 0


def test_chat_takes_one_or_several_conversations(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    alone = llm.chat(hello, BRIEF)
    several = llm.chat([hello, hello], [BRIEF, SamplingParams(temperature=0, max_tokens=2)], progress=False)
    assert [len(output.token_ids) for output in (*alone, *several)] == [4, 4, 2]
    for wrong in ("Hello", ["Hello"], {"role": "user"}):
        with pytest.raises(InvalidRequest, match="messages must be a list of"):
            llm.chat(wrong)  # type: ignore[arg-type]


async def test_a_chat_template_of_a_file_takes_the_place_of_the_models(tmp_path: Path) -> None:
    """Of both kinds of engines; what cannot be read is refused before anything is loaded."""
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    given: dict[str, Any] = dict(kv_cache_tokens=1024, chat_template=str(file))
    hello = [{"role": "user", "content": "Hello"}]
    with LLM("tiny", **given) as llm:
        (answer,) = llm.chat(hello, BRIEF)
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode("<Hello>", add_special_tokens=False)
        assert answer.prompt_token_ids == prompt
    async with AsyncLLM("tiny", **given) as served:
        assert served.tokenizer is not None and served.tokenizer.apply_chat(hello) == prompt
    file.unlink()
    with pytest.raises(ValueError, match=r"own\.jinja cannot be read: .*No such file"):
        LLM("tiny", **given)
    with pytest.raises(ValueError, match=r"own\.jinja cannot be read: .*No such file"):
        await AsyncLLM("tiny", **given).start()


def test_sampling_params_are_checked(llm: LLM) -> None:
    for wrong in ({"max_tokens": 4}, [4]):
        with pytest.raises(InvalidRequest, match=r"must be SamplingParams\(\.\.\.\)"):
            llm.generate("Hello", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "wrong"),
    [("generate", {"sampling_params": 3}), ("generate", {"cache_salt": "\ud800"}), ("generate", {"tenant": "\ud800"}),
     ("generate", {"kv_limit": None}), ("chat", {"tools": 3}), ("chat", {"messages": None}),
     ("generate", {"prompts": [[1], []]}), ("generate", {"adapter": None}),
     ("generate", {"adapter": np.array(["a", "b"])}), ("chat", {"adapter": 3}), ("logits", {"token_ids": []}),
     ("logits", {"token_ids": 3}), ("score", {"options": 3}), ("score", {"text": 3}), ("embed", {"inputs": [[]]}),
     ("embed", {"inputs": 3}), ("embed", {"cache_salt": "\ud800"})],
    ids=repr,
)  # fmt: skip
def test_arguments_of_a_wrong_kind_are_refused_by_name(llm: LLM, call: str, wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "generate": {"prompts": "Hello"}, "chat": {"messages": [{"role": "user", "content": "Hello"}]},
        "score": {"text": "Hello", "options": [" you"]}, "embed": {"inputs": "Hello"},
        "logits": {},
    }  # fmt: skip
    with pytest.raises(InvalidRequest) as refused:
        getattr(llm, call)(**{**right[call], **wrong})
    assert [refused.value.param] == list(wrong)


def test_the_prompt_at_fault_is_named_by_its_place(llm: LLM) -> None:
    for call, told in (
        (lambda: llm.generate([[1], []]), r"^prompts\[1\]: the prompt is empty"),
        (lambda: llm.generate([[]]), "^prompts: the prompt is empty"),
        (lambda: llm.logits([]), "^token_ids: the prompt is empty"),
        (lambda: llm.logits(3), "^token_ids: give a text, token ids"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest, match=told):
            call()


def test_an_adapter_is_given_by_its_name(llm: LLM) -> None:
    for wrong in (None, 3, b"x", {"a"}, [None]):
        with pytest.raises(
            InvalidRequest, match="adapter must be the name of one of lora_modules, or '' for the model"
        ):
            llm.generate("Hello", adapter=wrong)  # type: ignore[arg-type]


def test_a_sampling_parameter_is_no_variable_of_the_template(llm: LLM) -> None:
    """It would be passed on to the template, which knows no such thing, and have no effect."""
    with pytest.raises(TypeError, match=r"give SamplingParams\(max_tokens=\.\.\.\)"):
        llm.chat([{"role": "user", "content": "Hello"}], max_tokens=4)


def test_tools_that_the_template_does_not_show_are_refused(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest, match="shows no tools") as refused:
        llm.chat([{"role": "user", "content": "Hello"}], BRIEF, tools=tools)
    assert refused.value.param == "tools"


def test_prompts_in_dicts_are_refused_and_numbers_alone_are_one_prompt(llm: LLM) -> None:
    for call in (llm.generate, llm.embed, llm.logits):
        with pytest.raises(InvalidRequest, match="not a dict"):
            call({"prompt_token_ids": [5, 6, 7]})  # type: ignore[operator]
    [flat], [nested] = llm.generate([5, 6, 7], BRIEF), llm.generate([[5, 6, 7]], BRIEF)
    assert flat.prompt_token_ids == [5, 6, 7] and flat.token_ids == nested.token_ids


def test_calls_of_several_threads_take_turns(llm: LLM) -> None:
    longer = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def answered(index: int) -> tuple[list[int], list[float], int]:
        [output] = llm.generate(f"In the year {index}", longer)
        return output.token_ids, llm.embed(f"In {index}")[0].tolist(), len(llm.logits([5] * index))

    alone = [answered(index) for index in range(1, 9)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(answered, range(1, 9))) == alone


def test_a_closed_one_answers_no_more() -> None:
    with LLM("tiny", kv_cache_tokens=4096, threads=1) as llm:
        assert llm.generate("Hello", BRIEF)[0].token_ids
    assert repr(llm).endswith(", closed)")
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("Hello", BRIEF)
    assert llm.stats().requests_finished == 1, "what it has done is still told"
    llm.close()


@pytest.mark.parametrize("progress", [False, True])
def test_the_handler_of_a_signal_may_close_it_in_the_midst_of_a_step(progress: bool) -> None:
    llm = LLM("tiny", kv_cache_tokens=4096, threads=1)
    core, computes = llm.engine, llm.engine.step

    def step() -> list[Delta]:
        deltas = computes()
        llm.close()
        return deltas

    core.step = step  # type: ignore[method-assign]
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("Hello", BRIEF, progress=progress)
    assert not core.has_work and core.on_prefill is None


def test_one_that_has_lost_a_rank_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the other ranks' counters cannot be asked for any more."""
    llm = LLM("tiny", kv_cache_tokens=4096, threads=1)
    monkeypatch.setattr(llm.engine, "stats", Mock(side_effect=RankLost("rank 1 is gone")))
    llm.close()
    assert not hasattr(llm, "engine")
    with pytest.raises(EngineDead, match="rank"):
        llm.stats()


def test_memory_of_a_closed_one_is_free_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its name is still there, as behind a `with`."""
    monkeypatch.setattr(ending, "WORTH_COLLECTING", 1)
    gc.disable()
    try:
        with LLM("tiny", kv_cache_tokens=4096, threads=1) as llm:
            pool, weights = ref(llm.engine.cache), ref(llm.engine.loaded.decoder)
        with LLM("tiny", kv_cache_tokens=4096, threads=1):
            assert pool() is None and weights() is None
    finally:
        gc.enable()


def test_closing_ends_what_another_thread_has_under_way() -> None:
    """At its next step, behind which nothing computes any more: `close` waits for that alone."""
    llm, begun, stepping = LLM("tiny", kv_cache_tokens=4096, threads=1), Event(), Event()
    core, computes = llm.engine, llm.engine.step

    def step() -> list[Delta]:
        stepping.set()
        begun.set()
        while not llm._closed:
            time.sleep(0.001)
        time.sleep(0.1)
        deltas = computes()
        stepping.clear()
        return deltas

    core.step = step  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(llm.generate, "Hello", SamplingParams(max_tokens=1000, ignore_eos=True))
        assert begun.wait(60)
        llm.close()
        assert not stepping.is_set()
        with pytest.raises(EngineDead, match="closed"):
            answer.result()
    assert not core.has_work


def test_one_that_is_dropped_leaves_neither_memory_nor_threads() -> None:
    """As a cell of a notebook that runs again drops the one before."""
    before = set(threading.enumerate())
    llm = LLM("tiny", kv_cache_tokens=4096, threads=1, kv_offloading_size=0.01)
    llm.generate("Hello", BRIEF)
    pool, more = ref(llm.engine.cache), set(threading.enumerate()) - before
    assert more, "those of the tier"
    del llm
    for thread in more:
        thread.join(10)
        assert not thread.is_alive(), thread
    gc.collect()
    assert pool() is None


def test_a_forked_process_leaves_the_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of its threads, and would end its ranks. It does not wait for a thread's turn that has none there."""
    with LLM("tiny", kv_cache_tokens=4096, threads=1) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            patch.setattr(llm, "_turn", None)
            llm.close()
            for call in (lambda: llm.generate("Hello"), lambda: llm.embed("Hello"), lambda: llm.load_session("a")):
                with pytest.raises(EngineDead, match="forked"):
                    call()
        assert llm.generate("Hello", BRIEF)[0].token_ids


FORKS = """
import os
import signal
from headrace import LLM, SamplingParams
def answer(threads):
    return LLM("tiny", kv_cache_tokens=1024, threads=threads).generate("Hello", SamplingParams(temperature=0))[0].text
right = answer(2)
if (child := os.fork()) == 0:
    signal.alarm(40)  # should it hang, it ends before whoever waits for the end of its output
    try:
        answer(2)
    except ValueError as refused:
        print(refused, answer(1) == right, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_process_has_an_engine_of_one_thread_and_does_not_hang() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=50)
    assert re.fullmatch(r"threads: this process was forked .*'spawn', or give threads=1 True\n", done.stdout), done


def test_settings_of_an_async_engine() -> None:
    assert AsyncLLM("m", kv_cache_tokens=4096).config == EngineConfig(model="m", kv_cache_tokens=4096)
    assert AsyncLLM(EngineConfig(model="m"), port=1).config == EngineConfig(model="m", port=1)
