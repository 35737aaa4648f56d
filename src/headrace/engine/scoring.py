"""Scores of many options over one text, as ordinary requests that share it.

    text                                  options
    |<------------- T tokens ------------>|<-- option 0 -->|
                                        ^ |<-- option 1 ------->|
                                        | |<-- option 2 -->|
                                        row T - 1 predicts the first token of each option

One request reads the text, and reports at its end the first tokens of all options (`logprob_token_ids`). One request
for each option of several tokens computes what comes behind the text's last whole chunk, and reports from the option's
second token on (`prompt_logprobs_start`). Every number is that of a whole prompt, text and option, to the bit.

No torch: the server plans scores, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, overload

from headrace.engine.adapters import last_place
from headrace.engine.prompts import token_ids
from headrace.outputs import Score
from headrace.types import MAX_LISTED, InvalidRequest, SamplingParams, TokenLogprobs

MOST_OPTIONS = MAX_LISTED
MOST_CHARACTERS = 1 << 22
"""Characters that are tokenized for one score, where the text has to be tokenized with each option: about a second."""
TAIL = 256
"""Characters of the text's end that are tokenized with each option, if that comes to the same."""

MOST_TOKENS = 1 << 22
"""Tokens of prompts that the engine is given at a time where nothing else bounds them: about 64 MB."""

Text = str | Sequence[int]


class ScoreAborted(RuntimeError):
    """A request of a score has ended without its log probabilities."""


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Option:
    """start: tokens of the text before it. Where the tokenizer joins the text's end and the option's beginning, `start`
    is less than the text's length, and the joined tokens are the option's."""

    start: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Joined(Sequence[int]):
    """Tokens of a text and of an option behind it. They are put together only where they are used: all prompts of a
    score at once would be its text a thousand times."""

    text: list[int]
    option: list[int]

    def __len__(self) -> int:
        return len(self.text) + len(self.option)

    def __iter__(self) -> Iterator[int]:
        return chain(self.text, self.option)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1 and stop <= len(self.text):
                return self.text[start:stop]
        return (self.text + self.option)[index]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """shared: tokens at the beginning of the prompt that another request of the score has, too."""

    token_ids: Sequence[int]
    params: SamplingParams
    shared: int = 0


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """`requests` are to be answered in this order, or all together; `scores` makes the scores of their answers.

    alike: prompts up to so many tokens have the same keys whatever their length (Capacity.alike_tokens); the text's
    request can report for these alone. 0: all. invocation: tokens from whose last place on a prompt has an adapter: the
    text's request cannot report for an option that has that place.
    """

    text: list[int]
    options: list[Option]
    alike: int = 0
    invocation: tuple[int, ...] = ()
    requests: list[ScoreRequest] = field(init=False, default_factory=list)
    _asked: list[int] = field(init=False, default_factory=list)
    """Of each request its option; -1: the text."""
    _heads: dict[int, list[int]] = field(init=False, default_factory=dict)
    """Beginnings of the text by their length."""

    def __post_init__(self) -> None:
        first = [option for option in self.options if self._after_text(option)]
        if first:
            tokens = tuple(sorted({option.token_ids[0] for option in first}))
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=tokens)
            self._ask(-1, self.text, params)
        for index, option in enumerate(self.options):
            reported = option.start + self._after_text(option)
            prompt = Joined(self._head(option.start), option.token_ids)
            if reported < len(prompt):
                params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=reported)
                self._ask(index, prompt, params, option.start if self.requests else 0)

    def _head(self, length: int) -> list[int]:
        """One list for all options that it comes before."""
        if length == len(self.text):
            return self.text
        return self._heads.setdefault(length, self.text[:length])

    def _ask(self, option: int, tokens: Sequence[int], params: SamplingParams, shared: int = 0) -> None:
        self.requests.append(ScoreRequest(tokens, params, shared))
        self._asked.append(option)

    def _after_text(self, option: Option) -> bool:
        """Whether the text's request reports the option's first token."""
        alike = not self.alike or option.start + len(option.token_ids) <= self.alike
        return alike and option.start == len(self.text) and not self._invokes(option)

    def _invokes(self, option: Option) -> bool:
        """Whether an invocation ends in the option."""
        if not self.invocation:
            return False
        before = self.text[max(0, len(self.text) - len(self.invocation) + 1) :]
        return last_place(self.invocation, [*before, *option.token_ids]) is not None

    def check(self, check: Callable[[list[int], SamplingParams], SamplingParams]) -> None:
        """Checks all requests by Capacity.check: the text, each option, and the longest of them together. Raises
        InvalidRequest naming `text` or `options`."""
        reports = SamplingParams(max_tokens=0, prompt_logprobs=0)
        for index, option in enumerate(self.options):
            with _renamed("options", f"options[{index}]: "):
                check(option.token_ids, reports)
        with _renamed("text"):
            check(self.text, self.requests[0].params if self._asked[0] < 0 else reports)
        longest = max(range(len(self.requests)), key=lambda number: len(self.requests[number].token_ids))
        if self._asked[longest] >= 0:
            with _renamed("options", f"the text with options[{self._asked[longest]}]: "):
                check(list(self.requests[longest].token_ids), self.requests[longest].params)

    def groups(self, most: int = MOST_TOKENS) -> Iterator[list[ScoreRequest]]:
        """The requests in their order, each group with at most so many tokens, or with one request."""
        group: list[ScoreRequest] = []
        room = most
        for request in self.requests:
            if group and len(request.token_ids) > room:
                yield group
                group, room = [], most
            group.append(request)
            room -= len(request.token_ids)
        yield group

    def scores(self, answers: Sequence[Sequence[TokenLogprobs | None]]) -> list[Score]:
        """answers: of each request its rows of log probabilities, of the answer or of the prompt; rows that are None
        may be left out. Raises ScoreAborted where they are missing."""
        if not all(answers):
            raise ScoreAborted("the score was aborted: the model's output is broken, or a request was ended")
        rows = dict(zip(self._asked, answers, strict=True))
        return [self._score(option, rows.get(index, ()), rows) for index, option in enumerate(self.options)]

    def _score(self, option: Option, own: Sequence[TokenLogprobs | None], rows: dict[int, Any]) -> Score:
        found = [rows[-1][0]] if self._after_text(option) else []
        found += [row for row in own if row is not None]
        told = [row[token] for token, row in zip(option.token_ids, found, strict=True)]
        greedy = all(each.rank == 1 for each in told)
        return Score(option.token_ids, [each.logprob for each in told], option.start, greedy)


