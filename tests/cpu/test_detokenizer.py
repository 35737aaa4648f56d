"""The detokenizer, on small tokenizers of each kind."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headrace.engine.detokenizer import Detokenizer, TextPiece
from headrace.engine.tokenizer import Tokenizer
from headrace.types import SamplingParams
from tests.support.small_tokenizers import (
    KINDS,
    SPECIAL,
)

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


def run(
    tokenizer: Tokenizer | None, tokens: Sequence[int], prompt: Sequence[int] = (), **options: Any
) -> list[TextPiece]:
    """The pieces of `tokens` after `prompt`, up to the stop, and one more with what flush releases."""
    eos = options.pop("eos", EOS)
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **options), eos)
    pieces = []
    for token in tokens:
        pieces.append(detokenizer.push(token))
        if pieces[-1].stop is not None:
            break
    return [*pieces, TextPiece(detokenizer.flush(), None, 0)]


def text_of(pieces: list[TextPiece]) -> str:
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
        polled.append(pushed(detokenizer, tokens[at : at + size]))
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


def pushed(detokenizer: Detokenizer, tokens: list[int]) -> TextPiece:
    """Several tokens, up to the stop, as one piece."""
    pieces = [detokenizer.push(token) for token in tokens]
    stop = next((piece.stop for piece in pieces if piece.stop is not None), None)
    return TextPiece(text_of(pieces), stop, sum(piece.tokens for piece in pieces))


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
    assert run(tokenizer, [*ids(tokenizer, "ox"), eos], stop=("xy",))[-2:] == [
        TextPiece("x", eos),
        TextPiece("", None, 0),
    ]


def test_after_the_stop_nothing_is_taken(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=("b",)), EOS)
    piece = pushed(detokenizer, ids(tokenizer, "abcd"))
    assert piece == TextPiece("a", "b", 2)
    assert detokenizer.push(ids(tokenizer, "x")[0]) == TextPiece("", "b", 0)
    assert detokenizer.flush() == ""


def test_without_a_tokenizer_only_stop_tokens_count() -> None:
    assert run(None, [5, 6, 1, 7]) == [TextPiece(""), TextPiece(""), TextPiece("", 1), TextPiece("", None, 0)]


def test_added_tokens_are_text_of_their_own(tokenizers: dict[str, Tokenizer]) -> None:
    level = tokenizers["byte_level"]
    added = level.encode("a｜é｜b", add_special_tokens=False)
    assert [piece.text for piece in run(level, added)[:-1]] == ["a", "｜é｜", "b"]
