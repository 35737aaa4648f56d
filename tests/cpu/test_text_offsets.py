"""Where tokens begin in the text of a completion, on small tokenizers of each kind."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.tokenizer import Tokenizer
from headrace.server.text_offsets import TextOffsets, whole_text
from headrace.types import SamplingParams
from tests.support.small_tokenizers import KINDS, SPECIAL

IN_PIECES = [kind for kind in KINDS if kind not in ("byte_fallback_in_windows", "word_piece")]
texts = st.text(st.sampled_from("the lo  wé▁\n.你👩\u200d👍🏽"), max_size=20)


def drawn(tokenizer: Tokenizer, text: str, specials: list[int]) -> list[int]:
    """Tokens of a text with special tokens strewn in."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for place in specials:
        tokens.insert(place % (len(tokens) + 1), tokenizer.encode(SPECIAL[place % 4], add_special_tokens=False)[-1])
    return tokens


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], skip: bool) -> list[str]:
    """What the engine writes for each token."""
    params = SamplingParams(max_tokens=None, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, prompt, params, ())
    return [detokenizer.push(token).text for token in tokens]


@pytest.mark.parametrize("kind", IN_PIECES)
@given(data=st.data(), text=texts, specials=st.lists(st.integers(0, 99), max_size=4), skip=st.booleans())
def test_offsets_are_those_of_the_text_as_it_is_written(
    kind: str, data: st.DataObject, text: str, specials: list[int], skip: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    tokens = drawn(tokenizer, text, specials)
    end = data.draw(st.integers(0, len(tokens)))
    prompt, answer = tokens[:end], tokens[end:]
    offsets = TextOffsets(tokenizer, prompt, None, skip)
    so_far = 0
    for token, piece in zip(answer, pieces(tokenizer, prompt, answer, skip), strict=True):
        assert offsets.next(token, of_prompt=False) == so_far
        so_far += len(piece)


@pytest.mark.parametrize("kind", IN_PIECES)
@given(data=st.data(), text=texts, specials=st.lists(st.integers(0, 99), max_size=4))
@example(data=None, text="你 lo", specials=[])
def test_an_echoed_prompt_and_its_answer_are_one_text(
    kind: str, data: st.DataObject | None, text: str, specials: list[int], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    assume(text.strip())
    tokens = drawn(tokenizer, text, specials)
    end = len(tokens) if data is None else data.draw(st.integers(1, len(tokens)))
    prompt, answer = tokens[:end], tokens[end:]
    echoed = whole_text(tokenizer, prompt)
    assert echoed + "".join(pieces(tokenizer, prompt, answer, True)) == "".join(pieces(tokenizer, [], tokens, True))
    assert "\ufffd" not in echoed
    offsets = TextOffsets(tokenizer, prompt, echoed, True)
    so_far = 0
    for number, (token, piece) in enumerate(zip(tokens, pieces(tokenizer, [], tokens, True), strict=True)):
        assert offsets.next(token, of_prompt=number < end) == so_far
        so_far += len(piece)


@pytest.mark.parametrize("text", ["你 lo", "the lo</s>the", "<s>the lo", "the 👍🏽 lo"])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_no_strip"])
def test_a_prompts_tokens_are_found_in_its_text(kind: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    """All but the special token that the tokenizer puts before it."""
    tokenizer = tokenizers[kind]
    (added, *ids) = tokenizer.encode(text)
    offsets = TextOffsets(tokenizer, [added, *ids], text, True)
    if not text.startswith("<s>"):
        assert tokenizer.token_text(added) == "<s>" and offsets.next(added, of_prompt=True) == 0
    places = {offsets.next(token, of_prompt=True): tokenizer.token_text(token) for token in ids}
    told = {at: piece for at, piece in places.items() if "\ufffd" not in piece}
    assert len(told) > 1 and all(text.startswith((piece, piece.lstrip()), at) for at, piece in told.items())