@contextmanager
def _renamed(param: str, before: str = "") -> Iterator[None]:
    """Errors name this parameter."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{before}{error}", param, error.code) from None


def plan_score(
    text: Text,
    options: Sequence[Text],
    tokenizer: Encoder | None,
    alike: int = 0,
    invocation: tuple[int, ...] = (),
) -> ScorePlan:
    """Tokenizes and checks. A text and an option that are both strings are tokenized together; token ids stay as they
    are, and a string beside them is tokenized by itself. Raises InvalidRequest naming `text` or `options`."""
    if isinstance(options, str) or not isinstance(options, Sized) or not 1 <= len(options) <= MOST_OPTIONS:
        count = f"{len(options):,}" if isinstance(options, Sized) else type(options).__name__
        count = "a string" if isinstance(options, str) else count
        raise InvalidRequest(f"options must be a list of 1 to {MOST_OPTIONS:,} texts, got {count}", "options")
    strings = [each for each in (text, *options) if isinstance(each, str)]
    if strings and tokenizer is None:
        raise InvalidRequest("the model folder has no tokenizer: give token ids", "text")
    if tokenizer is None or not isinstance(text, str):
        ids = _own(text, tokenizer, "text")
        told = [Option(len(ids), _own(option, tokenizer, "options")) for option in options]
        return ScorePlan(*_checked(ids, told), alike, invocation)
    seam = _Seam(text, tokenizer, sum(isinstance(option, str) for option in options))
    return ScorePlan(*_checked(seam.ids, [seam.option(option) for option in options]), alike, invocation)


def _checked(text: list[int], options: list[Option]) -> tuple[list[int], list[Option]]:
    if not text:
        raise InvalidRequest("the text has no tokens: nothing would come before the options", "text")
    for index, option in enumerate(options):
        if not option.token_ids:
            raise InvalidRequest(f"options[{index}] adds no token to the text", "options")
        if not option.start:
            raise InvalidRequest(f"options[{index}] is joined with the whole text: give token ids", "options")
    return text, options


def _own(text: Text, tokenizer: Encoder | None, param: str) -> list[int]:
    """Tokenized by itself."""
    if isinstance(text, str):
        assert tokenizer is not None
        return tokenizer.encode(text, add_special_tokens=False)
    return token_ids(text, param)


class _Seam:
    """A text that is tokenized together with each option. Only its end is, if the end by itself has the tokens that it
    has in the text."""

    def __init__(self, text: str, tokenizer: Encoder, options: int) -> None:
        self.ids, self._tokenizer = tokenizer.encode(text), tokenizer
        self._head, self._tail, self._special = [], text, True
        at = text.rfind(" ", 0, max(0, len(text) - TAIL))
        for cut in (at, at + 1) if at > 0 else ():  # with the space before a word, and without
            tail = tokenizer.encode(text[cut:], add_special_tokens=False)
            if tail and self.ids[-len(tail) :] == tail:
                self._head, self._tail, self._special = self.ids[: -len(tail)], text[cut:], False
                break
        work = len(self._tail) * options
        if work > MOST_CHARACTERS:
            told = f"{options:,} options after {len(text):,} characters are too much to tokenize together"
            raise InvalidRequest(f"{told}: give the text as token ids, or fewer options", "text")

    def option(self, option: Text) -> Option:
        if not isinstance(option, str):
            return Option(len(self.ids), token_ids(option, "options"))
        whole = self._head + self._tokenizer.encode(self._tail + option, add_special_tokens=self._special)
        start = len(self._head)
        while start < min(len(whole), len(self.ids)) and whole[start] == self.ids[start]:
            start += 1
        return Option(start, whole[start:])


class QueueLimits(Protocol):
    """ServerSettings."""

    @property
    def max_queued_requests(self) -> int: ...
    @property
    def max_queued_tokens(self) -> int: ...


def at_once(longest: int, max_sequences: int, limits: QueueLimits) -> int:
    """How many of many requests, of at most `longest` tokens, the engine should have at a time: as many as run at once,
    and half of what may wait, so that others find a place."""
    return max(1, min(max_sequences, limits.max_queued_requests // 2, limits.max_queued_tokens // 2 // longest))
