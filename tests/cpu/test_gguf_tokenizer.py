"""A GGUF file's own tokenizer: the tokens and texts of the one it was made from, its template, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer
from transformers.tokenization_utils_base import generate_merges

from headrace.engine.gguf_words import WORDS
from headrace.engine.tokenizer import Tokenizer
from headrace.models.config import read_config
from headrace.types import InvalidRequest, UnsupportedModel
from tests.support import small_tokenizers
from tests.support.gguf_families import write_family
from tests.support.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, close
from tests.support.gguf_vocabulary import write_vocabulary as write
from tests.support.published_words import NORMAL_FORM, PUBLISHED, WHOLE
from tests.support.small_tokenizers import SPECIAL, TEMPLATE, save

pytestmark = pytest.mark.cpu

TEXTS = [
    "the quick brown fox", " the lazy  dog jumps", "naïve café 你好 👩‍👩‍👧", "12345 don't", "a\n\n b\t<tool>x", "",
    "hello<|user|>world", "a 12 345 6789 3.14", "x²y and м 999", "DON'T HTTPServer's we'Ve", "e\u0301 क्षि ที่",
    "!!! ?\r\n //x", "ΑΒΓ Ωm 5\u212a ՠԱ ǅx 日本語のテスト 한국어 𝐀b", "  hello\u2581<|assistant|> \n the",
    "1234567 ½6789 `+=`", "漢字kanaかな漢 ㄱㄴ 가나다！… ㄅㄆ don't漢S", "x/\n//\r\n a b  c\u0301 d",
]  # fmt: skip


def same_tokens(ours: Tokenizer, other: Tokenizer, chat: bool = False) -> None:
    """chat: a template is rendered too, by two processes."""
    for text in TEXTS:
        tokens = other.encode(text)
        assert ours.encode(text) == tokens, text
        assert ours.decode(tokens) == other.decode(tokens)
        assert [ours.token_bytes(token) for token in tokens] == [other.token_bytes(token) for token in tokens]
    assert ours.chat_template == other.chat_template
    if chat:
        messages = [{"role": "user", "content": "hello"}]
        assert ours.apply_chat(messages) == other.apply_chat(messages)
    assert ours.named_tokens == other.named_tokens
    assert ours.special_tokens - {"<unk>"} == other.special_tokens
    assert ours.eos_token_id == other.eos_token_id


@cache
def trained() -> Backend:
    """Merges across words too, so that every other way of cutting text shows in the tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, max_token_length=8, show_progress=False
    )
    backend.train_from_iterator([part for text in TEXTS for part in (text, text[1:], text[:-2])] * 3, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


@pytest.mark.parametrize("words", WORDS)
def test_byte_level(words: str, tmp_path: Path) -> None:
    spec = json.loads(trained().to_str())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PUBLISHED[words]}
    spec["normalizer"] = {"type": "NFC"} if words in NORMAL_FORM else None
    spec["model"]["ignore_merges"] = words in WHOLE
    backend = Backend.from_str(json.dumps(spec))

    def change(writer: GGUFWriter) -> None:
        writer.add_tokenizer_pre(words)
        writer.add_add_bos_token(True)

    path = write(tmp_path / "m.gguf", backend, "gpt2", change)
    same_tokens(Tokenizer(path), Tokenizer(save(backend, tmp_path / "theirs")))


@pytest.mark.parametrize(
    ("words", "theirs"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer)]
)
def test_as_transformers_own(words: str, theirs: Any, tmp_path: Path) -> None:
    """The classes that transformers has for families whose files name these words."""
    backend = trained()
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    own = theirs(vocab=backend.get_vocab(), merges=merges)
    path = write(tmp_path / "m.gguf", backend, "gpt2", lambda writer: writer.add_tokenizer_pre(words))
    ours = Tokenizer(path)
    for text in TEXTS:
        if "<" not in text:  # special tokens are each one's own
            assert ours.encode(text) == own.encode(text, add_special_tokens=False), text


def test_a_template_beside_the_file(tmp_path: Path) -> None:
    """Is that of a file without one, and what cannot be read is told."""
    beside = tmp_path / "chat_template.jinja"
    beside.write_text("{{ messages[0]['content'] }} é")
    path = write(tmp_path / "own.gguf", trained(), "gpt2", lambda writer: writer.add_tokenizer_pre("gpt-2"))
    assert Tokenizer(path).chat_template == TEMPLATE
    bare = write(tmp_path / "bare.gguf", trained(), "gpt2", without_template)
    assert Tokenizer(bare).chat_template == beside.read_text()
    beside.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer(bare)
    beside.unlink()
    assert not Tokenizer(bare).has_chat_template
    with pytest.raises(InvalidRequest, match=r"put it as chat_template\.jinja into the model's folder"):
        Tokenizer(bare).apply_chat([{"role": "user", "content": "hello"}])


