"""Masks: what the sampler makes of them, and that they allow just the tokens that keep to the shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.sampler import BadLogits, Mask, sample
from headrace.engine.structured.grammars import MOST_GRAMMARS, BadGrammar, Grammars
from headrace.engine.structured.masks import MaskThread
from headrace.engine.structured.matcher import SequenceMatcher
from headrace.engine.structured.vocabulary import Vocabulary, vocabulary_of
from headrace.engine.tokenizer import Tokenizer
from headrace.kernels.model_step import Greatest
from headrace.types import InvalidRequest, SamplingParams, Structured
from tests.support.sampler_rows import draw, random_logits, row_input

SIZE = 40
FILTERS = [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.01}]


def mask_of(*allowed: int, size: int = SIZE) -> Mask:
    mask = np.zeros(size, np.bool_)
    mask[list(allowed)] = True
    return mask


# ---- the sampler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_greedy_takes_the_greatest_allowed_and_the_lowest_of_equals(known: bool) -> None:
    rows = torch.tensor([[9.0, 1.0, 5.0, 5.0], [9.0, 1.0, 5.0, 5.0], [9.0, 1.0, 5.0, 5.0]])
    greedy = SamplingParams(temperature=0)
    masks = [mask_of(1, 2, 3, size=4), mask_of(0, 3, size=4), None]
    greatest = Greatest([9.0] * 3, [0] * 3) if known else None
    inputs = [row_input(greedy, mask=masks[0]), row_input(greedy, mask=masks[1]), None]
    assert [each.token for each in sample(rows, inputs, greatest)] == [2, 0, 0]
    penalised = SamplingParams(temperature=0, logit_bias={1: 10.0})
    assert draw(rows[0], penalised, mask=masks[0]) == 1, "the bias comes before the mask"
    assert draw(rows[0], penalised, mask=mask_of(3, size=4)) == 3


def test_nothing_left_and_broken_rows_are_told() -> None:
    row = torch.tensor([[1.0, -math.inf, 2.0]])
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0, logprobs=1)):
        with pytest.raises(BadLogits, match="no token is left"):
            sample(row, [row_input(params, mask=mask_of(1, size=3))])
        with pytest.raises(BadLogits, match="NaN"):
            sample(row * math.nan, [row_input(params, mask=mask_of(1, size=3))])


@given(
    seed=st.integers(0, 2**32),
    forbidden=st.sets(st.integers(0, SIZE - 1), max_size=SIZE - 1),
    filters=st.sampled_from([*FILTERS, {"temperature": 0.0}]),
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
)
def test_a_mask_changes_a_draw_only_where_it_has_to(
    seed: int, forbidden: set[int], filters: dict[str, float], temperature: float
) -> None:
    params = SamplingParams(**{"temperature": temperature, **filters})  # type: ignore[arg-type]
    row = random_logits(seed % 1000, 1, SIZE)[0]
    allowed = [token for token in range(SIZE) if token not in forbidden]
    free = draw(row, params, seed=seed)
    masked = draw(row, params, seed=seed, mask=mask_of(*allowed))
    assert masked in allowed
    kept = {draw(row, params, seed=each) for each in range(60)} if params.temperature and filters else {free}
    if not kept & forbidden and free in allowed and not filters:
        assert masked == free
    if params.greedy:
        assert masked == max(allowed, key=lambda token: (float(row[token]), -token))
    if not forbidden:
        assert masked == free


@pytest.mark.parametrize("filters", FILTERS)
def test_masked_draws_have_the_probabilities_of_the_masked_row(filters: dict[str, float]) -> None:
    """Of 1,000 draws; the most likely token is forbidden, and one that the filters would keep."""
    row = torch.tensor([2.5, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0])
    allowed = mask_of(1, 3, 4, 5, 6, 7, 8, 9, size=10)
    params = SamplingParams(**filters)  # type: ignore[arg-type]
    hidden = torch.where(torch.from_numpy(allowed), row, -math.inf)
    draws = np.bincount([draw(row, params, seed=seed, mask=allowed) for seed in range(1000)], minlength=10)
    truth = np.bincount([draw(hidden, params, seed=seed) for seed in range(1000)], minlength=10)
    assert set(np.flatnonzero(draws)) == set(np.flatnonzero(truth))
    assert np.abs(draws - truth).max() < 100, "some five standard deviations"


def test_filters_that_keep_nothing_forbidden_give_the_token_without_the_mask() -> None:
    row = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    for filters in ({"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}):
        params = SamplingParams(**filters)  # type: ignore[arg-type]
        for seed in range(50):
            assert draw(row, params, seed=seed, mask=mask_of(0, 1, 2, size=5)) == draw(row, params, seed=seed)


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    row = random_logits(3, 1, SIZE)
    params = SamplingParams(temperature=0, logprobs=3)
    (told,) = sample(row, [row_input(params, mask=mask_of(7, 8))])
    assert told.logprobs is not None and len(told.logprobs) == 4
    assert told.logprobs[told.token].logprob == pytest.approx(float(torch.log_softmax(row[0].double(), 0)[told.token]))


# ---- masks against brute force ---------------------------------------------------------------------------------------


def at_beginning(structured: Structured, vocabulary: Vocabulary, jumps: bool = False) -> SequenceMatcher:
    matcher = SequenceMatcher(jumps)
    matcher.open(Grammars().matcher(structured, vocabulary), vocabulary)
    return matcher


MASKS = MaskThread()


def mask_for(matcher: SequenceMatcher, vocabulary: Vocabulary) -> Mask:
    MASKS.compute([matcher], vocabulary)
    assert not matcher.fault
    return matcher.mask


KINDS = ["byte_level", "byte_fallback", "byte_fallback_no_strip", "metaspace"]
TEXTS = st.lists(st.text("the lo é", min_size=1, max_size=8), min_size=1, max_size=4, unique=True)


@settings(max_examples=40)
@given(kind=st.sampled_from(KINDS), texts=TEXTS, data=st.data())
def test_a_mask_allows_just_the_tokens_that_keep_to_the_shape(
    kind: str, texts: list[str], data: st.DataObject, tokenizers: dict[str, Tokenizer]
) -> None:
    """Along a way through the language, at each token: by the bytes of every token, and of every text. Where the next
    byte is forced, the usual token for it is enough."""
    tokenizer, language = tokenizers[kind], [text.encode() for text in texts]
    end = tokenizer.eos_token_id or 0
    vocabulary = vocabulary_of(tokenizer, 400, [end])
    matcher, so_far = at_beginning(Structured(choice=texts), vocabulary), b""
    while True:
        expected = {end} if so_far in language else set()
        for token in range(tokenizer.vocab_size):
            new = b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token)
            if new and any(text.startswith(so_far + new) for text in language):
                expected.add(token)
        mask = mask_for(matcher, vocabulary)
        found = set(np.flatnonzero(mask).tolist())
        forced = len({text[: len(so_far) + 1] for text in language if text.startswith(so_far)}) == 1
        assert found and found <= expected and len(mask) == 400
        assert found == expected or forced, "forced text may have one tokenization"
        token = data.draw(st.sampled_from(sorted(found)))
        if token == end:
            break
        matcher.push(token)
        so_far += tokenizer.token_bytes(token)
        if matcher.complete:
            break
    assert so_far in language


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_end_of_text_is_over_where_nothing_follows(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    vocabulary = vocabulary_of(tokenizer, 400, [])
    matcher = at_beginning(Structured(regex="(the)?"), vocabulary)
    assert mask_for(matcher, vocabulary).any() and not matcher.over and not vocabulary.canonical
    answer = b""
    while not matcher.complete:
        token = int(np.flatnonzero(mask_for(matcher, vocabulary))[0])
        matcher.push(token)
        answer += tokenizer.token_bytes(token)
    assert answer == b"the"
    empty = at_beginning(Structured(grammar='start: ""'), vocabulary)
    mask_for(empty, vocabulary)
    assert empty.over


@pytest.mark.parametrize("kind", ["word_piece", "byte_fallback_in_windows", None])
def test_tokenizers_that_cannot_be_used_are_refused(kind: str | None, tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="tokenizer") as refused:
        vocabulary_of(None if kind is None else tokenizers[kind], 400, [2])
    assert refused.value.param == "structured"


@given(text=st.text("the lo é<{}", min_size=1, max_size=30))
@settings(max_examples=40)
def test_forced_tokens_spell_the_forced_text(text: str, tokenizers: dict[str, Tokenizer]) -> None:
    for kind in KINDS[:3]:
        tokenizer = tokenizers[kind]
        vocabulary = vocabulary_of(tokenizer, 400, [tokenizer.eos_token_id or 0])
        forced = at_beginning(Structured(choice=[text]), vocabulary, jumps=True).beginning
        spelled = b"".join(map(tokenizer.token_bytes, forced))
        assert text.encode().startswith(spelled)
        assert not at_beginning(Structured(choice=[text]), vocabulary).beginning


def test_special_tokens_and_rules_with_a_budget(tokenizers: dict[str, Tokenizer]) -> None:
    """What tools and reasoning are made of."""
    tokenizer = tokenizers["byte_level"]
    vocabulary = vocabulary_of(tokenizer, 400, [1])
    user = tokenizer.encode("<|user|>", add_special_tokens=False)
    assert len(user) == 1
    grammar = 'start: thought <|user|> "the"\nthought[max_tokens=3]: /(.|\\n)*/'
    matcher = at_beginning(Structured(grammar=grammar), vocabulary, jumps=True)
    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    assert matcher.push(letter) == matcher.push(letter) == []
    assert matcher.push(letter) == [*user, *tokenizer.encode("the", add_special_tokens=False)]
    assert matcher.complete


def test_a_matcher_that_fails_says_so_and_is_left_alone(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    vocabulary = vocabulary_of(tokenizer, 400, [2])
    one, other = (at_beginning(Structured(regex="[a-z]+"), vocabulary) for _ in range(2))
    one.push(tokenizer.encode("{", add_special_tokens=False)[0])
    MASKS.compute([one, other], vocabulary)
    assert "satisfy" in one.fault and "\n" not in one.fault and not one.complete
    assert other.mask.any() and not other.fault
    with pytest.raises(BadGrammar):
        Grammars().matcher(Structured(grammar="start: nothing"), vocabulary)


def test_a_run_that_is_forced_without_end_is_an_error(tokenizers: dict[str, Tokenizer]) -> None:
    vocabulary = vocabulary_of(tokenizers["byte_level"], 400, [2])
    assert "65,536 bytes" in at_beginning(Structured(choice=["a" * 70_000]), vocabulary, jumps=True).fault


def test_grammars_are_kept_and_compiled_once(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    vocabulary, grammars = vocabulary_of(tokenizer, 400, [2]), Grammars()
    first = grammars.matcher(Structured(regex="ab"), vocabulary)
    first.consume_tokens(tokenizer.encode("a", add_special_tokens=False))
    second = grammars.matcher(Structured(regex="ab"), vocabulary)
    assert second.validate_tokens(tokenizer.encode("ab", add_special_tokens=False)) == 2, "one's own place"
    assert grammars.compiled == 1
    for number in range(MOST_GRAMMARS):
        grammars.matcher(Structured(regex=f"b{{{number + 1}}}"), vocabulary)
    assert grammars.known(Structured(regex="ab")) is None and grammars.known(Structured(regex="b{64}")) is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["</s>", "the <|user|> lo", "<unk><s>", "<tool>"])
def test_texts_that_read_like_tokens_are_written_as_text(
    kind: str, text: str, tokenizers: dict[str, Tokenizer]
) -> None:
    """Forced and drawn, by tokens that mean nothing."""
    tokenizer = tokenizers[kind]
    vocabulary = vocabulary_of(tokenizer, 400, [tokenizer.eos_token_id or 0])
    for jumps, choice in ((True, [text]), (False, [text]), (False, [f"{text}l", f"{text}o"])):
        if any(tokenizer.decode(tokenizer.encode(char, add_special_tokens=False)) != char for char in "".join(choice)):
            continue  # not all of these vocabularies spell all characters
        matcher = at_beginning(Structured(choice=choice), vocabulary, jumps)
        tokens = list(matcher.beginning)
        while not matcher.complete:
            tokens.append(int(np.flatnonzero(mask_for(matcher, vocabulary))[0]))
            tokens += matcher.push(tokens[-1])
        assert not any(map(tokenizer.is_special, tokens))
        assert b"".join(map(tokenizer.token_bytes, tokens)).decode() in choice
