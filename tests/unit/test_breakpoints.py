"""cache_control: where breakpoints lie in a prompt, what a caller's keep, and what a reply says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.engine.calls import PinPrefix, ReleasePrefix
from headrace.server.breakpoints import MARK, tokens_before
from headrace.server.job import Job, Prompt
from headrace.server.prompt_pins import NO_ROOM, AskedPin, PromptPins
from headrace.types import CHUNK, InvalidRequest, SamplingParams
from tests.support.fake_engine import FakeTokenizer, pinned
from tests.support.fake_server import CHAT, Running, ask, check_refusal, serving

pytestmark = pytest.mark.unit

MESSAGES = "/v1/messages"
FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


class Recorded:
    """Answers pins and releases, and keeps what was asked."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.pins: list[PinPrefix] = []
        self.held: list[str] = []

    def pin(self, call: PinPrefix) -> dict[str, Any]:
        if call.id not in self.held and len(self.held) >= self.room:
            raise InvalidRequest("123 chunks of others are pinned", None, "pins_full")
        self.pins.append(call)
        self.held = [each for each in self.held if each != call.id] + [call.id]
        return pinned(call)

    def release(self, call: ReleasePrefix) -> None:
        if call.id not in self.held:
            raise InvalidRequest("gone", "id", "not_found")
        self.held.remove(call.id)

    async def call(self, call: Any) -> Any:
        return self.pin(call) if isinstance(call, PinPrefix) else self.release(call)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def server(recorded: Recorded) -> Iterator[Running]:
    with serving() as running:
        running.engine.answers = {PinPrefix: recorded.pin, ReleasePrefix: recorded.release}
        yield running


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def marked(words: str, control: Any = None) -> dict[str, Any]:
    return text(words, cache_control=control or FIVE)


def message(role: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content), **more}


LONG = "x" * 99


def test_a_part_of_a_chat(server: Running, recorded: Recorded) -> None:
    """The fake's template writes each message and a newline; a character is a token."""
    talk = [message("system", text("a"), marked(LONG)), message("user", text("b"))]
    reply = server.http.post(CHAT, json=ask(messages=talk)).json()
    (call,) = recorded.pins
    assert bytes(call.tokens).decode() == "a\n" + LONG and (call.ttl_s, call.tenant, call.salt) == (300, "", None)
    assert call.after == reply["id"] and call.id.startswith("breakpoint_")
    assert reply["headrace"]["pinned"] == {"tokens": 64, "expires_in_s": 300, "refused": None}
    plain = server.http.post(CHAT, json=ask(messages=[message("system", text("a"), text(LONG)), talk[1]])).json()
    assert plain["headrace"]["pinned"] is None and len(recorded.pins) == 1
    assert server.engine.asked[0] == server.engine.asked[1], "the prompt is the same"


def test_the_last_breakpoint_of_each_time_counts(server: Running, recorded: Recorded) -> None:
    talk = [
        message("system", marked("a", HOUR), marked(LONG, HOUR)), message("user", marked("b")),
        message("assistant", text("c")), {"role": "user", "content": LONG, "cache_control": FIVE},
    ]  # fmt: skip
    reply = server.http.post(CHAT, json=ask(messages=talk, cache_salt="s")).json()
    assert [(len(call.tokens), call.ttl_s) for call in recorded.pins] == [(101, 3600), (205, 300)]
    assert {(call.tenant, call.salt) for call in recorded.pins} == {("salt:s", "s")}
    assert reply["headrace"]["pinned"] == {"tokens": 192, "expires_in_s": 300, "refused": None}


