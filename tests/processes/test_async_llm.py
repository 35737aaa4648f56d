"""The engine in its own process: streaming, aborts, overload, death, silence."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from headrace import LLM, AsyncLLM, InvalidRequest, SamplingParams
from headrace.config import EngineConfig
from headrace.engine import process, watchdog
from headrace.engine.calls import ResetPrefixCache
from headrace.progress import PhaseTimes, Prefill
from headrace.types import Delta, EngineDead, Overloaded, Structured

CONFIG = EngineConfig(model="tiny", kv_cache_tokens=20_000, max_batch_tokens=256, max_queued_requests=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=2000)

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Kept:
    """An engine that tests share, and another one once a test has ended it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.llm = config, AsyncLLM(config)
        self.loaded: list[tuple[int, int]] = []
        self.phases = PhaseTimes()

    async def alive(self) -> AsyncLLM:
        if self.llm.alive:
            await settled(self.llm)
        else:
            self.llm = AsyncLLM(self.config)
            await self.llm.start(lambda *at: self.loaded.append(at), phases=self.phases)
            self.phases.close()
        return self.llm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept() -> AsyncIterator[Kept]:
    made = Kept(CONFIG)
    yield made
    await made.llm.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def llm(kept: Kept) -> AsyncLLM:
    return await kept.alive()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept_impatient() -> AsyncIterator[Kept]:
    made = Kept(CONFIG.replace(engine_timeout_s=2.0))
    yield made
    await made.llm.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def impatient(kept_impatient: Kept) -> AsyncLLM:
    """Its engine may be silent for two seconds."""
    return await kept_impatient.alive()


async def collect(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


async def settled(llm: AsyncLLM) -> None:
    """Until the engine holds nothing."""
    for _ in range(200):
        if llm.stats.scheduler.running == llm.stats.scheduler.waiting == llm.stats.kv.chunks_used == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"chunks leaked: {llm.stats}")


async def test_shapes_are_followed_in_the_process_and_refused_before_it(llm: AsyncLLM) -> None:
    shape = Structured(regex="[0-9]{3} one two three four")
    deltas = await collect(llm.generate("The code is", replace(GREEDY, structured=shape, ignore_eos=False)))
    assert re.fullmatch("[0-9]{3} one two three four", "".join(delta.text for delta in deltas))
    assert max(len(delta.token_ids) for delta in deltas) > 2 and deltas[-1].finish_reason == "stop"
    assert llm.stats.structured.requests == 1 and llm.stats.structured.forced > 3
    with pytest.raises(InvalidRequest) as refused:
        await collect(llm.generate("The code is", replace(GREEDY, structured=Structured(regex="[0-9"))))
    assert refused.value.param == "structured" and llm.alive


async def test_streams_what_the_offline_interface_answers(llm: AsyncLLM) -> None:
    prompts = ["The code of Lisbon is 4821.", "In the beginning", "And the LORD said unto"]
    offline = LLM("tiny", kv_cache_tokens=20_000).generate(prompts, replace(GREEDY, n=2, temperature=0.8, seed=3))
    streams = [collect(llm.generate(p, replace(GREEDY, n=2, temperature=0.8, seed=3))) for p in prompts]
    for output, deltas in zip(offline, await asyncio.gather(*streams), strict=True):
        for completion in output.outputs:
            own = [delta for delta in deltas if delta.index == completion.index]
            assert "".join(delta.text for delta in own) == completion.text
            assert [token for delta in own for token in delta.token_ids] == completion.token_ids
            assert own[-1].finish_reason == completion.finish_reason == "length"
        metrics = deltas[-1].metrics
        assert metrics is not None and metrics.output_tokens == 40 and 0 < metrics.ttft_s <= metrics.e2e_s
    await settled(llm)


