"""A GGUF file's own tokenizer: the tokens and texts of the one it was made from, its template, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.engine.gguf_tokenizer import WORDS
from headrace.engine.tokenizer import Tokenizer
from headrace.types import UnsupportedModel
from tests.support import small_tokenizers
from tests.support.small_tokenizers import SPECIAL, TEMPLATE, save

pytestmark = pytest.mark.cpu

TEXTS = [
    "the quick brown fox", " the lazy  dog jumps", "naïve café 你好 👩‍👩‍👧", "12345 don't", "a\n\n b\t<tool>x", "",
    "hello<|user|>world",
]  # fmt: skip
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path: Path, backend: Backend, kind: str, change: Callable[[GGUFWriter], object] = lambda _: None) -> Path:
    """A file with the vocabulary of a tokenizer alone."""
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    added = {
        token.content: CONTROL if token.special else USER_DEFINED
        for token in backend.get_added_tokens_decoder().values()
    }
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    types = [added.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]
    writer.add_token_types([UNKNOWN if token == "<unk>" else each for token, each in zip(tokens, types, strict=True)])
    if kind == "gpt2":
        writer.add_token_merges(merges)
    else:  # a token's score says how early it is made
        scores = {"".join(merge.split(" ")): -float(rank) for rank, merge in enumerate(merges)}
        writer.add_token_scores([scores.get(token, -1000.0) for token in tokens])
        writer.add_unk_token_id(vocabulary["<unk>"])
    writer.add_bos_token_id(vocabulary["<s>"])
    writer.add_eos_token_id(vocabulary["</s>"])
    writer.add_chat_template(TEMPLATE)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same_tokens(ours: Tokenizer, other: Tokenizer) -> None:
    for text in TEXTS:
        tokens = other.encode(text)
        assert ours.encode(text) == tokens, text
        assert ours.decode(tokens) == other.decode(tokens)
        assert [ours.token_bytes(token) for token in tokens] == [other.token_bytes(token) for token in tokens]
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat(messages) == other.apply_chat(messages)
    assert ours.named_tokens == other.named_tokens
    assert ours.special_tokens - {"<unk>"} == other.special_tokens
    assert ours.eos_token_id == other.eos_token_id


@pytest.mark.parametrize("words", WORDS)
def test_byte_level(words: str, tmp_path: Path) -> None:
    backend = small_tokenizers.byte_level()
    cut = pre_tokenizers.Split(Regex(WORDS[words]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )

    def change(writer: GGUFWriter) -> None:
        writer.add_tokenizer_pre(words)
        writer.add_add_bos_token(True)

    path = write(tmp_path / "m.gguf", backend, "gpt2", change)
    same_tokens(Tokenizer(path), Tokenizer(save(backend, tmp_path / "theirs")))


def test_sentencepiece(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_fallback()
    path = write(tmp_path / "m.gguf", backend, "llama")
    same_tokens(Tokenizer(path), Tokenizer(save(backend, tmp_path / "theirs")))


def test_gpt2s_words_are_those_of_the_library(tmp_path: Path) -> None:
    """The words that ByteLevel cuts by itself."""
    backend = small_tokenizers.byte_level()
    path = write(tmp_path / "m.gguf", backend, "gpt2", lambda writer: writer.add_tokenizer_pre("gpt-2"))
    same_tokens(Tokenizer(path), Tokenizer(save(backend, tmp_path / "theirs", add_bos=False)))


def test_a_tokenizer_beside_the_file_goes_first(tmp_path: Path) -> None:
    save(small_tokenizers.byte_fallback(), tmp_path)
    path = write(tmp_path / "m.gguf", small_tokenizers.byte_level(), "gpt2", lambda w: w.add_tokenizer_pre("gpt-2"))
    same_tokens(Tokenizer(path), Tokenizer(tmp_path))


def test_ends_of_a_text(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", small_tokenizers.byte_fallback(), "llama", lambda w: w.add_add_eos_token(True))
    tokens = Tokenizer(path).encode("the")
    assert tokens[0] == 1 + SPECIAL.index("<s>") and tokens[-1] == 1 + SPECIAL.index("</s>")
    path = write(tmp_path / "n.gguf", small_tokenizers.byte_fallback(), "llama", lambda w: w.add_add_bos_token(False))
    assert Tokenizer(path).encode("the")[0] != 1 + SPECIAL.index("<s>")


@pytest.mark.parametrize("tokens", [[], ["a", "b"]])
def test_a_file_without_a_vocabulary(tokens: list[str], tmp_path: Path) -> None:
    """llama.cpp calls that no_vocab, even where tokens are named."""
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    if tokens:
        writer.add_tokenizer_model("no_vocab")
        writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert Tokenizer.load(tmp_path / "m.gguf") is None


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "gpt2",
            lambda w: w.add_tokenizer_pre("chameleon"),
            r"tokenizer\.ggml\.pre chameleon is not known; known: gpt-2",
        ),
        ("bert", lambda w: None, "tokenizer bert is not read from GGUF"),
    ],
)
def test_what_is_not_read_is_named(kind: str, change: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", small_tokenizers.byte_level(), "gpt2", change)
    length = struct.pack("<Q", 4)
    path.write_bytes(path.read_bytes().replace(length + b"gpt2", length + kind.encode()))
    with pytest.raises(UnsupportedModel, match=words):
        Tokenizer(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens: [*tokens[:-1], tokens[0]], "tokens twice"),
        (lambda tokens: tokens[5:], "cannot load the tokenizer"),
    ],
)
def test_a_vocabulary_that_is_not_sound(change: Callable[[list[str]], list[str]], words: str, tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(change(["a", "b", "ab", "c", "d", "e"]))
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=words):
        Tokenizer(tmp_path / "m.gguf")
