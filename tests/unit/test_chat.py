"""`headrace chat` without an engine: commands, turns of several lines, saved conversations, ctrl-c at the prompt."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli.chat import Chat
from headrace.cli.conversation import Conversation
from headrace.stats import EngineStats, KVStats
from headrace.types import Delta, InvalidRequest, Metrics, SamplingParams

HELP = """\
/help           show this
/stats          turns, tokens, share from the cache, KV cache in use, speed
/system [TEXT]  show the system prompt, or set it (- removes it) and begin anew
/save FILE      write the conversation to a new file, .md or .json
/save! FILE     the same, in place of a file that is there
/reset          forget the conversation, keep the system prompt
/exit, /quit    leave, as ctrl-d does
ctrl-c          stop an answer; its turn is forgotten
... \\           a backslash at the end of a line: the turn goes on in the next
//...           a turn that begins with a slash
"""


class EchoingModel:
    """Answers each turn with the number of its messages and its last text."""

    def __init__(self) -> None:
        self.tokenizer = self
        self.stats = EngineStats(kv=KVStats(chunks_total=100, chunks_used=3, chunks_cached=2))
        self.capacity = SimpleNamespace(kv_cache_tokens=6400)

    def apply_chat(self, messages: list[dict[str, str]]) -> str:
        return f"{len(messages)} {messages[-1]['content']}"

    async def generate(self, prompt: str, params: SamplingParams) -> AsyncIterator[Delta]:
        if "too long" in prompt:
            raise InvalidRequest("the prompt is too long", "prompt")
        if "stop me" in prompt:
            raise KeyboardInterrupt
        yield Delta("r", 0, prompt, [1, 2])
        metrics = Metrics(0.25, 2.25, prompt_tokens=1000, cached_tokens=896, output_tokens=21)
        yield Delta("r", 0, "!", [3], finish_reason="stop", metrics=metrics)


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat() -> Iterator[Chat]:
    with asyncio.Runner() as runner:
        model = EchoingModel()
        ask = partial(model.generate, params=SamplingParams())
        yield Chat(runner, model, ask, Conversation("tiny", "Be brief."), quiet=True)


@pytest.fixture
def piped(chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """piped(text): what chat says on stdout and stderr to these lines."""

    def talk(text: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        chat.talk()
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    return talk


@pytest.fixture
def typed(chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """typed(line, ...): likewise on a terminal; an exception among the lines is raised in their place."""

    def talk(*lines: str | type[BaseException]) -> tuple[str, str]:
        left = iter(lines)

        def read(sign: str = "") -> str:
            line = next(left, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("sys.stdin", Keyboard())
        monkeypatch.setattr("builtins.input", read)
        chat.talk()
        assert next(left, None) is None, "left too early"
        out, told = capsys.readouterr()
        return out, told.replace("> ", "")  # stdout is no terminal here, so that the sign is on stderr

    return talk


def test_help_lists_all_there_is(piped: Any) -> None:
    assert piped("/help\n") == ("", HELP)
    assert max(map(len, HELP.splitlines())) < 80


def test_stats(piped: Any) -> None:
    nothing = "turns: 0\nKV cache: 320 of 6,400 tokens in use (5%)\n"
    assert piped("/stats\n")[1] == nothing
    told = piped("hi\nhi\n/reset\nhi\n/stats\n")[1]
    assert told == (
        "a new conversation begins, with the same system prompt\n"
        "turns: 1 (3 with earlier conversations)\n"
        "prompts: 3,000 tokens, 2,688 of them from the cache (90%)\n"
        "answers: 63 tokens\n"
        "last answer: 21 tokens at 10.0 tokens/s, the first after 0.250 s\n"
        "KV cache: 320 of 6,400 tokens in use (5%)\n"
    )


def test_system_prompt_is_shown_set_and_removed(piped: Any, chat: Chat) -> None:
    out, told = piped("hi\n/system\n/system Be\\\nlong.\nhi\n/system -\n/system\nhi\n")
    assert told.splitlines() == [
        "system prompt: Be brief.",
        "system prompt set; a new conversation begins",
        "system prompt removed; a new conversation begins",
        "no system prompt; /system TEXT sets one",
    ]
    assert out == "2 hi!\n2 hi!\n1 hi!\n"
    assert [message["role"] for message in chat.conversation.messages] == ["user", "assistant"]


def test_turns_of_several_lines_and_slashes(piped: Any) -> None:
    assert piped("one\\\ntwo\n\n//etc\nlast\\")[0] == "2 one\ntwo!\n4 /etc!\n6 last!\n"


def test_exit_leaves(piped: Any) -> None:
    for leave in ("/exit", "/quit"):
        assert piped(f"hi\n{leave}\nnever asked\n")[0].count("hi!") == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/stat", "no command /stat; did you mean /stats? /help lists them; to send a line that begins with a slash, "
                  "begin it with two"),
        ("/xyzzy", "no command /xyzzy; /help lists them; to send a line that begins with a slash, begin it with two"),
        ("/save", "/save needs a file, ending in .md or .json"),
        ("/save chat.txt", "chat.txt: the name must end in .md or .json"),
        ("/save /no/such/folder/x.md", "cannot write /no/such/folder/x.md: No such file or directory"),
        ("this is too long", "the prompt is too long"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_on_a_terminal_and_ends_the_command_on_a_pipe(
    line: str, told: str, piped: Any, typed: Any
) -> None:
    out, shown = typed(line, "hi")
    assert shown.strip().splitlines()[1:] == [f"headrace: {told}"] and out.strip() == "2 hi!"
    with pytest.raises(ValueError) as error:
        piped(line + "\nhi\n")
    assert str(error.value) == told


def test_saved_conversations(piped: Any, tmp_path: Path) -> None:
    markdown, body = tmp_path / "chat.md", tmp_path / "chat.json"
    told = piped(f"hi\n/save {markdown}\n/save {body}\n")[1]
    assert told == f"3 messages written to {markdown}\n3 messages written to {body}\n"
    assert markdown.read_text() == (
        "# Chat with tiny\n\n## System\n\nBe brief.\n\n## User\n\nhi\n\n## Assistant\n\n2 hi!\n"
    )
    assert json.loads(body.read_text()) == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "2 hi!"},
        ],
    }


def test_a_file_is_replaced_only_when_asked(piped: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.md exists: /save! .*notes\.md replaces it"):
        piped(f"/save {file}\n")
    assert file.read_text() == "mine"
    piped(f"/save! {file}\n")
    assert file.read_text().startswith("# Chat with tiny")


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(typed: Any, chat: Chat) -> None:
    out, told = typed("hi", "stop me", "hi")
    assert out == "2 hi!\n\n4 hi!\n" and "stopped; this turn is not kept" in told
    assert chat.conversation.turns == 2


def test_ctrl_c_at_the_prompt_leaves_only_the_second_time(typed: Any) -> None:
    out, told = typed(KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt)
    assert out == "2 hi!\n" and told.count("ctrl-c again, ctrl-d or /exit leaves") == 2
