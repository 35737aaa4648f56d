"""Earlier answers are read by their own tokens: a prompt begins with the earlier one's where its text does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from headrace.engine.folders import model_folder
from headrace.engine.tokenizer import Tokenizer
from headrace.server import answer_memory
from headrace.server.answer_memory import AnswerMemory
from headrace.server.answer_places import leads, places
from headrace.server.replay import Known, Replay, TokenTexts, fit, replay
from headrace.server.turn import Turn
from headrace.server.turns import rendered
from headrace.types import InvalidRequest
from tests.support.small_tokenizers import KINDS, metaspace, save

pytestmark = pytest.mark.unit

IN_PIECES = ("byte_level", "tiny")
"""Tokenizers that take a text in any pieces; of the others some do not."""


class Written:
    """A tokenizer with a template in Python. trim: it trims contents, as many do. forget: answers before the last
    question are cut short. end: of a turn."""

    chat_template = "tools"

    def __init__(self, tokenizer: Any, trim: bool = False, forget: bool = False) -> None:
        self.tokenizer, self.trim, self.forget = tokenizer, trim, forget
        self.end = tokenizer.named_tokens["eos_token"]
        self.plain = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.added_tokens.values()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def render_chat(self, messages: Any, add_generation_prompt: bool = True, **others: Any) -> str:
        assert not any("token_ids" in message for message in messages), "no template sees tokens"
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
        text = ""
        for number, message in enumerate(messages):
            content = message["content"].strip() if self.trim else message["content"]
            if self.forget and message["role"] == "assistant" and number < last:
                content = content[1:]
            text += f"<|{message['role']}|>{content}{self.end}"
        return text + ("<|assistant|>" if add_generation_prompt else "")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = {
        name: Tokenizer(save(make(), tmp_path_factory.mktemp(name))) for name, make in KINDS.items()
    }
    made["tiny"] = Tokenizer(model_folder("tiny"))
    yield made
    for each in made.values():
        each.close()


def read(tokenizer: Any, messages: list[dict[str, Any]]) -> Replay:
    found = rendered(tokenizer, Turn(messages))
    return replay(TokenTexts(tokenizer), found.text, found.carried)


WORDS = st.lists(st.sampled_from([*"helo wrd\n", "the ", "hello", " world", "<|assistant|>", "</s>", "é"]), max_size=8)
TEXTS = WORDS.map("".join)
NUMBERS = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=8)


def answer_of(tokenizer: Any, numbers: list[int], ended: bool) -> tuple[str, list[int]]:
    """An answer as a model may write it: any tokens whose text is whole, with the token that ends the turn."""
    texts = TokenTexts(tokenizer)
    tokens = [tokenizer.plain[number % len(tokenizer.plain)] for number in numbers]
    while tokens and "\ufffd" in texts.text(tokens):
        tokens.pop()
    return texts.text(tokens), tokens + ([tokenizer.eos_token_id] if ended else [])


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", [*KINDS, "tiny"])
def test_a_prompt_begins_with_the_earlier_one_and_its_answer(
    tokenizers: dict[str, Any], kind: str, data: st.DataObject
) -> None:
    tokenizer = Written(tokenizers[kind])
    messages = [{"role": "user", "content": data.draw(TEXTS)}]
    for _ in range(3):
        before = read(tokenizer, messages)
        said, tokens = answer_of(tokenizer, data.draw(NUMBERS), data.draw(st.booleans()))
        messages = [*messages, {"role": "assistant", "content": said, "token_ids": tokens}]
        messages += [{"role": "user", "content": data.draw(TEXTS)}]
        after, text = read(tokenizer, messages), rendered(tokenizer, Turn(messages)).text
        asked = len([each for each in messages if each.get("token_ids")])
        if kind in IN_PIECES:
            assert after.replayed == asked and after.rewritten == 0
        if after.replayed == asked:
            assert after.ids[: len(before.ids) + len(tokens)] == before.ids + tokens
        assert tokenizer.decode(after.ids, False) in (text, tokenizer.decode(tokenizer.encode_chat(text), False))


def test_the_tokenizers_do_read_such_answers_otherwise(tokenizers: dict[str, Any]) -> None:
    """Without their tokens: the property above says something."""
    tokenizer = Written(tokenizers["byte_level"])
    tokens = [tokenizer.encode_chat(letter)[0] for letter in "hello"]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}]
    plain = read(tokenizer, messages)
    own = read(tokenizer, [messages[0], {**messages[1], "token_ids": tokens}])
    assert (plain.replayed, own.replayed) == (0, 1) and len(own.ids) > len(plain.ids)
    assert tokenizer.decode(own.ids, False) == tokenizer.decode(plain.ids, False)


def test_an_answer_that_the_template_trims_is_read_up_to_there(tokenizers: dict[str, Any]) -> None:
    tokenizer = Written(tokenizers["byte_level"], trim=True)
    tokens = [tokenizer.encode_chat(letter)[0] for letter in "hello \n"]
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "hello \n"}]
    messages = [*messages[:1], {**messages[1], "token_ids": [*tokens, tokenizer.eos_token_id]}]
    before = read(tokenizer, messages[:1])
    found = read(tokenizer, [*messages, {"role": "user", "content": "b"}])
    assert found.replayed == 1 and found.ids[: len(before.ids) + 5] == before.ids + tokens[:5]


def test_a_template_that_rewrites_history_reads_what_it_wrote(tokenizers: dict[str, Any]) -> None:
    tokenizer = Written(tokenizers["byte_level"], forget=True)
    said, tokens = "hello", tokenizer.encode_chat("hello")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said, "token_ids": tokens}]
    assert read(tokenizer, messages).replayed == 1
    later = [*messages, {"role": "user", "content": "b"}]
    found = read(tokenizer, later)
    assert (found.replayed, found.rewritten) == (0, 1)
    assert found.ids == tokenizer.encode_chat(rendered(tokenizer, Turn(later)).text)


def test_places_of_answers_between_others() -> None:
    """Answers without tokens count, too: the second 'hi' is another one than the first."""
    messages = [{"role": role, "content": text} for role, text in zip("uaua", ("hi", "x", "hi", "x"), strict=True)]
    messages = [{**each, "role": {"u": "user", "a": "assistant"}[each["role"]]} for each in messages]

    def render(some: Any) -> str:
        return "".join(f"<{each['role']}>{each['content']}" for each in some) + "<assistant>"

    lead_of = leads(messages, render)
    assert lead_of == {"user": "<assistant>"}
    text = render(messages)
    assert places(text, messages, lead_of) == {1: text.index("x"), 3: text.rindex("x")}

    def refuses(some: Any) -> str:
        raise InvalidRequest("no", "messages")

    assert leads(messages, refuses) == {} == places(text, messages, {})


def test_what_stands_at_the_place_must_be_the_answer(tokenizers: dict[str, Any]) -> None:
    texts = TokenTexts(tokenizers["byte_level"])
    tokens, end = tokenizers["byte_level"].encode_chat("hello"), tokenizers["byte_level"].eos_token_id
    assert fit(texts, "say hello</s>", 4, [*tokens, end]) == (4, 13, [*tokens, end])
    assert fit(texts, "say hello<|end|>", 4, [*tokens, end]) == (4, 9, tokens)
    assert fit(texts, "say hell", 4, tokens) is None and fit(texts, "say hello", 3, tokens) is None
    assert fit(texts, "", 0, []) is None and fit(texts, "x", 0, [end]) is None


def test_memory_belongs_to_its_owner() -> None:
    memory = AnswerMemory()
    memory.add(("a", None), "<u>é<a>", [1, 2])
    memory.add(("a", None), "<u>é<a>", [3])
    memory.add(("a", None), "<u>é<a>", [1, 2])
    memory.add(("a", None), "<u>é<a>x<u>y<a>", [4])
    assert memory.find(("a", None), "<u>é<a>z") == [Known(7, [1, 2]), Known(7, [3])]
    assert [each.tokens for each in memory.find(("a", None), "<u>é<a>x<u>y<a>")] == [[1, 2], [3], [4]]
    assert memory.find(("a", "salt"), "<u>é<a>z") == [] == memory.find(("b", None), "<u>é<a>z")
    assert memory.find(("a", None), "<u>e<a>z") == [] and (len(memory), memory.tokens) == (2, 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 12)), max_size=60))
def test_memory_is_bounded(asked: list[tuple[int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MOST_ANSWERS": 3, "MOST_OWN_TOKENS": 20, "MOST_OWNERS": 3, "MOST_TOKENS": 40}.items():
            patch.setattr(answer_memory, name, value)
        memory = AnswerMemory()
        for owner, text, count in asked:
            memory.add((str(owner), None), str(text), [text] * count)
            owners = memory._owners.values()
            held = [sum(map(len, alike)) for own in owners for alike in own.answers.values()]
            assert memory.tokens == sum(held) == sum(own.tokens for own in owners) <= 40
            assert len(owners) <= 3 and all(len(own.answers) <= 3 and own.tokens <= 20 for own in owners)
            if count:
                assert memory.find((str(owner), None), f"{text}!")[0].tokens == [text] * count


def test_the_template_of_tiny(tokenizers: dict[str, Any]) -> None:
    """A real one, in its own process."""
    tokenizer = tokenizers["tiny"]
    tokens = [token for letter in "The code." for token in tokenizer.encode_chat(letter)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What?"}]
    before = read(tokenizer, messages)
    messages += [{"role": "assistant", "content": "The code.", "token_ids": [*tokens, tokenizer.eos_token_id]}]
    after = read(tokenizer, [*messages, {"role": "user", "content": "Why?"}])
    assert after.replayed == 1
    assert after.ids[: len(before.ids) + len(tokens) + 1] == [*before.ids, *tokens, tokenizer.eos_token_id]


def test_text_behind_an_answer_begins_without_a_space(tmp_path: Path) -> None:
    """Tokenizers of the sentencepiece kind put one before a text."""
    backend = metaspace()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    with closing(Tokenizer(save(backend, tmp_path))) as tokenizer:
        texts, rendered = TokenTexts(tokenizer), "<|assistant|>hello</s>the fox"
        letters = [token for letter in "hello" for token in tokenizer.encode_chat("</s>" + letter)[1:]]
        own = [*letters, tokenizer.eos_token_id]
        found = replay(texts, rendered, [Known(len("<|assistant|>"), own)])
        assert found.replayed == 1 and tokenizer.decode(found.ids, False) == rendered
        assert found.ids[: 1 + len(own)] == [tokenizer.added_tokens["<|assistant|>"], *own]
