"""Kimi's tokenizer as it is published: tiktoken.model, a token and its rank in a line, and what tokenizer_config.json
names. Its own code, which says how text is cut into words, is not run.

tiktoken merges the two neighbours first that make the token of the lowest rank; so does a byte-level BPE whose merges
are all ways to make a token of two, by that token's rank.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.engine.gguf_words import WORDS
from headrace.engine.pieces import spelled
from headrace.engine.template_file import template_beside
from headrace.engine.tokenizer_file import MAX_TOKENIZER, backed_by, halves
from headrace.files import read_given
from headrace.models.files import read_json
from headrace.types import UnsupportedModel

NAME, CLASS = "tiktoken.model", "TikTokenTokenizer"
RESERVED = 256
"""Special tokens behind the others, most of them without a name."""
LONGEST = 1024
"""Bytes of a token; Kimi's have up to 256."""
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_there(folder: Path) -> bool:
    """Whether it is the folder's tokenizer: a tokenizer.json goes before it."""
    return (folder / NAME).is_file() and not (folder / "tokenizer.json").is_file()


def load_tokenizer(folder: Path) -> Any:
    """As transformers' fast tokenizers are. Raises UnsupportedModel for that of another model, ValueError for a file
    that is not sound."""
    said = read_json(folder / "tokenizer_config.json")
    if said.get("tokenizer_class") != CLASS:
        raise UnsupportedModel(f"{folder / NAME} is read of Kimi's models; put this one's tokenizer.json beside it")
    ids = _ranks(folder / NAME)
    named = {name: token for name in NAMED if (token := _content(said.get(name))) is not None}
    template = template_beside(folder) or said.get("chat_template")
    named |= {} if template is None else {"chat_template": template}
    return backed_by(_byte_level(ids, _reserved(said, len(ids))), named)


def _ranks(path: Path) -> dict[str, int]:
    """Tokens, as byte-level vocabularies spell them -> their ranks, which are 0, 1, 2, .."""
    ids: dict[str, int] = {}
    try:
        for line in read_given(path, MAX_TOKENIZER).splitlines():
            if line:
                token, rank = line.split()
                ids[spelled(base64.b64decode(token, validate=True))] = int(rank)
    except (ValueError, binascii.Error):
        raise ValueError(f"{path} is damaged; download it again") from None
    if sorted(ids.values()) != list(range(len(ids))) or not ids or max(map(len, ids)) > LONGEST:
        raise ValueError(f"{path} is damaged; download it again")
    return ids


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _reserved(said: dict[str, Any], first: int) -> list[str]:
    """The tokens from `first` on."""
    given = said.get("added_tokens_decoder") or {}
    names = (_content(given.get(str(number))) for number in range(first, first + RESERVED))
    return [name or f"<|reserved_token_{first + place}|>" for place, name in enumerate(names)]


def _byte_level(ids: dict[str, int], reserved: list[str]) -> Tokenizer:
    words = WORDS["kimi-k2"]
    merges = [
        pair
        for token in sorted(ids, key=ids.__getitem__)
        for pair in sorted(halves(token, ids), key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    ]
    made = Tokenizer(models.BPE(ids, merges, ignore_merges=words.whole))
    made.pre_tokenizer = pre_tokenizers.Sequence([step() for step in words.steps])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in reserved])
    return made
