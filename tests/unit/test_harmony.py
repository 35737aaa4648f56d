"""Harmony against the openai-harmony package, whose readings of texts are written down here.

The package reads tokens of o200k_base alone, whose file it downloads. Where package and file are at hand
(TIKTOKEN_ENCODINGS_BASE names the folder of o200k_base.tiktoken) random texts are compared too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engine.templates import Renderer
from headrace.server.parsers.parts import Answer
from headrace.server.parsers.registry import Formats, make_parser
from headrace.server.turn import Tool
from headrace.server.turns import THINKING, with_thinking
from tests.support.fake_engine import FakeEngine, FakeTokenizer
from tests.support.fake_server import CHAT, Running, ask, serving, tool

pytestmark = pytest.mark.unit

Message = tuple[str, str | None, str]
"""Channel, recipient and content, as the package says them."""

RECORDED: list[tuple[str, list[Message]]] = [
    ("<|channel|>final<|message|>Hello.<|return|>", [("final", None, "Hello.")]),
    (
        "<|channel|>analysis<|message|>Hm, é.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [("analysis", None, "Hm, é."), ("final", None, "Yes.")],
    ),
    (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.search "
        '<|constrain|>json<|message|>{"q": "x"}<|call|>',
        [("analysis", None, "Need it."), ("commentary", "functions.search", '{"q": "x"}')],
    ),
    (
        ' to=functions.search<|channel|>commentary json<|message|>{"q": 1}<|call|>',
        [("commentary", "functions.search", '{"q": 1}')],
    ),
    (
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant to=functions.search<|channel|>commentary "
        '<|constrain|>json<|message|>{"q": 1}<|call|>',
        [("analysis", None, "A"), ("commentary", "functions.search", '{"q": 1}')],
    ),
    (" to=python<|channel|>analysis code<|message|>1 + 1<|call|>", [("analysis", "python", "1 + 1")]),
    (
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.search <|constrain|>json<|message|>{}<|call|>",
        [("commentary", None, "I look it up."), ("commentary", "functions.search", "{}")],
    ),
    ("<|channel|>commentary to=browser.open json<|message|>{}<|call|>", [("commentary", "browser.open", "{}")]),
    (
        '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"q": "ha',
        [("commentary", "functions.search", '{"q": "ha')],
    ),
    ("<|channel|>other<|message|>some words<|end|>", [("other", None, "some words")]),
]


def parsed(text: str, pieces: Sequence[str] = ()) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reasoning and calls without white space at their ends."""
    parser, found = make_parser(Formats("openai", "harmony"), [Tool("search"), Tool("now")]), Answer()
    for piece in pieces or [text]:
        found.add(parser.push(piece))
    found.add(parser.finish())
    calls = [(call.name, call.arguments) for call in found.calls]
    return found.text.strip(), found.reasoning.strip(), calls


def meant(messages: Sequence[Message]) -> tuple[str, str, list[tuple[str, str]]]:
    """What a client is to get of the package's messages."""
    texts, thoughts, calls = [], [], []
    for channel, recipient, content in messages:
        if recipient is not None and recipient.startswith("functions."):
            calls.append((recipient.removeprefix("functions."), content.strip() or "{}"))
        elif recipient is not None or channel == "analysis":
            thoughts.append(content)
        else:
            texts.append(content)
    return lines(texts), lines(thoughts), calls


def lines(texts: Sequence[str]) -> str:
    return "\n".join(text for text in texts if text.strip()).strip()


@pytest.mark.parametrize(("text", "messages"), RECORDED)
def test_what_the_package_reads(text: str, messages: list[Message]) -> None:
    assert parsed(text) == meant(messages)
    assert parsed(text, list(text)) == meant(messages)


@pytest.fixture(scope="module")
def encoding() -> Any:
    if find_spec("openai_harmony") is None or "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        pytest.skip("openai-harmony, or the file of its vocabulary, is not here")
    return import_module("openai_harmony").load_harmony_encoding("HarmonyGptOss")


def by_package(encoding: Any, text: str) -> list[Message]:
    tokens, role = encoding.encode(text, allowed_special="all"), import_module("openai_harmony").Role.ASSISTANT
    found = encoding.parse_messages_from_completion_tokens(tokens, role, strict=True)
    return [(each.channel, each.recipient, "".join(part.text for part in each.content)) for each in found]


def test_the_records_are_the_packages(encoding: Any) -> None:
    for text, messages in RECORDED:
        assert by_package(encoding, text) == messages, text


