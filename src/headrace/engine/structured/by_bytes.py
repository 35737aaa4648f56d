"""A vocabulary for llguidance from the bytes of each token alone. Imports neither numpy nor a tokenizer."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper


def by_bytes(tokens: list[bytes], special: list[int], ends: list[int]) -> LLTokenizer:
    """tokens, by their ids; the special ones; those that end a text. A model without any of these gets one beyond its
    logits, which is never drawn. Raises ValueError for tokens that cannot be used."""
    return LLTokenizer(TokenizerWrapper(_ByBytes(tokens, special, ends)), eos_token=ends or None)


class _ByBytes:
    """What TokenizerWrapper asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], ends: list[int]) -> None:
        self.tokens, self.special_token_ids = list(tokens), list(special)
        if not ends:
            self.special_token_ids.append(len(self.tokens))
            self.tokens.append(b"<end of text>")
        self.eos_token_id = ends[0] if ends else len(tokens)
        hidden = set(self.special_token_ids)
        self._spelled = {data: token for token, data in enumerate(self.tokens) if data and token not in hidden}
        self._longest = max(map(len, self._spelled), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The longest tokens first: the tokenizer's own way may put a space before a text. It ends before what no token
        spells."""
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._spelled), None)
            if end is None:
                break
            found.append(self._spelled[text[at:end]])
            at = end
        return found
