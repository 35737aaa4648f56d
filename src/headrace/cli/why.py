"""`headrace why`: what two requests have in common, and where the second leaves what the first has cached."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.cli.doctor import rows_of
from headrace.console import Trimmed, out
from headrace.engine.folders import model_folder
from headrace.engine.tokenizer import Tokenizer
from headrace.files import read_given
from headrace.server.chat_body import ChatBody
from headrace.server.errors import ApiError
from headrace.server.protocol import CompletionBody, parse_body
from headrace.server.replay import TokenTexts, replay
from headrace.server.reuse import Ids, Nearest, Reuse, Seen, common_tokens, described
from headrace.server.turns import rendered
from headrace.types import CHUNK

AROUND = 60
"""Characters that are shown before the place where two requests part."""

MOST_BYTES = 256 << 20
LONGEST_PATH = 24


def _end_of(path: Path) -> str:
    """Of a long path its end, so that there is room for what is told of it."""
    return str(path) if len(str(path)) <= LONGEST_PATH else f"..{str(path)[2 - LONGEST_PATH :]}"


def run(model: str, first: Path, second: Path, as_json: bool, template: Path | None = None) -> None:
    """Prints what they share. template: in place of the model's own. Raises ValueError for a file that is no request,
    and what Tokenizer raises."""
    tokenizer = Tokenizer(model_folder(model), template)
    try:
        one, other = _asked(tokenizer, first), _asked(tokenizer, second)
    finally:
        tokenizer.close()
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    near = Nearest(Seen(first.name, one.salt, one.ids), common_tokens(one.ids, other.ids), "salt")
    near = described(near, other.ids, other.messages, decode, least=0)
    chunks = min(near.common, len(other.ids) - 1, len(one.ids) - 1) // CHUNK * CHUNK
    reuse = Reuse(len(other.ids), max(0, chunks) if one.salt == other.salt else 0, near)
    before = decode(other.ids[: near.common].tolist())[-AROUND:]
    told = _too_short(near) if reuse.cause == "first" else reuse.told
    if as_json:
        sizes = {"tokens": [len(one.ids), len(other.ids)], "cached_tokens": reuse.cached, "before": before}
        parts = {"told": told, "common_tokens": near.common, "text": near.text or None}
        parts |= {"other_text": near.other_text or None, "models": [one.model, other.model]}
        print(json.dumps(reuse.asdict() | parts | sizes, indent=1))
        return
    rows = [
        (_end_of(first), f"{len(one.ids):,} tokens"),
        (_end_of(second), f"{len(other.ids):,} tokens"),
        ("alike", f"{near.common:,} tokens; in whole chunks of {CHUNK}: {reuse.cached:,}"),
        ("why", told),
        ("behind", repr(before)),
    ]
    if one.model != other.model:
        note = "an adapter's cached prefixes are its own (docs/adapters.md)"
        rows.append(("models", f"{one.model!r} and {other.model!r}: {note}"))
    out.print(Trimmed(rows_of(rows)), end="")


def _too_short(near: Nearest) -> str:
    """What is told of requests that have less than a chunk in common."""
    parts = f"at token {near.common} {near.text!r} here, {near.other_text!r} there"
    return f"they have no whole chunk of {CHUNK} tokens in common" + (f": {parts}" if near.text else "")


class Asked(NamedTuple):
    """A request. ids: its prompt; messages: of a conversation; salt: its cache_salt; model: whom it asks."""

    ids: Ids
    messages: list[dict[str, Any]]
    salt: str | None
    model: str | None


def _asked(tokenizer: Tokenizer, path: Path) -> Asked:
    try:
        raw = read_given(path, MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name a request's body as JSON") from None
    try:
        body = json.loads(raw)
        if isinstance(body, dict) and "messages" in body:
            chat = parse_body(ChatBody, raw)
            turn = chat.turn()
            read = rendered(tokenizer, turn)
            ids = np.array(replay(TokenTexts(tokenizer), read.text, read.carried).ids, np.int32)
            return Asked(ids, turn.messages, chat.cache_salt, chat.model)
        completion = parse_body(CompletionBody, raw)
        given = completion.prompts()
    except (ApiError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no request to /v1/chat/completions or /v1/completions: {error}") from None
    if len(given) != 1:
        raise ValueError(f"{path} has {len(given)} prompts; compare requests of one prompt each")
    tokens = tokenizer.encode(given[0]) if isinstance(given[0], str) else given[0]
    return Asked(np.array(tokens, np.int32), [], completion.cache_salt, completion.model)
