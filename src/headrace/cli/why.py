"""`headrace why`: what two requests have in common, and where the second leaves what the first has cached."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

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
        one, (ids, messages) = _prompt(tokenizer, first)[0], _prompt(tokenizer, second)
    finally:
        tokenizer.close()
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    near = Nearest(Seen(first.name, None, one), common_tokens(one, ids), "evicted")
    near = described(near, ids, messages, decode)
    cached = min(near.common, len(ids) - 1, len(one) - 1) // CHUNK * CHUNK
    reuse = Reuse(len(ids), max(0, cached), near)
    before = decode(ids[: near.common].tolist())[-AROUND:]
    told = f"they have no whole chunk of {CHUNK} tokens in common" if reuse.cause == "first" else reuse.told
    if as_json:
        sizes = {"tokens": [len(one), len(ids)], "cached_tokens": reuse.cached, "before": before}
        print(json.dumps(reuse.asdict() | {"told": told, "common_tokens": near.common} | sizes, indent=1))
        return
    rows = [
        (_end_of(first), f"{len(one):,} tokens"),
        (_end_of(second), f"{len(ids):,} tokens"),
        ("alike", f"{near.common:,} tokens; in whole chunks of {CHUNK}: {reuse.cached:,}"),
        ("why", told),
        ("behind", repr(before)),
    ]
    out.print(Trimmed(rows_of(rows)), end="")


def _prompt(tokenizer: Tokenizer, path: Path) -> tuple[Ids, list[dict[str, Any]]]:
    """Tokens of a request's prompt, and the messages of a conversation."""
    try:
        raw = read_given(path, MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name a request's body as JSON") from None
    try:
        body = json.loads(raw)
        if isinstance(body, dict) and "messages" in body:
            turn = parse_body(ChatBody, raw).turn()
            read = rendered(tokenizer, turn)
            return np.array(replay(TokenTexts(tokenizer), read.text, read.carried).ids, np.int32), turn.messages
        given = parse_body(CompletionBody, raw).prompts()
    except (ApiError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no request to /v1/chat/completions or /v1/completions: {error}") from None
    if len(given) != 1:
        raise ValueError(f"{path} has {len(given)} prompts; compare requests of one prompt each")
    ids = tokenizer.encode(given[0]) if isinstance(given[0], str) else given[0]
    return np.array(ids, np.int32), []
