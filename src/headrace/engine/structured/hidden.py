"""Added tokens out of the way of ordinary text, in a copy of tokenizer.json that llguidance reads.

llguidance keeps added tokens (`<|end|>`) apart from text, so that a text is never answered by a token that means
something. But it has forced text tokenized, and there the tokenizers library finds added tokens: an answer with such a
text then stops as an error. In the copy each of them has a name that no text contains; grammars call it by its id.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any


def apart(tokens: Mapping[str, int], special: Collection[str]) -> dict[str, int]:
    """Those of the added tokens that llguidance keeps apart from text."""
    return {text: token for text, token in tokens.items() if text in special or (text[:1], text[-1:]) == ("<", ">")}


def hidden_name(token: int) -> str:
    """What the copy calls a token."""
    return f"\0{token}\0"


def without_added(tokenizer_json: str, names: Mapping[str, int]) -> str:
    """The copy, where the tokens of these texts have hidden names."""
    made = json.loads(tokenizer_json)
    model = made["model"]
    for added in made["added_tokens"]:
        if added["content"] in names:
            added.update(content=hidden_name(added["id"]), special=True, normalized=False)
    model["vocab"] = _renamed(model["vocab"], names)
    if model.get("unk_token") in names:
        model["unk_token"] = hidden_name(names[model["unk_token"]])
    if model.get("merges"):  # a merge that makes a token which has another name now, or begins with one
        model["merges"] = [merge for merge in model["merges"] if not _meets(merge, names)]
    return json.dumps(made)


def _renamed(vocab: Any, names: Mapping[str, int]) -> Any:
    """By text, or as pairs of text and score."""
    if isinstance(vocab, dict):
        return {hidden_name(names[text]) if text in names else text: token for text, token in vocab.items()}
    return [[hidden_name(names[pair[0]]), *pair[1:]] if pair[0] in names else pair for pair in vocab]


def _meets(merge: Any, names: Mapping[str, int]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
