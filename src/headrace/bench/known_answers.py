"""A checkpoint whose greedy answers are known, and prompts that those answers repeat in part.

The checkpoint has a shape's sizes, so a step costs what it costs with any other weights. Its residual stream is nearly
the embedding of the newest token, and the head's row of a token is the embedding, of length 1, of the token before it
in a cycle through the vocabulary. So the logit of the next token is about sqrt(hidden), of any other about normal: with
1,024 hidden 32, against 6 at most.

So whatever the prompt, a token is followed by the next one in the cycle, by a margin that no rounding bridges, and no
answer repeats itself before the cycle ends. A document holds parts of the answer, word for word, between others.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.caches import cache_folder, notice
from headrace.bench.shapes import SHAPES, CheckpointShape, is_written, random_weights, save_checkpoint, weight_bytes
from headrace.console import err

SIZE = 64.0
"""Root mean square of an embedding. What sixteen layers of random weights add is about 3."""
FIRST = 10
"""Tokens below are special ones for somebody: they are in no cycle, and nothing is followed by them."""


class TokenCycle:
    """The order of the tokens of a vocabulary: token order[i] is followed by order[i + 1], the last by the first."""

    def __init__(self, vocab: int) -> None:
        self.order = list(range(FIRST, vocab))
        random.Random(vocab).shuffle(self.order)
        self.next = dict(zip(self.order, [*self.order[1:], self.order[0]], strict=True))

    def answer(self, token: int, count: int) -> list[int]:
        """The greedy answer to a prompt that ends with this token."""
        found: list[int] = []
        for _ in range(count):
            token = self.next[token]
            found.append(token)
        return found


def known_checkpoint(model: str) -> Path:
    """The folder of such a checkpoint of a shape, written on first use. Raises ValueError for an unknown shape."""
    if model not in SHAPES:
        raise ValueError(f"model must be one of {', '.join(SHAPES)}; got {model!r}")
    folder, shape = cache_folder() / "bench" / f"{model}-known", SHAPES[model]
    if not is_written(shape, folder):
        err.print(notice(f"{model}, known answers", weight_bytes(shape), folder), style="dim", markup=False)
        write_known(shape, folder)
    return folder.resolve()


def write_known(shape: CheckpointShape, folder: Path) -> Path:
    """Writes it into `folder` (no tokenizer); returns the folder."""
    import torch

    weights, cycle = random_weights(shape), TokenCycle(shape.vocab)
    embedding = weights["model.embed_tokens.weight"].float()
    embedding /= embedding.norm(dim=1, keepdim=True)
    head = torch.zeros_like(embedding)
    head[torch.tensor(list(cycle.next.values()))] = embedding[torch.tensor(list(cycle.next))]
    weights["model.embed_tokens.weight"] = (embedding * SIZE * shape.hidden**0.5).bfloat16()
    weights["lm_head.weight"] = head.bfloat16()
    return save_checkpoint(shape, weights, folder)


@dataclass(frozen=True, slots=True)
class Quoting:
    """How an answer repeats its document: quotes of `quote` tokens in the mean, and between them stretches that are
    new, whose share of the answer is `new`. Lengths of both are distributed exponentially."""

    name: str
    quote: float
    new: float

    def draw(self, rng: random.Random, cycle: TokenCycle, document: int, answer: int) -> tuple[list[int], int]:
        """A document of so many tokens, or more where the quotes need them, and the token that asks for the answer:
        behind anything that ends with it come so many tokens, which repeat the document as said."""
        asked = rng.choice(cycle.order)
        quotes = list(self._quotes(rng, cycle.answer(asked, answer)))
        left = max(document - sum(map(len, quotes)), len(quotes) + 1)
        between = left // (len(quotes) + 1)
        found = rng.choices(cycle.order, k=left - between * len(quotes))
        for quote in quotes:
            found += quote + rng.choices(cycle.order, k=between)
        return found, asked

    def _quotes(self, rng: random.Random, answer: list[int]) -> Iterator[list[int]]:
        """Parts of the answer, in its order."""
        stretch = self.quote * self.new / (1 - self.new) if self.new < 1 else math.inf
        place = self._length(rng, stretch)
        while place < len(answer):
            count = self._length(rng, self.quote)
            yield answer[place : place + count]
            place += count + self._length(rng, stretch)

    @staticmethod
    def _length(rng: random.Random, mean: float) -> int:
        """At least one token: of a quote, and of what parts two of them."""
        return sys.maxsize if math.isinf(mean) else 1 + int(rng.expovariate(1 / max(mean - 0.5, 1e-9)))


RANDOM = Quoting("random", 1, 1.0)
QUOTINGS = {
    each.name: each
    for each in (
        Quoting("edits", 64, 0.05),  # code with edits
        Quoting("quotes", 32, 0.2),  # summaries with quotes
        Quoting("misleading", 4, 0.5),  # what the answer has said last stands in the document, before something else
        RANDOM,
    )
}
