"""Published vocabularies, as GGUF files have them, cut texts as the published tokenizer.json does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from headrace.engine.gguf_tokenizer import BYTE, CONTROL, USER_DEFINED, load_tokenizer
from headrace.engine.tokenizer import Tokenizer as Loaded
from tools.published.files import GEMMA, TOKENIZERS, model, tokenizer
from tools.published.texts import texts

NORMAL, UNUSED = 1, 5
BYTES = re.compile("<0x[0-9A-F]{2}>")
WORDS = {
    "command_r_plus": "command-r", "deepseek_v3": "deepseek-v3", "gpt2": "gpt-2", "gptoss": "gpt-4o",
    "llama3_2": "llama-bpe", "mistral_nemo": "tekken", "qwen3": "qwen2",
}  # fmt: skip
"""Tokenizer -> what tokenizer.ggml.pre calls its way of cutting words."""

all_texts = cache(texts)


def write(path: Path, published: Tokenizer, words: str, kind: str = "gpt2") -> Path:
    """A GGUF file with the vocabulary, as llama.cpp's converter writes it."""
    by_id = {number: token for token, number in published.get_vocab().items()}
    added = published.get_added_tokens_decoder()
    size = max(by_id) + 1
    tokens = [added[i].content if i in added else by_id.get(i, f"[PAD{i}]") for i in range(size)]
    types = [
        (CONTROL if added[i].special else USER_DEFINED) if i in added else NORMAL if i in by_id else UNUSED
        for i in range(size)
    ]
    merges: Iterable[Any] = json.loads(published.to_str())["model"]["merges"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_tokenizer_pre(words)
    else:
        types = [NORMAL if kind == USER_DEFINED else kind for kind in types]
        types = [BYTE if BYTES.fullmatch(token) else kind for token, kind in zip(tokens, types, strict=True)]
        writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(ours: Any, published: Tokenizer, of: Iterable[str] | None = None) -> None:
    for text in all_texts() if of is None else of:
        tokens = published.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == tokens, text
        assert ours.decode(tokens) == published.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_byte_level(name: str, tmp_path: Path) -> None:
    assert set(WORDS) | {"gemma3"} == set(TOKENIZERS)
    published = Tokenizer.from_file(str(tokenizer(name)))
    same(load_tokenizer(write(tmp_path / "model.gguf", published, WORDS[name])), published)


@pytest.mark.parametrize("name", ["command_r_plus", "llama3_2"])
def test_a_folder_that_names_another_class(name: str, tmp_path: Path) -> None:
    """SmolLM2's does, whose words are like Command R's."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer(name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    same(Loaded(tmp_path)._hf, Tokenizer.from_file(str(tokenizer(name))))


def test_gemmas_merges(tmp_path: Path) -> None:
    """As files of Gemma 4 have them, which do not say what is a token of its own within a text, such as tags."""
    published = Tokenizer.from_file(str(tokenizer("gemma3")))
    added = [token.content for token in published.get_added_tokens_decoder().values()]
    apart = [token for token in added if token.strip("\n\u2581")]
    path = write(tmp_path / "model.gguf", published, "", "gemma4")
    same(load_tokenizer(path), published, [text for text in all_texts() if not any(token in text for token in apart)])


def test_gemmas_own_file() -> None:
    same(load_tokenizer(model(GEMMA)), Tokenizer.from_file(str(tokenizer("gemma3"))))
