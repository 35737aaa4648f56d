"""`headrace why`: where a request leaves what another has cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.engine.folders import model_folder
from headrace.engine.tokenizer import Tokenizer
from headrace.types import CHUNK

pytestmark = pytest.mark.unit

SYSTEM = "The code of Lisbon is 4821. " * 20


def why(folder: Path, *bodies: Any, options: tuple[str, ...] = ("--json",)) -> Result:
    names = []
    for number, body in enumerate(bodies):
        path = folder / f"{number}.json"
        path.write_text(body if isinstance(body, str) else json.dumps(body))
        names.append(str(path))
    return CliRunner().invoke(app, ["why", *names, *options])


def chat(*contents: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return {"model": "tiny", "messages": messages}


def test_conversations(tmp_path: Path) -> None:
    found = json.loads(why(tmp_path, chat(SYSTEM, "Is it red?"), chat(SYSTEM, "Is it 9?")).stdout)
    assert (found["cause"], found["message"], found["request_id"]) == ("text", 1, "0.json")
    assert found["before"].rstrip().endswith("Is it")
    assert (found["text"].strip(), found["other_text"].strip()) == ("9", "red")
    assert found["cached_tokens"] == found["common_tokens"] // CHUNK * CHUNK > 0


def test_a_template_of_a_file(tmp_path: Path) -> None:
    """As a server has it that was started with it: here each message begins with a word of its own."""
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}begin {{ m.content }}{% endfor %}")
    options = ("--json", "--chat-template", str(file))
    found = json.loads(why(tmp_path, chat(SYSTEM, "red"), chat(SYSTEM, "9"), options=options).stdout)
    assert found["before"].endswith("begin") and found["text"].strip().startswith("9")


def test_short_prompts_are_told_alike_on_the_screen_and_as_json(tmp_path: Path) -> None:
    told = "they have no whole chunk of 64 tokens in common: at token"
    found = json.loads(why(tmp_path, chat("Is it red?"), chat("Is it 9?")).stdout)
    assert found["cause"] == "first" and found["told"].startswith(f"{told} {found['common_tokens']} ")
    assert (found["text"].strip(), found["other_text"].strip()) == ("9", "red")
    assert told in " ".join(why(tmp_path, chat("Is it red?"), chat("Is it 9?"), options=()).stdout.split())


def test_another_salt_and_another_model(tmp_path: Path) -> None:
    """Nothing is shared across salts, and an adapter answers by a name of its own."""
    one = chat(SYSTEM, "Is it red?")
    salted = json.loads(why(tmp_path, one, one | {"cache_salt": "mine"}).stdout)
    assert (salted["cause"], salted["cached_tokens"]) == ("salt", 0) and "another cache_salt" in salted["told"]
    assert json.loads(why(tmp_path, salt := one | {"cache_salt": "mine"}, salt).stdout)["cause"] == "continued"
    shown = " ".join(why(tmp_path, one, one | {"model": "lora"}, options=()).stdout.split())
    assert "'tiny' and 'lora': an adapter's cached prefixes are its own" in shown
    assert "an adapter's" not in why(tmp_path, one, one, options=()).stdout


def test_a_conversation_that_goes_on(tmp_path: Path) -> None:
    later = chat(SYSTEM, "Is it red?", "No.", "What then?")
    found = json.loads(why(tmp_path, chat(SYSTEM, "Is it red?"), later).stdout)
    assert found["cause"] == "continued" and found["message"] is None
    assert found["common_tokens"] == found["tokens"][0]


def test_plain_prompts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_folder("tiny"))
    one, other = ({"model": "tiny", "prompt": SYSTEM + end} for end in ("a", "b"))
    found = json.loads(why(tmp_path, one, other | {"prompt": tokenizer.encode(other["prompt"])}).stdout)
    assert found["tokens"] == [len(tokenizer.encode(each["prompt"])) for each in (one, other)]
    assert found["cause"] == "text"
    shown = " ".join(why(tmp_path, one, other, options=()).stdout.split())
    assert "differs from 0.json at token" in shown and "whole chunks of 64" in shown


@pytest.mark.parametrize("body", ["[]", "5", "{", '{"model": "tiny"}', '{"model": "tiny", "prompt": ["a", "b"]}'])
def test_what_is_no_request(tmp_path: Path, body: str) -> None:
    result = why(tmp_path, chat(SYSTEM), body)
    assert result.exit_code == 2 and "1.json" in result.stderr and "Traceback" not in result.stderr
    assert "iterable" not in result.stderr