async def test_scores_and_embeddings_are_those_of_the_offline_interface(llm: AsyncLLM) -> None:
    """More options than may wait in the queue at once, beside a chat."""
    text, offline = "The code of Lisbon is 4821. " * 20, LLM("tiny", kv_cache_tokens=20_000)
    options = [f" {number} and so on" for number in range(20)] + [" 4"]
    chat = asyncio.create_task(collect(llm.generate("In the beginning", GREEDY)))
    assert await llm.score(text, options) == offline.score(text, options)
    found = await llm.embed([text, "a"])
    assert found.tolist() == offline.embed([text, "a"]).tolist() and len(await chat) == 20
    with pytest.raises(InvalidRequest):
        await llm.score(text, [])
    with pytest.raises(InvalidRequest):
        await llm.embed(text, dimensions=3)
    task = asyncio.create_task(llm.score(list(range(10, 3000)), [[n, n] for n in range(10, 60)]))
    await asyncio.sleep(0.05)
    task.cancel()
    await settled(llm)


async def test_loading_is_told_by_phases(kept: Kept, llm: AsyncLLM) -> None:
    names = ("starting the engine", "reading the configuration", "tokenizer", "weights", "packing",
             "memory for the KV cache", "tokenizer")  # fmt: skip
    assert tuple(phase.name for phase in kept.phases.all) == names
    weights = sum(path.stat().st_size for path in Path(llm.capacity.folder).glob("*.safetensors"))
    done, total = kept.loaded[-1]
    assert done == total == pytest.approx(weights, rel=0.01)
    assert kept.loaded == sorted(set(kept.loaded)), "packing is no progress of the weights"


