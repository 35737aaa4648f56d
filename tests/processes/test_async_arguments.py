"""Wrong arguments of AsyncLLM: refused by name in the caller's process, while the engine serves on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from headrace import AsyncLLM, InvalidRequest, SamplingParams
from headrace.engine import messages as m
from headrace.types import Delta

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]
HALF = "\ud800"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM("tiny", kv_cache_tokens=4096, threads=1) as made:
        yield made


async def collect(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


async def serves_on(llm: AsyncLLM) -> bool:
    """And nothing is left of what was refused."""
    return len(await collect(llm.generate("Hello", GREEDY))) == 4 and not llm._streams._open and not len(llm._queued)


WRONG: list[dict[str, Any]] = [
    {"request_id": 3}, {"request_id": b"x"}, {"request_id": HALF}, {"request_id": 0}, {"embed": 1}, {"embed": "x"},
    {"params": 3}, {"params": {"max_tokens": 3}}, {"params": [GREEDY]}, {"cache_salt": HALF}, {"cache_salt": 3},
    {"tenant": HALF}, {"tenant": None}, {"kv_share": None}, {"kv_limit": "x"}, {"adapter": 3}, {"adapter": None},
    {"adapter": np.array(["a", "b"])}, {"prompt": 3},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
async def test_of_generate(llm: AsyncLLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await collect(llm.generate(**{"prompt": "Hello", "params": GREEDY, **wrong}))
    assert [refused.value.param] == list(wrong) and await serves_on(llm)


@pytest.mark.parametrize("wrong", [{"messages": None}, {"messages": "Hello"}, {"tools": 3}], ids=repr)
async def test_of_chat(llm: AsyncLLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await collect(llm.chat(**{"messages": HELLO, "params": GREEDY, **wrong}))
    assert [refused.value.param] == list(wrong) and await serves_on(llm)


async def test_a_value_that_cannot_be_sent_takes_no_place_in_the_queue(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await collect(llm.generate("Hello", replace(GREEDY, temperature=np.float64(0.5))))
    assert await serves_on(llm)


async def test_a_request_that_the_engine_cannot_read_fails_alone(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = llm._send

    def spoil(message: m.ToEngine) -> None:
        if isinstance(message, m.Add):
            message.request.embed = 1  # type: ignore[assignment]
        send(message)

    with monkeypatch.context() as patch, pytest.raises(InvalidRequest, match=r"cannot read this request: .*embed"):
        patch.setattr(llm, "_send", spoil)
        await collect(llm.generate("Hello", GREEDY))
    assert await serves_on(llm)
