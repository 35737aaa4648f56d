"""Tokenizer and detokenizer on small tokenizers of each kind, built here."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from headrace.engine.detokenizer import Detokenizer, Piece
from headrace.engine.tokenizer import Tokenizer
from headrace.types import InvalidRequest, SamplingParams

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café 你好 世界 👩‍👩‍👧 hello world, hello there"] * 5
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if messages[-1].tool_calls %}[{{ messages[-1].tool_calls | length }}]{% endif %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("｜é｜", special=False)])
    return backend


def byte_fallback(strip: bool = True, mark: str | Regex = "▁") -> Backend:
    """As the first Llama: space mark, and bytes for what the vocabulary lacks; `strip` drops the text's first space."""
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256))])}
    for piece in ("▁", *"theloworldaé", "th", "▁th", "▁the", "lo", "▁▁"):
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("l", "o"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece() -> Backend:
    """A kind whose tokens cannot be decoded one by one: spaces stand between words, and are tidied."""
    words = ["the", "quick", "fox", "jump", "##s", "##ed", ",", ".", "hello", "world"]
    backend = Backend(models.WordPiece({t: i for i, t in enumerate(["[UNK]", *SPECIAL, *words])}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(SPECIAL)
    return backend


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_no_strip": lambda: byte_fallback(strip=False),
    "byte_fallback_in_windows": lambda: byte_fallback(mark=Regex("▁")),
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def save(backend: Backend, folder: Path, template: str | None = TEMPLATE, add_bos: bool = True) -> Path:
    if add_bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", _id(backend, "<s>"))])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return folder


def _id(backend: Backend, token: str) -> int:
    number = backend.token_to_id(token)
    assert number is not None
    return number


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: Tokenizer(save(make(), tmp_path_factory.mktemp(name))) for name, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request: Any, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


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
    assert [level.token_text(t) for t in added] == ["a", "｜é｜", "b"] == [p.text for p in run(level, added)[:-1]]
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


# ---- detokenizer: whole characters -----------------------------------------------------------------------------------

EOS = (1,)
texts = st.text(
    st.one_of(
        st.sampled_from("the lo world  é▁Ġ\n.,"),
        st.sampled_from(["👩‍👩‍👧", "🇩🇪", "e\u0301", "你好", "\u200d", "👍🏽", "ـس", "\ufffd"]).flatmap(st.sampled_from),
        st.characters(exclude_categories=("Cs",)),
    ),
    max_size=40,
)


def run(tokenizer: Tokenizer | None, tokens: Sequence[int], prompt: Sequence[int] = (), **options: Any) -> list[Piece]:
    """The pieces of `tokens` after `prompt`, up to the stop, and one more with what flush releases."""
    eos = options.pop("eos", EOS)
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **options), eos)
    pieces = []
    for token in tokens:
        pieces.append(detokenizer.push(token))
        if pieces[-1].stop is not None:
            break
    return [*pieces, Piece(detokenizer.flush(), None, 0)]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens_of(tokenizer: Tokenizer, text: str, specials: list[int]) -> list[int]:
    """Tokens of a text with special tokens strewn in at token boundaries."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for place in specials:
        tokens.insert(place % (len(tokens) + 1), tokenizer.encode(SPECIAL[place % 4], add_special_tokens=False)[-1])
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), text=texts, skip=st.booleans())
def test_the_pieces_are_the_decoded_text_wherever_the_prompt_ends(
    kind: str, data: st.DataObject, text: str, skip: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    end = data.draw(st.integers(0, len(tokens)))
    if not tokenizer.has_pieces:  # windows take U+FFFD for an unfinished character, and the prompt as it is
        assume("\ufffd" not in text + tokenizer.decode(tokens[:end], skip))
    before = text_of(run(tokenizer, tokens[:end], skip_special_tokens=skip, eos=()))
    after = text_of(run(tokenizer, tokens[end:], tokens[:end], skip_special_tokens=skip, eos=()))
    assert before + after == tokenizer.decode(tokens, skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, specials=st.lists(st.integers(0, 1000), max_size=4), skip=st.booleans())
def test_special_tokens_are_shown_or_skipped(
    kind: str, text: str, specials: list[int], skip: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokens_of(tokenizer, text, specials)
    if "\ufffd" not in (whole := tokenizer.decode(tokens, skip)):  # no special token inside a character
        assert text_of(run(tokenizer, tokens, skip_special_tokens=skip, eos=())) == whole


@given(st.lists(st.integers(0, 340), max_size=30))
@example([173, 98])
def test_any_bytes_of_a_byte_level_model_give_what_decoding_gives(
    tokenizers: dict[str, Tokenizer], tokens: list[int]
) -> None:
    """Broken characters too; only an incomplete one at the very end is dropped instead of shown as U+FFFD."""
    tokenizer = tokenizers["byte_level"]
    data = b"".join(tokenizer.token_bytes(t) for t in tokens if not tokenizer.is_special(t))
    incomplete = data[codecs.utf_8_decode(data, "replace", False)[1] :]
    assert len(incomplete) < 4
    shown = incomplete.decode("utf-8", "replace")
    assert text_of(run(tokenizer, tokens, eos=())) + shown == tokenizer.decode(tokens)


@given(st.lists(st.integers(0, 285), max_size=30))
@example([164, 197, 194, 260, 275])
def test_byte_fallback_keeps_valid_characters_beside_broken_ones(
    tokenizers: dict[str, Tokenizer], tokens: list[int]
) -> None:
    tokenizer = tokenizers["byte_fallback"]
    data = b"".join(tokenizer.token_bytes(t) for t in tokens if not tokenizer.is_special(t))
    prompt = tokenizer.encode("the", add_special_tokens=False)
    assert text_of(run(tokenizer, tokens, prompt, eos=())) == codecs.utf_8_decode(data, "replace", False)[0]


@pytest.mark.parametrize("kind", ["metaspace", "word_piece"])
@given(tokens=st.lists(st.integers(0, 95), max_size=80))
def test_any_tokens_of_the_other_kinds(kind: str, tokens: list[int], tokenizers: dict[str, Tokenizer]) -> None:
    assert text_of(run(tokenizers[kind], tokens, eos=())) == tokenizers[kind].decode(tokens)


def test_a_character_comes_whole_and_as_soon_as_it_is_whole(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizers[kind]
        of_byte = {tokenizer.token_bytes(t): t for t in reversed(range(tokenizer.vocab_size))}
        tokens = [of_byte[bytes([b])] for b in "🦊a".encode()]
        assert [p.text for p in run(tokenizer, tokens, tokens[-1:])] == ["", "", "", "🦊", "a", ""]
        assert text_of(run(tokenizer, tokens[:3], tokens[-1:])) == ""


def test_the_space_of_the_first_word_depends_on_the_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    the = tokenizer.encode("the", add_special_tokens=False)
    bos = tokenizer.encode("")
    assert text_of(run(tokenizer, the * 2)) == "the the"
    assert text_of(run(tokenizer, the * 2, bos)) == "the the"
    assert text_of(run(tokenizer, the * 2, bos, skip_special_tokens=False)) == " the the"
    assert text_of(run(tokenizer, the * 2, bos + the)) == " the the"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_however_long_the_text_is(
    kind: str, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, lengths = tokenizers[kind], []
    decode = tokenizer.decode
    tokens = tokenizer.encode("the lo " * 300, add_special_tokens=False)
    monkeypatch.setattr(tokenizer, "decode", lambda ids, skip=True: (lengths.append(len(ids)), decode(ids, skip))[1])
    assert text_of(run(tokenizer, tokens, eos=())) == decode(tokens)
    assert max(lengths) < 100 and len(lengths) <= (1 if tokenizer.has_pieces else 2 * len(tokens))


def test_a_window_of_the_prompt_is_not_cut_inside_a_character(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback_in_windows"]
    tokens = ids(tokenizer, "你好🦊你好🦊")
    for end in (4, 7, 11, 14, 17):
        assert text_of(run(tokenizer, tokens[end:], tokens[:end])) == tokenizer.decode(tokens[end:])


def test_endless_broken_bytes_are_not_held_for_ever(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback_in_windows"]
    broken = next(t for t in range(300) if tokenizer.decode([t], False) == "\ufffd")
    pieces = run(tokenizer, [broken] * 200)
    assert len(text_of(pieces)) > 150 and max(len(p.text) for p in pieces) < 100


# ---- detokenizer: the end --------------------------------------------------------------------------------------------


def expected_end(texts: list[str], stops: Sequence[str], min_tokens: int) -> tuple[int, str, int] | None:
    """The definition: (end in the text, stop string, tokens) of the first stop completed once min_tokens are there."""
    whole = ""
    for count, text in enumerate(texts, start=1):
        for char in text:
            whole += char
            done = [stop for stop in stops if whole.endswith(stop)]
            if done and count >= min_tokens:
                return len(whole), max(done, key=len), count
    return None


stop_words = st.lists(st.text("the lo你🦊", min_size=1, max_size=6), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(
    text=st.text("the lo你🦊", max_size=40),
    stops=stop_words,
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
    cuts=st.lists(st.integers(1, 9), min_size=1),
)
def test_stop_strings_by_definition_and_however_polled(
    kind: str, text: str, stops: list[str], include: bool, min_tokens: int, cuts: list[int],
    tokenizers: dict[str, Tokenizer],
) -> None:  # fmt: skip
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    plain = [piece.text for piece in run(tokenizer, tokens)]
    options = {"stop": tuple(stops), "include_stop_str_in_output": include, "min_tokens": min_tokens}
    pieces = run(tokenizer, tokens, **options)
    end = expected_end(plain, stops, min_tokens)
    if end is None:
        assert text_of(pieces) == "".join(plain) and all(p.stop is None for p in pieces)
    else:
        assert text_of(pieces) == "".join(plain)[: end[0] - (0 if include else len(end[1]))]
        assert (pieces[-2].stop, len(pieces) - 1) == end[1:]
        assert pieces[-1].text == ""

    detokenizer = Detokenizer(tokenizer, [], SamplingParams(max_tokens=None, **options), EOS)
    at, polled = 0, []
    while at < len(tokens):
        size = cuts[len(polled) % len(cuts)]
        polled.append(detokenizer.push_all(tokens[at : at + size]))
        at += size
    assert text_of(polled) + detokenizer.flush() == text_of(pieces)
    assert sum(p.tokens for p in polled) == len(pieces) - 1
    assert (polled[-1].stop if polled else None) == (end and end[1])


@given(text=st.text("the lo你", max_size=30), stops=stop_words)
def test_no_more_is_held_back_than_may_begin_a_stop(
    tokenizers: dict[str, Tokenizer], text: str, stops: list[str]
) -> None:
    tokenizer = tokenizers["byte_level"]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    plain = run(tokenizer, tokens)
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    pieces = run(tokenizer, tokens, stop=tuple(stops))
    for count, piece in enumerate(pieces[:-1], start=1):
        if piece.stop is None:
            final = text_of(plain[:count])
            held = max((len(b) for b in beginnings if final.endswith(b)), default=0)
            assert text_of(pieces[:count]) == final[: len(final) - held]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_tokens_that_end_the_sequence(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    eos = tokenizer.eos_token_id
    tokens = [*ids(tokenizer, "hi"), eos, *ids(tokenizer, "ho")]
    stop = ids(tokenizer, "o")[0]

    def end(**options: Any) -> tuple[str, Any]:
        pieces = run(tokenizer, tokens, **options)
        return text_of(pieces), next((p.stop for p in pieces if p.stop is not None), None)

    assert end() == ("hi", eos)
    assert end(ignore_eos=True) == ("hiho", None)
    assert end(ignore_eos=True, skip_special_tokens=False) == ("hi</s>ho", None)
    assert end(skip_special_tokens=False) == ("hi", eos)
    assert end(skip_special_tokens=False, include_stop_str_in_output=True) == ("hi</s>", eos)
    assert end(min_tokens=4) == ("hiho", None)
    assert end(stop_token_ids=(stop,), ignore_eos=True) == ("hih", stop)
    assert end(stop_token_ids=(stop,), ignore_eos=True, include_stop_str_in_output=True) == ("hiho", stop)
    assert end(stop=("io",)) == ("hi", eos)
    assert run(tokenizer, [*ids(tokenizer, "ox"), eos], stop=("xy",))[-2:] == [Piece("x", eos), Piece("", None, 0)]


def test_after_the_stop_nothing_is_taken(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=("b",)), EOS)
    piece = detokenizer.push_all(ids(tokenizer, "abcd"))
    assert piece == Piece("a", "b", 2)
    assert detokenizer.push(ids(tokenizer, "x")[0]) == Piece("", "b", 0)
    assert detokenizer.flush() == ""


def test_without_a_tokenizer_only_stop_tokens_count() -> None:
    assert run(None, [5, 6, 1, 7]) == [Piece(""), Piece(""), Piece("", 1), Piece("", None, 0)]
