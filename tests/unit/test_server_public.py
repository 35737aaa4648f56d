"""--public-prefix-file: what requests of all salts share, and that no client's tokens are ever among it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.public import common, prefixes_of, read_texts
from headrace.types import InvalidRequest
from tests.support.fake_engine import FakeTokenizer
from tests.support.fake_server import CHAT, TEXT, ask, serving, text

pytestmark = pytest.mark.unit

SYSTEM = "You are the help desk of Lisbon. " * 10
"""330 bytes, which are tokens of the fake: 5 chunks and 10 tokens."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "system.txt"
    path.write_text(SYSTEM)
    return str(path)


def shared(file: str, route: str, **body: Any) -> list[tuple[str | None, int]]:
    """(salt, public tokens) as the engine is given them."""
    with serving(public_prefix_file=file) as running:
        assert running.http.post(route, json=body).status_code == 200
        return running.engine.salts


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ["system", *["user"] * len(contents)]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_a_prompt_that_begins_with_the_file_shares_its_whole_chunks(file: str) -> None:
    assert shared(file, CHAT, **ask(messages=chat(SYSTEM, "hi"), cache_salt="a")) == [("a", 320)]
    assert shared(file, TEXT, **text([SYSTEM + "hi", SYSTEM[:200], "other"], cache_salt="a")) == [
        ("a", 320), ("a", 192), ("a", 0),
    ]  # fmt: skip


def test_what_a_request_says_itself_counts_where_it_is_more(file: str) -> None:
    body = text(SYSTEM + "x" * 100, cache_salt="a", public_prefix_tokens=400)
    assert shared(file, TEXT, **body) == [("a", 400)]
    assert shared(file, TEXT, **{**body, "public_prefix_tokens": 1}) == [("a", 320)]


def test_without_a_salt_nothing_changes(file: str) -> None:
    assert shared(file, TEXT, **text(SYSTEM)) == [(None, 0)]


def test_several_files_share_the_longest(file: str, tmp_path: Path) -> None:
    longer = tmp_path / "longer.txt"
    longer.write_text(SYSTEM + "And of Porto. " * 20)
    both = os.pathsep.join([file, str(longer)])
    assert shared(both, TEXT, **text(longer.read_text() + "hi", cache_salt="a")) == [("a", 576)]


def test_the_words_of_the_user_are_never_public() -> None:
    """Not even if they begin as those that the file was rendered with."""
    public = prefixes_of({"f": "x" * 63}, FakeTokenizer())
    tokens = FakeTokenizer().encode_chat(FakeTokenizer().render_chat(chat("x" * 63, "0" * 200)))
    assert public.tokens(tokens) == 64, "the newline after the system prompt is the template's"
    assert public.tokens(tokens[:63]) == 0


class Refusing(FakeTokenizer):
    def render_chat(self, *_: Any, **__: Any) -> str:
        raise InvalidRequest("no system prompts here", "messages")


def test_a_template_that_takes_no_system_prompt() -> None:
    assert prefixes_of({"f": "abc"}, Refusing()).lines == ["f: 3 tokens"]
    assert prefixes_of({"f": "abc"}, FakeTokenizer()).lines == ["f: 3 tokens, 4 as a system prompt"]


def test_files_that_cannot_be_used(file: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xff")
    for name, why in (("none", "No such file"), ("empty", "is empty"), ("bytes", "not UTF-8"), (".", "regular file")):
        with pytest.raises(ValueError, match=f"public_prefix_file.*{why}"):
            read_texts(str(tmp_path / name))
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfA text")  # as some editors begin UTF-8: no prompt begins so
    assert list(read_texts(str(tmp_path / "marked")).values()) == ["A text"]
    with pytest.raises(ValueError, match="has none"):
        prefixes_of(read_texts(file), None)
    assert read_texts(None) == {} and prefixes_of({}, None).tokens([1] * 100) == 0


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common(one: list[int], other: list[int]) -> None:
    pairs = list(zip(one, other, strict=False))
    assert common(one, other) == next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
