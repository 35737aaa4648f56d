"""Kimi's tokenizer as it is published: the tokens that tiktoken's own rule gives, and what is refused."""

from __future__ import annotations

import base64
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from headrace.engine.pieces import spelled
from headrace.engine.tokenizer import Tokenizer, has_tokenizer
from headrace.types import UnsupportedModel
from tests.support.published_words import PUBLISHED
from tests.support.small_tokenizers import TEMPLATE

pytestmark = pytest.mark.cpu

TEXTS = [
    "the quick brown fox", " the lazy  dog jumps", "naïve café 你好世界 👩‍👩‍👧", "12345 don't DON'T", "a\n\n b\tx", "",
    "漢字kanaかな漢 don't漢S", "x²y and м 999", "HTTPServer's we'Ve", "!!! ?\r\n //x", "zha zzqx",
    "hello<|im_end|>world[BOS]",
]  # fmt: skip
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 5: "<|user|>"}
"""By their place behind the other tokens."""


@cache
def ranks() -> dict[bytes, int]:
    """Of bytes first, then of what a training merges, and two that merge to a lower rank than one of them has."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=600, max_token_length=8, show_progress=False)
    backend.train_from_iterator([part for text in TEXTS for part in (text, text[1:], text[:-2])] * 3, trainer)
    letters = {spelled(bytes([byte])): byte for byte in range(256)}
    merged = ["".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [
        b"zqx",
        b"zq",
        b"qx",
        b"zh",
        b"ha",
        *(bytes(letters[char] for char in token) for token in dict.fromkeys(merged)),
    ]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def published(folder: Path, **said: Any) -> Path:
    """A folder as Kimi's are."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    added = {str(len(ranks()) + place): {"content": name, "special": True} for place, name in SPECIAL.items()}
    given = dict(
        tokenizer_class="TikTokenTokenizer", bos_token="[BOS]", eos_token="[EOS]", chat_template=TEMPLATE,
        added_tokens_decoder=added, auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(given | said))
    return folder


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(published(tmp_path_factory.mktemp("kimi")))


def expected(text: str) -> list[int]:
    """tiktoken's rule: of a word the two neighbours that make the lowest rank become one, the first of equal ones."""
    split = pre_tokenizers.Split(**_pattern())
    found: list[int] = []
    for word, _ in split.pre_tokenize_str(text) if text else ():
        parts = [bytes([byte]) for byte in word.encode()]
        if word.encode() in ranks():
            parts = [word.encode()]
        while len(parts) > 1:
            made = [ranks().get(left + right, 1 << 30) for left, right in pairwise(parts)]
            if min(made) == 1 << 30:
                break
            at = made.index(min(made))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [ranks()[part] for part in parts]
    return found


def _pattern() -> dict[str, Any]:
    from tokenizers import Regex

    step = PUBLISHED["kimi-k2"][0]
    return dict(pattern=Regex(step["pattern"]["Regex"]), behavior="isolated")


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_tokens_are_tiktokens(text: str, kimi: Tokenizer) -> None:
    assert kimi.encode(text) == expected(text)
    assert kimi.decode(kimi.encode(text)) == text


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet="aehtzqx oñ漢字12'SDd\n!👧", max_size=30))
def test_tokens_of_any_text_are_tiktokens(text: str, kimi: Tokenizer) -> None:
    assert kimi.encode(text) == expected(text)
    assert kimi.decode(kimi.encode(text)) == text


def test_special_tokens_and_the_template(kimi: Tokenizer, tmp_path: Path) -> None:
    """Those that the configuration names, and reserved ones, 256 in all; a template of its own file goes first."""
    first = len(ranks())
    assert kimi.encode("the<|im_end|>the") == [*expected("the"), first + 2, *expected("the")]
    assert kimi.encode(f"<|reserved_token_{first + 255}|>") == [first + 255]
    assert kimi.eos_token_id == first + 1 and set(SPECIAL.values()) <= set(kimi.special_tokens)
    assert kimi.chat_template == TEMPLATE
    folder = published(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer(folder).chat_template == "{{ messages[0].content }}"


def test_a_tokenizer_json_goes_first(tmp_path: Path) -> None:
    folder = published(tmp_path, tokenizer_class="PreTrainedTokenizerFast", auto_map={})
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).encode("ab") == [0, 1]


@pytest.mark.parametrize(
    "lines",
    ["", "YQ==", "YQ== x", "Y?== 0", "YQ== 1", "YQ== 0\nYg== 0", "YQ== 0 1", "\x00\n", "YQ== 0\nYQ== 1"],
)
def test_a_damaged_file_is_told(lines: str, tmp_path: Path) -> None:
    folder = published(tmp_path)
    (folder / "tiktoken.model").write_text(lines)
    with pytest.raises(ValueError, match=r"tiktoken.model is damaged; download it again"):
        Tokenizer(folder)


def test_others_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path, tokenizer_class="OwnTokenizer")
    assert has_tokenizer(folder)
    with pytest.raises(UnsupportedModel, match=r"put this one's tokenizer.json beside it"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config.json does not exist"):
        Tokenizer(folder)
