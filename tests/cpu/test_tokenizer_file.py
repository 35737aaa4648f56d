"""Tokenizers of folders cut text as their tokenizer.json says, whatever class tokenizer_config.json names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headrace.engine.tokenizer import Tokenizer
from tests.support.small_tokenizers import CORPUS, byte_fallback, byte_level, save

pytestmark = pytest.mark.cpu

TEXTS = (*CORPUS[:2], "  the", " ", "a1234b", "the\n\n1. hello", "e\u0301", "don't", "</s> the <tool> fox", "")


def digits_apart() -> Backend:
    """As SmolLM2's."""
    made = byte_level()
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    return made


def whole_words() -> Backend:
    """As Llama 3's: words by an expression of its own, and those that are tokens whole, though no merges make them."""
    said = json.loads(byte_level().to_str())
    said["model"]["ignore_merges"] = True
    said["model"]["vocab"]["the\u0120quick"] = 1000
    made = Backend.from_str(json.dumps(said))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"the quick|\p{N}{1,3}|[^\p{N}]"), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ])  # fmt: skip
    return made


def without_prefix() -> Backend:
    """As Yi's: a text begins as it is."""
    made = byte_fallback(strip=False)
    made.normalizer = normalizers.Replace(" ", "\u2581")
    return made


def saved(made: Backend, folder: Path, model: str, kind: str, **more: Any) -> Path:
    save(made, folder, add_bos=False)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind} | more))
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    return folder


@pytest.mark.parametrize(
    ("make", "model", "kind"),
    [
        (digits_apart, "llama", "GPT2Tokenizer"),
        (digits_apart, "qwen2_moe", "Qwen2Tokenizer"),
        (whole_words, "exaone4", "GPT2TokenizerFast"),
        (without_prefix, "llama", "LlamaTokenizer"),
        (byte_fallback, "llama", "LlamaTokenizerFast"),
    ],
)
def test_the_file_rules(make: Callable[[], Backend], model: str, kind: str, tmp_path: Path) -> None:
    ours = Tokenizer(saved(make(), tmp_path, model, kind))
    published = Backend.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        tokens = published.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == tokens, text
        assert ours.decode(tokens, skip_special_tokens=False) == published.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_a_beginning_that_the_configuration_asks_for(kind: str, begins: bool, said: bool, tmp_path: Path) -> None:
    """said: tokenizer.json has it too. DeepSeek-V3's has not."""
    made = byte_level()
    ids = made.get_vocab()
    template = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", ids["<s>"])])
    made.post_processor = template if said else processors.ByteLevel(trim_offsets=False)
    ours = Tokenizer(saved(made, tmp_path, "deepseek_v3", kind, add_bos_token=begins))
    tokens = ours.encode("the fox", add_special_tokens=False)
    assert ours.encode("the fox") == ([ids["<s>"], *tokens] if said or begins else tokens)


def test_other_kinds_are_left_as_they_are(tmp_path: Path) -> None:
    """A vocabulary of whole words has no merges to cut by."""
    made = Backend(models.WordLevel({"[UNK]": 0, "the": 1, "<s>": 2, "</s>": 3}, "[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    ours = Tokenizer(saved(made, tmp_path, "llama", "TokenizersBackend"))
    assert ours.encode("the the", add_special_tokens=False) == [1, 1]