async def test_prompts_being_read_are_known_here(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a prompt is told as it begins, and nothing is left of it when the answer begins."""
    begun: list[list[Prefill]] = []
    begin = llm._prefilling.begin

    def note(prefills: list[Prefill], expected_s: float) -> None:
        begun.append(prefills)
        begin(prefills, expected_s)

    monkeypatch.setattr(llm._prefilling, "begin", note)
    prompt = list(range(1700, 2300))
    async for _ in llm.generate(prompt, replace(GREEDY, max_tokens=3), request_id="long"):
        assert llm.prefills == []
    assert begun == [
        [Prefill("long", 0, 0, 600, 256)], [Prefill("long", 256, 0, 600, 256)], [Prefill("long", 512, 0, 600, 88)],
    ]  # fmt: skip
    assert llm.prefill_rate > 0


async def test_a_prompt_that_is_given_up_is_no_longer_read(llm: AsyncLLM) -> None:
    stream = llm.generate([7, 8, 9] * 1300, LONG)
    task = asyncio.ensure_future(anext(stream))
    while not llm.prefills:
        await asyncio.sleep(0.001)
    assert llm.prefills[0].total == 3900
    task.cancel()
    await asyncio.wait([task])
    assert llm.prefills == []
    await settled(llm)


async def test_leaving_the_iterator_aborts_queued_prefilling_and_decoding(llm: AsyncLLM) -> None:
    async def leave_after(count: int, prompt: list[int]) -> None:
        stream = llm.generate(prompt, LONG)
        if count == 0:
            task = asyncio.ensure_future(collect(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            return
        async for _ in stream:
            count -= 1
            if not count:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    await asyncio.gather(*(leave_after(n % 4, [10 + n] * (1 + 300 * n)) for n in range(8)))
    await settled(llm)
    assert len(await collect(llm.generate("In the beginning", GREEDY))) == 20


async def test_abort_by_id(llm: AsyncLLM) -> None:
    deltas = []
    async for delta in llm.generate("In the beginning", replace(LONG, n=2), request_id="mine"):
        deltas.append(delta)
        if len(deltas) == 6:
            llm.abort("mine")
    assert {delta.index for delta in deltas if delta.finish_reason == "abort"} == {0, 1}
    llm.abort("unknown")
    await settled(llm)


async def test_refusals(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        await collect(llm.generate([], GREEDY))
    with pytest.raises(InvalidRequest) as caught:
        await collect(llm.generate([5], replace(GREEDY, max_tokens=10**6)))
    assert caught.value.param == "max_tokens"
    first = asyncio.ensure_future(collect(llm.generate([5], LONG, request_id="same")))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="in use"):
        await collect(llm.generate([5], GREEDY, request_id="same"))
    first.cancel()


async def test_overload_is_refused_and_passes(llm: AsyncLLM) -> None:
    tasks = [asyncio.ensure_future(collect(llm.generate([7] * 500, GREEDY))) for _ in range(40)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [r for r in results if isinstance(r, Overloaded)]
    served = [r for r in results if isinstance(r, list)]
    assert len(refused) + len(served) == 40 and len(served) >= 8 and refused
    assert all(1 <= r.retry_after_s <= 60 for r in refused)
    assert len(await collect(llm.generate([7], GREEDY))) == 20


async def test_calls_are_answered_between_steps(llm: AsyncLLM) -> None:
    prompt = list(range(1, 201))
    running = asyncio.create_task(collect(llm.generate(prompt, LONG)))
    while not llm.stats.scheduler.running:
        await asyncio.sleep(0.01)
    await llm.call(ResetPrefixCache())
    assert not running.done(), "the answer goes on"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await llm.call(ResetPrefixCache()) >= 200 // 64, "its chunks are nobody's now"
    assert await llm.call(ResetPrefixCache()) == 0


async def test_a_conversation_has_the_tenants_keywords_too(llm: AsyncLLM) -> None:
    """They are the request's, and no variables of the chat template; what cannot be is refused by name."""
    said = [{"role": "user", "content": "Hello"}]
    assert await collect(llm.chat(said, GREEDY, tenant="acme", weight=2.0, kv_limit=0.5, priority=-1))
    for wrong in ({"kv_share": 2.0}, {"tier_quota": -1.0}, {"weight": 0.0}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            await collect(llm.chat(said, GREEDY, **wrong))


async def test_a_second_start_is_refused_and_does_no_harm(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="starts once"):
        await llm.start()
    assert [delta.text async for delta in llm.generate("Hello", GREEDY)]
    never = AsyncLLM(CONFIG)
    await never.shutdown()
    with pytest.raises(ValueError, match="starts once"):
        await never.start()


async def test_engine_process_ends_with_its_parent(llm: AsyncLLM) -> None:
    process = llm.process_id
    assert process is not None and Path(f"/proc/{process}").exists()
    await llm.shutdown()
    assert not Path(f"/proc/{process}").exists()


async def test_killed_engine_fails_what_is_under_way_and_says_so(llm: AsyncLLM) -> None:
    stream = llm.generate("In the beginning", LONG)
    await anext(stream)
    assert llm.process_id is not None
    os.kill(llm.process_id, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(collect(stream), 10)
    assert "ended" in await asyncio.wait_for(llm.wait_dead(), 10)
    assert not llm.alive
    with pytest.raises(EngineDead):
        await collect(llm.generate("more", GREEDY))


async def test_end_with_unread_messages_is_told_as_an_end(llm: AsyncLLM) -> None:
    """The socket of a process that dies before it has read everything is reset, not closed."""
    assert llm.process_id is not None
    os.kill(llm.process_id, signal.SIGSTOP)
    pending = asyncio.ensure_future(collect(llm.generate("unread", GREEDY)))
    await asyncio.sleep(0)
    os.kill(llm.process_id, signal.SIGKILL)
    with pytest.raises(EngineDead, match="the engine process ended"):
        await asyncio.wait_for(pending, 10)


@pytest.mark.matrix
async def test_time_in_which_we_stood_still_is_no_silence_of_the_engine(impatient: AsyncLLM) -> None:
    assert impatient.process_id is not None
    await asyncio.sleep(0.7)
    os.kill(impatient.process_id, signal.SIGSTOP)  # the whole machine stands still
    time.sleep(3)
    os.kill(impatient.process_id, signal.SIGCONT)
    assert len(await collect(impatient.generate("In the beginning", GREEDY))) == 20


async def test_hung_engine_is_noticed_and_ended(impatient: AsyncLLM) -> None:
    stream = impatient.generate("In the beginning", LONG)
    await anext(stream)
    process = impatient.process_id
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(EngineDead, match="hung: no sign of life for 2 s"):
        await asyncio.wait_for(collect(stream), 20)
    assert "hung" in await asyncio.wait_for(impatient.wait_dead(), 10) and not impatient.alive
    await impatient.shutdown()
    assert "hung" in str(impatient.failure) and not Path(f"/proc/{process}").exists()


@pytest.mark.matrix
async def test_engine_that_hangs_when_idle_is_noticed(impatient: AsyncLLM) -> None:
    assert impatient.process_id is not None
    os.kill(impatient.process_id, signal.SIGSTOP)
    assert "hung" in await asyncio.wait_for(impatient.wait_dead(), 20)


@pytest.mark.matrix
async def test_engine_that_hangs_while_loading_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOADING_S", 3.0)
    llm = AsyncLLM(CONFIG.replace(engine_timeout_s=1.0))

    def stop(done: int, total: int) -> None:
        assert llm.process_id is not None
        os.kill(llm.process_id, signal.SIGSTOP)

    with pytest.raises(EngineDead, match="hung"):
        await asyncio.wait_for(llm.start(stop), 60)
        await asyncio.wait_for(collect(llm.generate("late", LONG)), 20)  # it was ready before the signal reached it
    await llm.shutdown()


@pytest.mark.matrix
async def test_engine_that_never_says_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOADING_S", 1.0)
    start = process.start
    monkeypatch.setattr(process, "start", lambda command, link: start(["/bin/sleep", "600"], link))
    llm = AsyncLLM(CONFIG.replace(engine_timeout_s=2.0))
    with pytest.raises(EngineDead, match="hung: no sign of life for 2 s"):
        await asyncio.wait_for(llm.start(), 100)


HANGS = """
import sys, time
from headrace.engine import core, worker
step = core.EngineCore.step
core.EngineCore.step = lambda self: time.sleep(600) if self.has_work else step(self)
worker._leave(worker.main(int(sys.argv[1])))
"""


async def test_a_step_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that answers no more: the engine's other thread answers pings all the while."""
    start = process.start
    monkeypatch.setattr(process, "start", lambda given, link: start([sys.executable, "-c", HANGS, given[-1]], link))
    llm = AsyncLLM(CONFIG.replace(step_timeout_s=0.3))
    try:
        await asyncio.wait_for(llm.start(), 100)
        with pytest.raises(EngineDead, match=r"a step has taken more than 0\.3 s \(step_timeout_s\)"):
            await asyncio.wait_for(collect(llm.generate("Hello", GREEDY)), 60)
    finally:
        await llm.shutdown()


@pytest.mark.matrix
async def test_loading_may_take_longer_than_a_serving_engine_may_be_silent() -> None:
    """With a timeout that no import of torch stays below, the engine becomes ready; from then on the timeout holds."""
    llm = AsyncLLM(CONFIG.replace(engine_timeout_s=0.05))
    try:
        await asyncio.wait_for(llm.start(), 100)
        assert llm.process_id is not None
        os.kill(llm.process_id, signal.SIGSTOP)
        assert "hung" in await asyncio.wait_for(llm.wait_dead(), 100)
    finally:
        await llm.shutdown()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"model": "/nowhere"}, "no folder with a config.json"), ({"max_model_len": 10**9}, "max_model_len")],
)
async def test_settings_that_cannot_work(settings: dict[str, object], reason: str) -> None:
    llm = AsyncLLM(CONFIG.replace(**settings))
    with pytest.raises(ValueError, match=reason):
        await llm.start()
    assert not llm.alive


async def test_another_event_loop_is_refused_before_it_waits_for_ever() -> None:
    """And may end the engine, whose own loop is closed."""
    llm = AsyncLLM(CONFIG)

    async def ask() -> None:
        async for _ in llm.generate("Hello", GREEDY):
            pass

    await asyncio.to_thread(asyncio.run, llm.start())
    with pytest.raises(EngineDead, match="event loop"):
        await asyncio.to_thread(asyncio.run, asyncio.wait_for(ask(), 20))
    await asyncio.to_thread(asyncio.run, llm.shutdown())
    assert llm._process is not None and llm._process.returncode == 0