def test_a_template_that_is_given(tmp_path: Path) -> None:
    """Takes the place of the model's own and of one beside it; reranking keeps its own."""
    given, beside = tmp_path / "given.txt", tmp_path / "chat_template.jinja"
    given.write_text("{{ messages[0]['content'] }} given é")
    beside.write_text("beside")
    path = write(tmp_path / "own.gguf", trained(), "gpt2", lambda writer: writer.add_tokenizer_pre("gpt-2"))
    bare = write(tmp_path / "bare.gguf", trained(), "gpt2", without_template)
    for each in (path, bare):
        ours = Tokenizer.load(each, given)
        assert ours is not None and ours.chat_template == given.read_text()
        assert ours.decode(ours.apply_chat([{"role": "user", "content": "hello"}])) == "hello given é"
        ours.close()
    given.write_bytes(b"\xff")
    (broken := tmp_path / "broken").write_text("{% for m in messages %}{{ m.content ")
    cannot = "chat_template: .* cannot be read"
    for wrong, told in (
        (given, cannot), (tmp_path, cannot), (tmp_path / "none", f"{cannot}: .*No such file"),
        (broken, "chat_template: .*broken is no template: unexpected end of template"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            Tokenizer.load(path, wrong)
    given.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}")
    assert Tokenizer.load(path, given) is not None


def without_template(writer: GGUFWriter) -> None:
    writer.add_tokenizer_pre("gpt-2")
    del writer.kv_data[0]["tokenizer.chat_template"]


def test_gemmas(tmp_path: Path) -> None:
    """Spaces that users have defined as tokens are written as spaces, and with a score that says nothing."""
    runs = ["\u2581" * count for count in range(2, 6)]
    defined = [*runs, "\n\n", "<table>"]
    pieces = [*"\u2581\nheloworda<tbe>", *defined, "he", "\u2581h", "\u2581he", "ll", "\u2581hell", "or", "wor"]
    start = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([*start, *pieces]))}
    scores = {piece: 0.0 if piece in defined else -float(number) for piece, number in vocab.items()}
    own = GemmaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores, skip_tokens=start))
    own.add_tokens([AddedToken(piece, normalized=False) for piece in defined])
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.replace("\u2581", " ") if piece in defined else piece for piece in vocab])
    writer.add_token_scores([-1000.0 if piece in defined else score for piece, score in scores.items()])
    kinds = dict.fromkeys(start[:5], CONTROL) | {"<unk>": UNKNOWN} | dict.fromkeys(defined, USER_DEFINED)
    writer.add_token_types([kinds.get(piece, BYTE if piece.startswith("<0x") else NORMAL) for piece in vocab])
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    close(writer)
    ours = Tokenizer(tmp_path / "m.gguf")
    for text in [*TEXTS, "hello   hell", "   hello\n\n    world", "a<table> he", "      hell\u2581\u2581 wor"]:
        tokens = own.encode(text, add_special_tokens=False)
        assert ours.encode(text) == [2, *tokens], text
        assert ours.decode(tokens) == own.decode(tokens)


def test_long_runs(tmp_path: Path) -> None:
    """InternLM2 has tokens of 128 spaces."""
    runs = ["\u2581" * (1 << power) for power in range(8)]
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "internlm2")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", *runs])
    writer.add_token_scores([0.0, *(-float(number) for number in range(8))])
    writer.add_token_types([UNKNOWN, *[NORMAL] * 8])
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    close(writer)
    tokenizer = Tokenizer(tmp_path / "m.gguf")
    assert tokenizer.encode(" " * 255) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert tokenizer.decode([8]) == " " * 128


def test_phi3s_special_tokens_take_spaces_in(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_fallback()
    added = [AddedToken(token, normalized=False, special=True, rstrip=token != "<s>") for token in SPECIAL]
    backend.add_special_tokens(added)
    path = write(tmp_path / "m.gguf", backend, "llama", architecture="phi3")
    same_tokens(Tokenizer(path), Tokenizer(save(backend, tmp_path / "theirs")))


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_sentencepiece(kind: str, tmp_path: Path) -> None:
    """With scores, or with merges, where a space before the text is to be asked for."""
    backend = small_tokenizers.byte_fallback()
    path = write(tmp_path / "m.gguf", backend, kind, lambda writer: writer.add_add_space_prefix(True))
    same_tokens(Tokenizer(path), Tokenizer(save(backend, tmp_path / "theirs")), chat=True)


def test_merges_in_their_order(tmp_path: Path) -> None:
    """Where scores say nothing, as in files of Gemma 4."""
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(["<unk>", "a", "b", "c", "ab", "bc"])
    writer.add_token_scores([-1000.0] * 6)
    writer.add_token_types([UNKNOWN, *[NORMAL] * 5])
    writer.add_token_merges(["b c", "a b"])
    writer.add_unk_token_id(0)
    close(writer)
    assert Tokenizer(tmp_path / "m.gguf").encode("abcab") == [1, 5, 4]


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
    ("tokens", "types", "ends"),
    [
        (["<eos>", "<end_of_turn>", "<|im_end|>", "a", "<|end|>"], [3, 3, 1, 1, 3], (0, 1, 4)),
        (["<|return|>", "<|end|>", "<|channel|>", "<|call|>"], [3, 3, 3, 3], (0, 3)),
    ],
    ids=["of a turn", "harmony"],
)
def test_what_ends_an_answer(tokens: list[str], types: list[int], ends: tuple[int, ...], tmp_path: Path) -> None:
    """Besides the tokens that the file names: special ones whose text says so, but for the end of a message within a
    gpt-oss's answer."""
    path = tmp_path / "m.gguf"

    def with_vocabulary(writer: GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_eos_token_id(0)

    write_family("granite", path, lambda _: GGMLQuantizationType.F16, with_vocabulary)
    assert read_config(path).eos_token_ids == ends


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