words = st.text(st.sampled_from('aé 👍{}"\\:.,'), min_size=1, max_size=12).map(lambda text: f"x{text}x")
plain = st.tuples(st.sampled_from(["analysis", "final", "commentary"]), st.none(), words)
called = st.tuples(st.just("commentary"), st.sampled_from(["functions.search", "functions.now", "python"]), words)


@st.composite
def answers(draw: st.DrawFn) -> str:
    written = []
    for channel, recipient, content in draw(st.lists(st.one_of(plain, called), min_size=1, max_size=5)):
        kind = draw(st.sampled_from(["", " json", " <|constrain|>json"])) if recipient else ""
        to = f" to={recipient}" if recipient else ""
        first = draw(st.booleans())
        header = f"{to}<|channel|>{channel}{kind}" if first else f"<|channel|>{channel}{to}{kind}"
        written.append(f"{header}<|message|>{content}<|end|>")
    return "<|start|>assistant".join(written)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers())
def test_random_answers(encoding: Any, text: str) -> None:
    assert parsed(text) == meant(by_package(encoding, text))


TEMPLATE = f"""{{%- for message in messages -%}}
{{%- if message.role == 'user' -%}}<|start|>user<|message|>{{{{ message.content }}}}<|end|>
{{%- elif message.role == 'tool' -%}}
<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{{{{ message.content | tojson }}}}<|end|>
{{%- else -%}}
{{%- if message.content and {THINKING} -%}}{{{{ raise_exception('one text goes before a call') }}}}{{%- endif -%}}
<|start|>assistant<|channel|>analysis<|message|>{{{{ {THINKING} }}}}<|end|>
<|start|>assistant to=functions.{{{{ message.tool_calls[0].function.name }}}}<|channel|>commentary <|constrain|>json
<|message|>{{{{ message.tool_calls[0].function.arguments | tojson }}}}<|call|>
{{%- endif -%}}{{%- endfor -%}}<|start|>assistant"""
"""The facts of gpt-oss's that count here: where reasoning stands, and that it refuses two texts before a call."""
RENDERED = (
    "<|start|>user<|message|>Weather in Oslo?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Need the tool.<|end|>"
    "<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
    '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"21 degrees"<|end|>'
    "<|start|>assistant"
)
"""What the package makes of the conversation."""


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


def conversation(**assistant: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    return [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "tool_calls": [call], **assistant},
        {"role": "tool", "tool_call_id": "1", "content": "21 degrees"},
    ]


def test_earlier_reasoning_is_shown_to_the_model(renderer: Renderer) -> None:
    messages = [with_thinking(message) for message in conversation(reasoning_content="Need the tool.")]
    assert renderer.render(TEMPLATE, messages, None, True, {}).replace("\n", "") == RENDERED


def test_words_before_a_call_stand_behind_its_reasoning(renderer: Renderer) -> None:
    messages = [
        with_thinking(message) for message in conversation(reasoning_content="Need it.", content="Let me look.")
    ]
    assert "analysis<|message|>Need it.\n\nLet me look.<|end|>" in renderer.render(TEMPLATE, messages, None, True, {})


def test_messages_without_reasoning_stay_as_they_are() -> None:
    messages = conversation(content="Let me look.")
    assert [with_thinking(message) for message in messages] == messages
    answered = {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm."}
    assert with_thinking(answered) == {**answered, "thinking": "Hm."}


class Harmony(FakeTokenizer):
    chat_template = f"{{{{ tools }}}} <|channel|> {THINKING}"


def speaks_harmony(number: int, engine: FakeEngine) -> None:
    engine.tokenizer = Harmony()


@pytest.fixture(scope="module")
def harmony() -> Iterator[Running]:
    with serving(prepare=speaks_harmony) as running:
        yield running


def test_channels_of_a_served_answer(harmony: Running) -> None:
    """In one piece, and streamed."""
    said = RECORDED[2][0]
    harmony.engine.scripts = [said, said]
    body = ask(tools=[tool("search")], max_tokens=None)
    choice = harmony.http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "Need it."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q": "x"}'}
    thought, arguments = "", ""
    with harmony.http.stream("POST", CHAT, json=body | {"stream": True}) as reply:
        for line in reply.iter_lines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                thought += choice["delta"].get("reasoning_content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    arguments += call["function"]["arguments"]
    assert (thought, arguments) == ("Need it.", '{"q": "x"}')
