"""Tokenizers of GGUF files whose metadata are damaged: refused by file and key, once each, and never passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

from headrace.engine.tokenizer import Tokenizer, has_tokenizer
from tests.support import small_tokenizers
from tests.support.gguf_vocabulary import write_vocabulary as write

pytestmark = pytest.mark.cpu

NONE = (1 << 32) - 1


def replaced(key: str, add: Callable[[GGUFWriter], object] = lambda _: None) -> Callable[[GGUFWriter], None]:
    def change(writer: GGUFWriter) -> None:
        writer.add_tokenizer_pre("gpt-2")
        writer.kv_data[0].pop(key, None)
        add(writer)

    return change


MERGES, BOS, EOS, BEGIN, SCORES = (
    f"tokenizer.ggml.{name}" for name in ("merges", "bos_token_id", "eos_token_id", "add_bos_token", "scores")
)
TEMPLATE, MODEL, WORDS = "tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"
CASES: dict[str, tuple[Callable[[GGUFWriter], None], str]] = {
    "no merges": (replaced(MERGES), "merges has none"),
    "a merge of one": (replaced(MERGES, lambda w: w.add_token_merges(["t h", "abc"])), "merges has 'abc', two tokens"),
    "a merge of three": (replaced(MERGES, lambda w: w.add_token_merges(["a b c"])), "merges has 'a b c', two tokens"),
    "a start by a number": (
        replaced("", lambda w: w.add_uint32(BEGIN, 1)),
        "neither true nor",
    ),
    "a start by a text": (
        replaced("", lambda w: w.add_string(BEGIN, "x")),
        "neither true nor",
    ),
    "a start that is no token": (replaced(BOS, lambda w: w.add_bos_token_id(9999)), "bos_token_id is 9999"),
    "a start that is a text": (replaced(BOS, lambda w: w.add_string(BOS, "0")), "bos_token_id is '0'"),
    "ends": (replaced(EOS, lambda w: w.add_array(EOS, [1])), "eos_token_id is array"),
    "a template that is a number": (
        replaced(TEMPLATE, lambda w: w.add_uint32(TEMPLATE, 1)),
        "template is no text",
    ),
    "a kind of two": (replaced(MODEL, lambda w: w.add_array(MODEL, [1, 2])), "model is no text"),
    "words of two": (replaced(WORDS, lambda w: w.add_array(WORDS, [1, 2])), "pre is no text"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, tmp_path: Path) -> None:
    change, words = CASES[case]
    path = write(tmp_path / "m.gguf", small_tokenizers.byte_level(), "gpt2", change)
    assert has_tokenizer(path)
    with pytest.raises(ValueError, match=f"cannot load the tokenizer: .*{words}") as refused:
        Tokenizer(path)
    told = str(refused.value)
    assert told.count(str(path)) == 1 and "check its files" not in told and told.count("; ") == 1


def test_merges_of_gemma(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_fallback()
    path = write(tmp_path / "m.gguf", backend, "gemma4", lambda w: w.kv_data[0].pop(MERGES))
    with pytest.raises(ValueError, match=r"m\.gguf: tokenizer\.ggml\.merges has none"):
        Tokenizer(path)


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda w: None, "scores is missing, which orders its merges; put the model's tokenizer"),
        (lambda w: w.add_array(SCORES, [0.5]), "scores does not have one for each token"),
    ],
)
def test_scores_of_sentencepiece(add: Callable[[GGUFWriter], None], words: str, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(SCORES)
        add(writer)

    path = write(tmp_path / "m.gguf", small_tokenizers.byte_fallback(), "llama", change)
    with pytest.raises(ValueError, match=rf"m\.gguf: tokenizer\.ggml\.{words}"):
        Tokenizer(path)


@pytest.mark.parametrize("number", [-1, NONE])
def test_no_token(number: int, tmp_path: Path) -> None:
    """Published files say so that there is none."""
    add = (lambda w: w.add_int32(BOS, number)) if number < 0 else (lambda w: w.add_uint32(BOS, number))
    path = write(tmp_path / "m.gguf", small_tokenizers.byte_level(), "gpt2", replaced(BOS, add))
    assert not Tokenizer(path).named_tokens.get("bos_token")


def test_nothing_is_filled_up(tmp_path: Path) -> None:
    """So a token for it need not exist."""
    change = replaced("", lambda w: w.add_pad_token_id(9999))
    path = write(tmp_path / "m.gguf", small_tokenizers.byte_level(), "gpt2", change)
    assert not Tokenizer(path).named_tokens.get("pad_token")
