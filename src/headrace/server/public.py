"""--public-prefix-file: texts of the operator whose tokens requests of all cache_salts share.

A request with a salt whose prompt begins with such tokens shares their whole chunks as if it had sent
public_prefix_tokens. Only tokens of the files and of the model's template become public, never a client's. A file is
taken as a system prompt, as the template renders it, and as the beginning of a text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.files import read_given
from headrace.types import CHUNK, InvalidRequest

MOST_BYTES = 4 << 20
"""Of one file: about a million tokens."""

FIRST_WORDS = ("0", "A")
"""Two beginnings of a user's turn: what is rendered before them is the same, whoever asks."""


def read_texts(paths: str | None) -> dict[str, str]:
    """Path -> text. Raises ValueError, naming the file, for one that cannot be read, is empty or too large."""
    texts = {}
    for path in (paths or "").split(os.pathsep) if paths is not None else ():
        try:
            texts[path] = read_given(Path(path), MOST_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"public_prefix_file {path!r}: {why or error}") from None
        if not texts[path].strip():
            raise ValueError(f"public_prefix_file {path!r} is empty")
    return texts


@dataclass(frozen=True, slots=True)
class PublicPrefixes:
    """What all salts share. chat, text: by path, how many tokens; -1 where the template takes no system prompt."""

    sequences: tuple[list[int], ...] = ()
    chat: dict[str, int] | None = None
    text: dict[str, int] | None = None

    def tokens(self, prompt: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt that are public, in whole chunks."""
        return max((common(prompt, each) for each in self.sequences), default=0) // CHUNK * CHUNK

    @property
    def lines(self) -> list[str]:
        """For the start: each file with its tokens."""
        return [
            f"{path}: {self.text[path]:,} tokens" + (f", {chat:,} as a system prompt" if chat >= 0 else "")
            for path, chat in (self.chat or {}).items()
            if self.text is not None
        ]


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Tokens, or characters, with which both begin."""
    same, most = 0, min(len(one), len(other))
    while same < most:  # halves the piece that holds the first difference: comparing slices is fast
        half = (same + most + 1) // 2
        if one[same:half] == other[same:half]:
            same = half
        else:
            most = half - 1
    return same


def prefixes_of(texts: dict[str, str], tokenizer: Any) -> PublicPrefixes:
    """Renders and encodes, which takes a while. Raises ValueError where the model has no tokenizer."""
    if not texts:
        return PublicPrefixes()
    if tokenizer is None:
        raise ValueError("public_prefix_file needs a tokenizer, and the model folder has none")
    plain = {path: tokenizer.encode(text) for path, text in texts.items()}
    chats = {path: _rendered(tokenizer, text) for path, text in texts.items()}
    sequences = [*plain.values(), *(chat for chat in chats.values() if chat is not None)]
    return PublicPrefixes(
        tuple(sequences),
        {path: -1 if chat is None else len(chat) for path, chat in chats.items()},
        {path: len(tokens) for path, tokens in plain.items()},
    )


def _rendered(tokenizer: Any, text: str) -> list[int] | None:
    """The tokens before the user's first turn; None where the template takes no system prompt."""
    if not tokenizer.has_chat_template:
        return None
    system = {"role": "system", "content": text}
    try:
        one, other = (
            tokenizer.encode_chat(tokenizer.render_chat([system, {"role": "user", "content": word}]))
            for word in FIRST_WORDS
        )
    except InvalidRequest:
        return None
    return list(one[: common(one, other)])
