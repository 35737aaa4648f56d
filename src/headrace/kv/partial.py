"""Chunks by their place in the tree: for a prompt that begins like one of them and goes on otherwise.

Whole chunks are shared. Of a chunk that differs further on the keys and values of the first rows are the same, to the
bit: they are copied, and the prompt is computed from there (engine.row_copies).

    in the tree | the document, its last | 24 tokens of a question |
    a prompt    | the document, its last | another question ..     |
                |<------- copied ------->|<------ computed ------->|

Of all chunks at a place those that begin most alike stand next to each other once they are sorted by their tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from headrace.kv.node import Node

Place = tuple[bytes, bytes, bytes]
"""What a chunk's name depends on beside its tokens: the name of the chunk before it, salt and mark (kv.tree.chain)."""
LEAST = 8
"""Rows for the sake of which a chunk is kept or copied: what all prompts of a model begin with is less."""
WORD = 4
"""Bytes of a token."""


def words(tokens: Sequence[int]) -> bytes:
    """Tokens in an order of bytes that sorts as they do."""
    return np.array(tokens, dtype=">u4").tobytes()


def common(one: bytes, other: bytes) -> int:
    """Tokens with which both begin; of `words`."""
    length = min(len(one), len(other))
    differ = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return (length - (differ.bit_length() + 7) // 8) // WORD


class PartialMatches:
    """The complete chunks of a tree whose keys and values are there."""

    def __init__(self) -> None:
        self._places: dict[Place, tuple[list[bytes], list[Node]]] = {}

    def enter(self, node: Node, place: Place, tokens: Sequence[int]) -> None:
        """A chunk of these tokens may be copied from now on."""
        node.place, node.words = place, words(tokens)
        keys, nodes = self._places.setdefault(place, ([], []))
        at = bisect_left(keys, node.words)
        keys.insert(at, node.words)
        nodes.insert(at, node)

    def leave(self, node: Node) -> None:
        """The chunk leaves the tree."""
        if node.place is None:
            return
        keys, nodes = self._places[node.place]
        at = bisect_left(keys, node.words)
        del keys[at], nodes[at]
        if not keys:
            del self._places[node.place]
        node.place = None

    def longest(self, place: Place, wanted: bytes) -> tuple[Node | None, int]:
        """The chunk at a place that begins most like `wanted`, and how many of its tokens are the same."""
        best: tuple[Node | None, int] = (None, 0)
        if place in self._places:
            keys, nodes = self._places[place]
            at = bisect_left(keys, wanted)
            for near in range(max(0, at - 1), min(len(keys), at + 1)):
                if (rows := common(keys[near], wanted)) > best[1]:
                    best = nodes[near], rows
        return best

    def check(self, nodes: dict[bytes, Node]) -> None:
        """Raises AssertionError unless the chunks are of the tree, complete and in order."""
        for place, (keys, held) in self._places.items():
            assert keys == sorted(keys) and len(keys) == len(held) > 0, "chunks of a place are out of order"
            for key, node in zip(keys, held, strict=True):
                assert (node.place, node.words) == (place, key), "a chunk stands at another place"
                assert node.complete and nodes.get(node.digest or b"") is node, "a chunk has left the tree"
