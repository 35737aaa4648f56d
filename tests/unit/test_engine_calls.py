"""Calls to an engine: answered in order, in pieces between steps, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.engine import call_handlers, messages
from headrace.engine.call_handlers import CallHandlers, Pieces
from headrace.engine.calls import EngineCall, Refused, ResetPrefixCache
from headrace.engine.messages import Call, CallAnswer
from headrace.engine.pending_calls import PendingCalls
from headrace.kv.cache import KVCache
from headrace.types import CHUNK, EngineDead, InvalidRequest

pytestmark = pytest.mark.unit


class Core:
    """What handlers need of an engine."""

    def __init__(self) -> None:
        self.cache = KVCache(8)
        self.pieces = 0


def in_pieces(core: Any, call: EngineCall) -> Pieces:
    for _ in range(3):
        core.pieces += 1
        yield
    return "whole"


def refused(core: Any, call: EngineCall) -> None:
    raise InvalidRequest("no such prefix", "prefix_id", "not_found")


def refused_later(core: Any, call: EngineCall) -> Pieces:
    yield
    raise InvalidRequest("gone meanwhile")


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CallHandlers, dict[type, Any]]]:
    table: dict[type, Any] = dict(call_handlers.HANDLERS)
    monkeypatch.setattr(call_handlers, "HANDLERS", table)
    core: Any = Core()
    yield CallHandlers(core), table


def test_the_idle_chunks_are_forgotten(handlers: tuple[CallHandlers, dict[type, Any]]) -> None:
    calls, _ = handlers
    cache = calls._core.cache
    tables = [cache.open([number] * CHUNK) for number in range(2)]
    for table in tables:
        assert cache.extend(table, CHUNK)
    cache.commit()
    cache.close(tables[0])
    assert calls.ask(ResetPrefixCache()) == 1
    assert calls.ask(ResetPrefixCache()) == 0, "the other one is held"
    cache.check()


def test_a_long_call_gives_way_at_each_piece(handlers: tuple[CallHandlers, dict[type, Any]]) -> None:
    calls, table = handlers
    table[ResetPrefixCache] = in_pieces
    assert calls.begin(1, ResetPrefixCache()) == [] and calls.begin(2, ResetPrefixCache()) == []
    core: Any = calls._core
    answers = []
    for step in range(8):
        assert core.pieces == step - len(answers), "one piece between two steps"
        answers += [answer.number for answer in calls.advance()]
    assert answers == [1, 2] and not calls.pending
    assert calls.advance() == []


@pytest.mark.parametrize("handler", [refused, refused_later])
def test_a_refusal_is_an_answer(handler: Any, handlers: tuple[CallHandlers, dict[type, Any]]) -> None:
    calls, table = handlers
    table[ResetPrefixCache] = handler
    with pytest.raises(InvalidRequest, match=r"no such|gone"):
        calls.ask(ResetPrefixCache())
    assert not calls.pending


def test_messages() -> None:
    for message in (CallAnswer(3, {"chunks": [1, 2]}), CallAnswer(4, refused=Refused("no", "name"))):
        assert messages.from_engine(messages.frame(message)[messages.LENGTH.size :]) == message
    call = Call(5, ResetPrefixCache())
    assert messages.to_engine(messages.frame(call)[messages.LENGTH.size :]) == call


def test_each_gets_its_answer() -> None:
    async def run() -> None:
        sent: list[Call] = []
        pending = PendingCalls(sent.append)
        asking = [asyncio.create_task(pending.ask(ResetPrefixCache())) for _ in range(4)]
        await asyncio.sleep(0)
        numbers = [call.number for call in sent]
        asking[3].cancel()
        await asyncio.sleep(0)
        pending.take(CallAnswer(numbers[3], "nobody's"))
        pending.take(CallAnswer(numbers[1], "second"))
        pending.take(CallAnswer(numbers[0], refused=Refused("no", "name", "not_found")))
        pending.fail("the engine ended")
        assert await asking[1] == "second"
        with pytest.raises(InvalidRequest, match="no") as told:
            await asking[0]
        assert (told.value.param, told.value.code) == ("name", "not_found")
        with pytest.raises(EngineDead, match="ended"):
            await asking[2]
        assert not pending._waiting

    asyncio.run(run())
