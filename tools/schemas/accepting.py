"""Which texts a shape accepts, byte by byte, without a model."""

from __future__ import annotations

from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.engine.structured.compile import check, grammar_of, limits
from headrace.structured import Structured


class _Bytes:
    """A vocabulary of single bytes."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


class Accepting:
    """A shape's texts. Raises InvalidRequest for one that is refused."""

    def __init__(self, structured: Structured) -> None:
        check(structured, tokenizer())
        self._matcher = LLMatcher(tokenizer(), grammar_of(structured), log_level=0, limits=limits())

    def whole(self, text: str) -> bool:
        """Whether an answer may be this text."""
        return self._walked(text, ends=True)

    def begins(self, text: str) -> bool:
        """Whether an answer may begin with this text; one that was cut may end in part of a character."""
        return self._walked(text.rstrip("\ufffd"), ends=False)

    def _walked(self, text: str, ends: bool) -> bool:
        matcher = self._matcher.deep_copy()
        given = list(text.encode("utf-8", "surrogatepass"))
        walked = matcher.try_consume_tokens(given)
        return walked == len(given) and not matcher.is_error() and (not ends or matcher.is_accepting())
