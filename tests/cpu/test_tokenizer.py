"""The tokenizer, on small tokenizers of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from headrace.engine import tokenizer
from headrace.engine.tokenizer import Tokenizer
from headrace.types import InvalidRequest
from tests.support.small_tokenizers import (
    CORPUS,
    KINDS,
    byte_level,
    save,
)

# ---- tokenizer -------------------------------------------------------------------------------------------------------


def test_loading_and_facts(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    assert eos is not None and tokenizer.token_text(eos) == "</s>" and tokenizer.is_special(eos)
    assert tokenizer.vocab_size > eos
    assert tokenizer.decode([tokenizer.vocab_size + 10]) == ""


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_fallback_no_strip", "metaspace"])
def test_the_usual_kinds_are_decoded_token_by_token(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers[name].has_pieces
    assert not tokenizers["word_piece"].has_pieces and not tokenizers["byte_fallback_in_windows"].has_pieces


def test_encoding_adds_the_special_tokens_by_default(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    plain = tokenizer.encode("hello 你 world", add_special_tokens=False)
    assert tokenizer.decode(plain) == "hello 你 world"
    assert tokenizer.encode("hello 你 world") == [0, *plain]
    assert tokenizer.encode("") == [0]


def test_decoding_tidies_nothing(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["word_piece"]
    assert tokenizer.decode(tokenizer.encode("hello , world.")) == "hello , world ."


def test_stored_truncation_does_not_shorten_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(save(backend, tmp_path))
    assert tokenizer._hf.backend_tokenizer.truncation is None  # cleared at once: the backend is not changed by threads
    assert tokenizer.decode(tokenizer.encode("hello world " * 9)) == "hello world " * 9


CLASSES = [(name, model) for name in sorted(tokenizer._PLAIN) for model in sorted({*tokenizer._PLAIN_MODELS, "qwen2"})]


@pytest.mark.parametrize(("name", "model", "kind"), [
    *((*pair, "byte_level") for pair in CLASSES), *(("TokenizersBackend", "llama", kind) for kind in KINDS),
])  # fmt: skip
def test_it_is_the_tokenizer_that_transformers_chooses(name: str, model: str, kind: str, tmp_path: Path) -> None:
    folder = save(KINDS[kind](), tmp_path)
    given = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    assert tokenizer._is_plain(folder) == (model != "qwen2")
    ours, theirs = Tokenizer(folder)._hf, AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs) and ours.init_kwargs == theirs.init_kwargs
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.chat_template == theirs.chat_template
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder and ours.get_vocab() == theirs.get_vocab()
    for text in (*CORPUS, "</s> <|user|>\n\n  x<tool>｜é｜ ", "\ufffd\u200d🙂"):
        tokens = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == tokens and ours.decode(tokens) == theirs.decode(tokens)


@pytest.mark.parametrize(("model", "tokens"), [("mistral3", 4), ("mistral", 2)])
def test_words_of_mistral_small_are_those_it_has_learned(model: str, tokens: int, tmp_path: Path) -> None:
    """Its published tokenizer.json takes numbers by three digits, where the model has seen digit by digit."""
    vocab = byte_level().get_vocab()
    vocab |= {"12": len(vocab), "123": len(vocab) + 1}
    # transformers looks at large ones alone
    vocab |= {f"word {number}": number for number in range(len(vocab), 100_001)}
    made = Backend(models.BPE(vocab, [("1", "2"), ("12", "3")]))
    published = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([published, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    folder = save(made, tmp_path)
    text = {"model_type": "mistral", "vocab_size": 400, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    parts = {"text_config": text, "vision_config": {"model_type": "pixtral"}} if model == "mistral3" else text
    config = parts | {"model_type": model, "transformers_version": "4.52.0"}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = Tokenizer(folder)
    assert len(loaded.encode("123a", add_special_tokens=False)) == tokens
    assert loaded.decode(loaded.encode("123a é", add_special_tokens=False)) == "123a é"


@pytest.mark.parametrize(("where", "field"), [
    ("config.json", {"model_name": "qwen2"}), ("config.json", {"model_type": ["llama"]}),
    ("tokenizer_config.json", {"auto_map": {}}), ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
])  # fmt: skip
def test_other_choices_are_left_to_transformers(where: str, field: dict[str, Any], tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert tokenizer._is_plain(folder)
    (folder / where).write_text(json.dumps(json.loads((folder / where).read_text()) | field))
    assert not tokenizer._is_plain(folder)


@pytest.mark.parametrize("text", [None, 3, b"x", ["x"], "a\ud83d", "\udc00"])
def test_what_is_not_text_is_refused(text: Any, tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest) as error:
        tokenizers["byte_level"].encode(text, param="input")
    assert error.value.param == "input" and "input" in str(error.value)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="token ids"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_is_an_error_and_not_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        Tokenizer.load(tmp_path)


def test_token_text_and_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    fallback = tokenizers["byte_fallback"]
    pieces = [fallback.token_text(t) for t in fallback.encode("the lo", add_special_tokens=False)]
    assert pieces == [" the", " ", "lo"]
    level = tokenizers["byte_level"]
    tokens = level.encode("🦊 x", add_special_tokens=False)
    assert b"".join(level.token_bytes(t) for t in tokens) == "🦊 x".encode()
    assert level.token_text(tokens[0]) == "\ufffd"
    assert {level.token_bytes(t) for t in range(level.vocab_size)} >= {bytes([b]) for b in range(256)}
    assert level.token_bytes(level.vocab_size + 5) == b""
    added = level.encode("a｜é｜b", add_special_tokens=False)
    assert [level.token_text(t) for t in added] == ["a", "｜é｜", "b"]
    assert tokenizers["word_piece"].token_text(5) == "the"


# ---- chat ------------------------------------------------------------------------------------------------------------


def chat(tokenizers: dict[str, Tokenizer], messages: Any, **more: Any) -> str:
    tokenizer = tokenizers["byte_level"]
    return tokenizer.decode(tokenizer.apply_chat(messages, **more), skip_special_tokens=False)


def test_the_template_writes_the_conversation_with_one_bos(tokenizers: dict[str, Tokenizer]) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    written = "<s><|user|>hello<|assistant|>world"
    assert chat(tokenizers, messages, add_generation_prompt=False) == written
    assert chat(tokenizers, messages) == written + "<|assistant|>"
    assert tokenizers["byte_level"].apply_chat(messages).count(0) == 1


def test_template_variables_tools_and_text_parts(tokenizers: dict[str, Tokenizer]) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": parts}]
    written = chat(tokenizers, messages, tools=tools, shout=True, add_generation_prompt=False)
    assert written == "<s><|user|>a\nb1!"
    assert messages[0]["content"] is parts


def test_calls_of_an_assistant_without_content_and_continued_messages(tokenizers: dict[str, Tokenizer]) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}, {"id": 2}]}
    assert chat(tokenizers, [calls], add_generation_prompt=False) == "<s><|assistant|>[2]"
    begun = [{"role": "assistant", "content": "hello wo"}]
    written = chat(tokenizers, begun, add_generation_prompt=False, continue_final_message=True, tools=[{"a": 1}])
    assert written == "<s><|assistant|>hello wo"


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "non-empty"),
        ("hello", "list"),
        ([3], r"messages\[0\]"),
        ([{"content": "x"}], "role"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}], r"content\[1\]: type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]"),
        ([{"role": "wizard", "content": "x"}], "no role wizard"),
        ([{"role": "user", "content": "x\ud800"}], "surrogate"),
    ],
)
def test_bad_messages_are_refused_by_name(messages: Any, named: str, tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match=named) as error:
        tokenizers["byte_level"].apply_chat(messages)
    assert error.value.param == "messages"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "return_tensors"])
def test_requests_cannot_set_options_of_the_renderer(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match=name) as error:
        chat(tokenizers, [{"role": "user", "content": "x"}], **{name: "{{ 7 * 7 }}"})
    assert error.value.param == "chat_template_kwargs"


def test_templates_run_in_the_sandbox(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest, match="unsafe") as error:
        Tokenizer(save(byte_level(), tmp_path, template)).apply_chat([{"role": "user", "content": "x"}])
    assert error.value.param == "messages"


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="plain prompt") as error:
        tokenizer.apply_chat([{"role": "user", "content": "x"}])
    assert error.value.param == "messages"