def test_anthropics_blocks(server: Running, recorded: Recorded) -> None:
    result = {"type": "tool_result", "tool_use_id": "1"}
    talk = [
        message("user", text("q")),
        message("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        message("user", {**result, "content": [marked(LONG)]}, text("go on")),
    ]
    body = {"model": "fake", "max_tokens": 4, "messages": talk, "system": [text("s")]}
    whole = server.http.post(MESSAGES, json=body).json()
    assert whole["headrace"]["pinned"]["tokens"] == len(recorded.pins[-1].tokens) // 64 * 64
    assert bytes(recorded.pins[-1].tokens).decode().endswith("call 1: " + LONG)
    talk[2] = message("user", {**result, "content": LONG, "cache_control": HOUR}, text("go on"))
    server.http.post(MESSAGES, json=body)
    assert bytes(recorded.pins[-1].tokens).decode().endswith(LONG) and recorded.pins[-1].ttl_s == 3600
    talk[2] = message("user", {**result, "content": LONG}, text("go on"))
    server.http.post(MESSAGES, json={**body, "cache_control": FIVE})
    told = bytes(recorded.pins[-1].tokens).decode()
    assert told.endswith(LONG + "\ngo on"), "of the body: behind the last message"
    stream = server.http.post(MESSAGES, json={**body, "cache_control": FIVE, "stream": True}).text
    assert '"pinned":{"tokens":128,' in stream.replace(" ", "")


def test_tools_end_where_another_would_stand(server: Running, recorded: Recorded) -> None:
    """The fake's template knows no tools: they are told in the system text."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    tools[0]["cache_control"] = FIVE  # type: ignore[assignment]
    server.http.post(CHAT, json=ask(tools=tools, tool_choice="none"))
    told = bytes(recorded.pins[0].tokens).decode()
    assert '"one"' in told and '"two"' not in told and told.endswith('{"name": "'), told


@pytest.mark.parametrize(
    ("talk", "param"),
    [
        ([message("user", marked("a", {"type": "persistent"}))], "messages[0].content[0].cache_control.type"),
        ([message("user", marked("a", {**FIVE, "ttl": "2m"}))], "messages[0].content[0].cache_control.ttl"),
        ([message("user", marked("a", {**FIVE, "scope": "all"}))], "messages[0].content[0].cache_control.scope"),
        ([message("user", *[marked("a")] * 5)], "cache_control"),
    ],
    ids=["type", "ttl", "unknown", "five"],
)
def test_wrong_forms(server: Running, talk: list[Any], param: str) -> None:
    check_refusal(server.http.post(CHAT, json=ask(messages=talk)), 400, param)
    reply = server.http.post(MESSAGES, json={"model": "fake", "max_tokens": 4, "messages": talk})
    assert reply.status_code == 400 and param in reply.json()["error"]["message"]


def test_without_room_the_request_is_answered(server: Running, recorded: Recorded) -> None:
    recorded.room = 0
    reply = server.http.post(CHAT, json=ask(messages=[message("user", marked(LONG))]))
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]
    assert reply.json()["headrace"]["pinned"] == {"tokens": 0, "expires_in_s": 0, "refused": NO_ROOM}


@pytest.mark.parametrize("setting", [{"cache_control_pins": 0}, {"enable_prefix_caching": False}])
def test_off(setting: dict[str, Any]) -> None:
    with serving(**setting) as running:
        running.engine.answers = {}
        reply = running.http.post(CHAT, json=ask(messages=[message("user", marked(LONG))]))
    assert reply.status_code == 200 and reply.json()["headrace"]["pinned"] is None


def job_of(letter: str, pins: list[AskedPin], salt: str | None = None) -> Job:
    ids = [ord(letter)] * (2 * CHUNK)
    return Job("r", [Prompt(ids, SamplingParams(), pins=pins)], 0.0, salt)


def taken(kept: PromptPins, recorded: Any, job: Job) -> Job:
    asyncio.run(kept.take(recorded, job))
    return job


SOFT = AskedPin(CHUNK, 300.0)


def test_the_oldest_breakpoint_gives_way(recorded: Recorded) -> None:
    kept = PromptPins(2)
    for letter in "abac":
        taken(kept, recorded, job_of(letter, [SOFT]))
    first, second = (call.id for call in recorded.pins[:2])
    assert recorded.pins[2].id == first, "the same prefix is the same pin"
    assert second not in recorded.held and len(recorded.held) == 2 and first in recorded.held
    taken(kept, recorded, job_of("d", [SOFT], salt="other"))
    assert len(recorded.held) == 3, "another caller's do not"


def test_breakpoints_give_way_to_a_prefix_of_the_same_caller() -> None:
    recorded, kept = Recorded(room=2), PromptPins(8)
    taken(kept, recorded, job_of("a", [SOFT], salt="other"))
    taken(kept, recorded, job_of("b", [SOFT]))
    taken(kept, recorded, job_of("c", [AskedPin(CHUNK, 9.0, "mine")]))
    assert "mine" in recorded.held and len(recorded.held) == 2 and recorded.pins[1].id not in recorded.held
    with pytest.raises(InvalidRequest, match="no room") as told:
        taken(kept, recorded, job_of("d", [AskedPin(CHUNK, 9.0, "more")]))
    assert told.value.code == "pins_full" and "others" not in str(told.value)


def test_tokens_before_a_mark() -> None:
    class Words(FakeTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return ["ab", "c", "dé", "f"][token].encode()

    words = Words()
    for end, count in ((0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (6, 4)):
        text = "abcdéf"
        assert tokens_before(words, [0, 1, 2, 3], text, text[:end] + MARK + text[end:]) == count
