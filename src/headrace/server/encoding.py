"""Texts of clients become tokens, on the tokenizer's thread. A text far beyond the context is refused by its beginning:
tokenizing it whole would take a minute of processor time and gigabytes for the largest body."""

from __future__ import annotations

from collections.abc import Callable

from headrace.server.state import ServerState
from headrace.types import InvalidRequest

CHARACTERS = 8
"""A text of more characters for each token of the context is looked at in pieces first; tokens are mostly shorter."""
PIECE = 1 << 16
"""Characters; a cut moves the count by a few tokens."""
SPARE = 1.25

COUNTED = 4
"""Contexts that a text may have which is to be counted only."""


async def encoded(
    state: ServerState, encode: Callable[[str], list[int]], text: str, param: str, contexts: int = 1
) -> list[int]:
    """The tokens of a text. Raises InvalidRequest naming `param` for one that is far longer than so many contexts."""
    most = contexts * state.engine.capacity.max_model_len

    def work() -> list[int]:
        check_length(encode, text, most, param)
        return list(encode(text))

    return await state.in_tokenizer(work)


def check_length(encode: Callable[[str], list[int]], text: str, most: int, param: str) -> None:
    """Raises InvalidRequest for a text that has clearly more than `most` tokens, without tokenizing all of it."""
    if len(text) <= CHARACTERS * most:
        return
    count = 0
    for at in range(0, len(text), PIECE):
        count += len(encode(text[at : at + PIECE]))
        if count > SPARE * most + PIECE // 256:
            read = min(at + PIECE, len(text))
            part = (
                f": its first {read:,} have {count:,} tokens already" if read < len(text) else f" has {count:,} tokens"
            )
            told = f"a text of {len(text):,} characters{part}"
            raise InvalidRequest(
                f"{told}, and {most:,} are possible here; shorten it", param, "context_length_exceeded"
            )
